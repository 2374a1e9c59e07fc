"""FP4 kernels: opaque to the tracer, compiled ahead of time, proven."""
