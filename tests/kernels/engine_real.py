"""Imports real SGLang modules as an engine on SM120 does, and tells what they ended up with, as JSON.

    python engine_real.py SGLANG_DIR {hook|plugin|none} [child]

`hook`: hearth_fp4.pth is in a site folder of this interpreter (the caller saw to it). `plugin`: SGLang's
own loader calls the entry point, after the modules were imported, as in a scheduler. With `child` all of it
happens in a process made by multiprocessing's spawn.
"""

import json
import multiprocessing
import sys
from pathlib import Path

MODULES = (
    "sglang.srt.layers.quantization.modelopt_quant",
    "sglang.srt.layers.moe.token_dispatcher.standard",
    "sglang.srt.layers.moe.token_dispatcher.flashinfer",
    "sglang.srt.layers.moe.moe_runner.flashinfer_trtllm",
)
NAMES = (
    "fp4_quantize",
    "fp4_quantize_flashinfer",
    "nvfp4_block_scale_interleave",
    "nvfp4_block_scale_interleave_flashinfer",
)


def look(engine, way):
    sys.path[:0] = [engine, str(Path(__file__).parent)]
    import engine_shims

    engine_shims.install()
    import sglang.srt.utils.common as common

    common.is_sm120_supported = lambda device=None: True
    modules = [__import__(name, fromlist=["_"]) for name in MODULES]
    if way == "plugin":
        from sglang.srt.plugins import load_plugins

        load_plugins()
    found = {
        m.__name__: {n: vars(m)[n].__module__ for n in NAMES if callable(vars(m).get(n))} for m in modules
    }
    return {"modules": found, "traceable": traceable(modules[0].fp4_quantize)}


def traceable(function):
    from hearth.kernels import trace_device
    from hearth.kernels.trace import trace_once
    from hearth.kernels.trace_cases import _call

    with trace_device.pretend():
        return trace_once(_call("fp4_quantize", function)) is None


def child(engine, way, answer):
    answer.put(look(engine, way))


def main():
    engine, way, *rest = sys.argv[1:]
    if rest:
        context = multiprocessing.get_context("spawn")
        answer = context.Queue()
        process = context.Process(target=child, args=(engine, way, answer), name="scheduler_TP0")
        process.start()
        print(json.dumps(answer.get(timeout=600)))
        process.join()
    else:
        print(json.dumps(look(engine, way)))


if __name__ == "__main__":
    main()
