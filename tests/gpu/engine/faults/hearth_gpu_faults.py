"""Test stand-in: faults inside a real SGLang on a GPU, by its own plugin mechanism. Never in the wheel.

Put this folder on the engine's PYTHONPATH. HEARTH_GPU_FAULT, for the linear layers of an unquantized model:

    raw_fp4      each calls FlashInfer's raw `fp4_quantize` on its input, as ModelOptFp4LinearMethod does in
                 SGLang <= 0.5.11; the result is used with factor zero
    hearth_fp4   the same, and Hearth's plugin then puts its op in the function's place. The plugin's own look
                 at the version is skipped: SGLang 0.5.17 isn't one that needs it
    none         nothing

HEARTH_GPU_TRIGGER names a file: when it exists at a decode step, a kernel writes where it must not.
"""

import os
import sys
from pathlib import Path

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
UNMAPPED = 0x7000_0000_0000


def install() -> None:
    """Called by SGLang in each of its processes."""
    fault = os.environ.get("HEARTH_GPU_FAULT") or "none"
    if fault not in ("none", "raw_fp4", "hearth_fp4"):
        raise SystemExit(f"HEARTH_GPU_FAULT={fault}: not a fault; see tests/gpu/engine/faults")
    if fault != "none":
        put_fp4_in_linear_layers(with_op=fault == "hearth_fp4")
    trigger = os.environ.get("HEARTH_GPU_TRIGGER")
    if trigger:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(f"{RUNNER}.forward", trigger_hook(trigger), HookType.AROUND)


# --- FlashInfer's fp4_quantize in the path of a linear layer ---


def put_fp4_in_linear_layers(with_op: bool) -> None:
    """Patch UnquantizedLinearMethod.apply."""
    import torch
    from flashinfer import fp4_quantize
    from sglang.srt.layers.quantization import unquant

    original = unquant.UnquantizedLinearMethod.apply
    unquant.fp4_quantize = fp4_quantize

    def apply(self, layer, x, bias=None):
        scale = torch.ones(1, dtype=torch.float32, device=x.device)
        packed, _ = unquant.fp4_quantize(x, scale)
        return original(self, layer, x, bias) + packed[..., :1].to(x.dtype) * 0

    unquant.UnquantizedLinearMethod.apply = apply
    if with_op:
        from hearth.kernels import ops, plugin

        ops.ENGINE_OP = "hearth::none"  # SGLang 0.5.17 has an op of its own; Hearth's is wanted here
        plugin._replace()
    print(f"fault: fp4_quantize is {unquant.fp4_quantize}", file=sys.stderr, flush=True)


# --- a kernel that writes where it must not ---


def trigger_hook(trigger: str):
    """Return the hook around ModelRunner.forward."""

    def forward(original, runner, forward_batch, *args, **kwargs):
        if forward_batch.forward_mode.is_decode() and os.path.exists(trigger):  # noqa: PTH110  each step
            Path(trigger).unlink(missing_ok=True)
            illegal_write()
        return original(runner, forward_batch, *args, **kwargs)

    return forward


def illegal_write() -> None:
    """Write to an address that isn't mapped; the error shows at the next synchronization."""
    import torch
    import wild_kernel

    wild_kernel.wild[(1,)](torch.full((1,), UNMAPPED, dtype=torch.int64, device="cuda"))
