"""The machine under the engine: its GPUs and its kernel log."""
