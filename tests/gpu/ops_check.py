"""FP4 ops on a real GPU: right, traceable, capturable, and how fast. Made for a Hopper without a network.

    python3 tests/gpu/ops_check.py PAYLOAD.tar.xz|installed OUT.json [SECTION ...]

PAYLOAD comes from tests/gpu/payload.py; `installed` takes the FlashInfer that this Python has. Needs torch
with CUDA, Triton, nvcc and ninja. FlashInfer's sm_90 FP4 kernels are empty, so all that looks at results runs
on the emulated build (emulate_fp4.py: brought along in the payload, or compiled here); timings of first calls
use the stock sources. Each section is a process of its own with a time limit; OUT is written after each one,
so a cut-off run keeps what it had. About five minutes on 16 cores; with names of sections, only those that
need the emulated library.
"""

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
APP = HERE.parents[2] / "app"
WORK = Path(os.environ.get("HEARTH_GPU_WORK", "/tmp/hearth-gpu"))
SHAPES = ((1, 6144), (16, 6144), (100, 512), (512, 6144), (2048, 2048))
BROUGHT = "emulated/fp4_quantization_90.so"
"""Where the payload has the emulated library (tests/gpu/bake_emulated.py)."""
EIGHT = 8
CALLS, ROUNDS = 300, 15


# --- the parent: variants of the package, one process a section ---


class Run:
    """The results so far, on disk after each step."""

    def __init__(self, out: Path) -> None:
        self.out, self.started = out, time.monotonic()
        self.results: dict[str, object] = {}

    def step(self, name: str, work, *args) -> object:
        """Run one step; its result or its error goes into the document either way."""
        began = time.monotonic()
        try:
            value = work(*args)
        except Exception as error:
            value = {"error": f"{type(error).__name__}: {error}"[-3000:]}
        self.results[name] = value
        self.results.setdefault("seconds", {})[name] = round(time.monotonic() - began, 1)
        self.out.write_text(json.dumps(self.results, indent=1))
        print(f"[{time.monotonic() - self.started:5.0f} s] {name}: {json.dumps(value)[:400]}", flush=True)
        return value


def unpack(payload: Path) -> str:
    shutil.rmtree(WORK, ignore_errors=True)
    (WORK / "stock").mkdir(parents=True)
    if str(payload) == "installed":
        for name in ("flashinfer", "tvm_ffi"):
            installed = Path(importlib.util.find_spec(name).origin).parent
            shutil.copytree(installed, WORK / "stock" / name)
    else:
        with tarfile.open(payload) as archive:
            archive.extractall(WORK / "stock", filter="data")
    for name in ("aot", "emu"):  # hard links: patching replaces files, it doesn't write into them
        subprocess.run(["cp", "-al", str(WORK / "stock"), str(WORK / name)], check=True)
    return "unpacked"


def child(variant: str, section: str, *args: str, limit: int = 240, **env: str) -> subprocess.Popen:
    variables = os.environ | {
        "PYTHONPATH": f"{WORK / variant}:{APP}",
        "FLASHINFER_WORKSPACE_BASE": str(WORK / "caches" / variant),
        "TORCHINDUCTOR_CACHE_DIR": str(WORK / "inductor"),
    }
    variables |= env
    Path(variables["FLASHINFER_WORKSPACE_BASE"]).mkdir(parents=True, exist_ok=True)
    command = ["timeout", "-k", "5", str(limit), sys.executable, str(HERE), "--section", section, *args]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen) -> object:
    out, err = process.communicate()
    if process.returncode != 0 or not out.strip():
        raise RuntimeError(f"exit {process.returncode}: {err[-2500:]}")
    return json.loads(out.strip().splitlines()[-1])


def together(variant: str, cache: str) -> list:
    """Eight processes that import first, then make their first call at the same moment."""
    meeting = WORK / f"meet-{cache}"
    meeting.mkdir()
    base = str(WORK / "caches" / cache)
    crowd = [
        child(variant, "first_call", str(meeting), str(i), FLASHINFER_WORKSPACE_BASE=base)
        for i in range(EIGHT)
    ]
    deadline = time.monotonic() + 120
    while len(list(meeting.glob("ready-*"))) < EIGHT and time.monotonic() < deadline:
        time.sleep(0.05)
    (meeting / "go").touch()
    return [answer(process) for process in crowd]


def place_aot(built: str, variant: str) -> str:
    """Copy the library that a JIT run left in a cache to where the variant's package looks for AOT ones."""
    library = next((WORK / "caches" / built).rglob("fp4_quantization_90.so"))
    target = WORK / variant / "flashinfer" / "data" / "aot" / "fp4_quantization_90" / library.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(library, target)
    return f"{library.stat().st_size} bytes"


def emulated() -> object:
    """The library with working kernels, where the `emu` package looks for it."""
    brought = WORK / "stock" / BROUGHT
    if brought.is_file():
        target = WORK / "emu" / "flashinfer" / "data" / "aot" / brought.stem / brought.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(brought, target)
        return "brought along"
    built = answer(child("emu", "first_call", limit=900))
    place_aot("emu", "emu")
    return {"compiled_here": built}


def path_without_nvcc() -> str:
    """PATH with the folders that hold nvcc replaced by links to everything else in them."""
    parts = []
    for number, folder in enumerate(filter(None, os.environ["PATH"].split(":"))):
        if (Path(folder) / "nvcc").exists():
            others = WORK / f"path-{number}"
            others.mkdir()
            for tool in Path(folder).iterdir():
                if "nvcc" not in tool.name:
                    (others / tool.name).symlink_to(tool)
            folder = str(others)
        parts.append(folder)
    return ":".join(parts)


def sealed() -> object:
    """No nvcc to be found, compiling switched off."""
    path = path_without_nvcc()
    env = {"PATH": path, "CUDA_HOME": "/nonexistent", "FLASHINFER_DISABLE_JIT": "1"}
    aot = answer(child("aot", "first_call", **env))
    jit = child("stock", "first_call", FLASHINFER_WORKSPACE_BASE=str(WORK / "caches" / "sealed"), **env)
    _, err = jit.communicate()
    refused = (err.strip().splitlines() or [""])[-1][:300]
    return {"nvcc_found": shutil.which("nvcc", path=path), "aot": aot, "without_aot": refused}


def environment() -> object:
    def line(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return (
            (done.stdout or done.stderr).strip().splitlines()[-1]
            if done.returncode == 0
            else done.stderr[:200]
        )

    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": line("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "nvcc": line("nvcc", "--version"),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "command": f"python3 tests/gpu/ops_check.py {' '.join(Path(a).name for a in sys.argv[1:])}",
    }


def emulated_sources() -> object:
    sys.path.insert(0, str(HERE.parent))
    import emulate_fp4

    return emulate_fp4.emulate(WORK / "emu" / "flashinfer")


def main(payload: Path, out: Path, *only: str) -> None:
    run = Run(out)
    run.step("environment", environment)
    run.step("unpack", unpack, payload)
    run.step("emulated_sources", emulated_sources)
    run.step("emulated_library", emulated)
    for section in only or ("selftest", "opcheck", "graph", "overhead", "compiled"):
        run.step(section, lambda name=section: answer(child("emu", name, FLASHINFER_DISABLE_JIT="1")))
    if not only:
        first_calls(run)
    run.results["total_seconds"] = round(time.monotonic() - run.started, 1)
    out.write_text(json.dumps(run.results, indent=1))


def first_calls(run: Run) -> None:
    """Seconds to the first call, compiled on the spot and ahead of time; the trace gate."""
    run.step("jit_cold", lambda: answer(child("stock", "first_call")))
    run.step("jit_warm", lambda: answer(child("stock", "first_call")))
    run.step("place_aot", place_aot, "stock", "aot")
    for attempt in (1, 2, 3):
        run.step(f"aot_{attempt}", lambda: answer(child("aot", "first_call")))
    run.step("aot_eight", together, "aot", "eight-aot")
    run.step("sealed", sealed)
    run.step("trace_gate", lambda: answer(child("aot", "gate")))
    run.step("jit_cold_eight", together, "stock", "eight")


# --- the sections: each runs in its own process and prints one JSON line ---


def first_call(meeting: str = "", number: str = "") -> object:
    began = time.perf_counter()
    import torch

    torch_at = time.perf_counter()
    import flashinfer

    flashinfer_at = time.perf_counter()
    x, scale = torch.randn(16, 6144, device="cuda").bfloat16(), torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    if meeting:
        Path(meeting, f"ready-{number}").touch()
        while not Path(meeting, "go").exists():
            time.sleep(0.001)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        flashinfer.fp4_quantize(x, scale)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {
        "import_torch": torch_at - began,
        "import_flashinfer": flashinfer_at - torch_at,
        "first": times[0],
        "second": times[1],
        "third": times[2],
        "torch": torch.__version__,
        "flashinfer": flashinfer.__version__,
    }


def ways() -> dict:
    """Every way to call the quantizer, by name; `direct` is FlashInfer's own function."""
    import torch

    from hearth.kernels import ops

    raw = ops.raw_function("fp4_quantize")
    ops._define("fp4_quantize", ops._DEFINITIONS["fp4_quantize"](raw, ops.Traits.of("0.7.2")))
    ours = ops._CALLS["fp4_quantize"](raw, ops.resolve("hearth::fp4_quantize"))

    @torch.library.custom_op("hearthcheck::decorated", mutates_args=())
    def decorated(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return raw(x, scale)

    @decorated.register_fake
    def _(x, scale):
        return ops._fake_quantize(x, 16, ops.Layout.SWIZZLED_128X4, ops.Traits.of("0.7.2"))

    # What the plugin installs (eager calls go straight to FlashInfer), and its op through the dispatcher.
    found = {"direct": raw, "hearth": ops._when_traced(raw, ours), "hearth_op": ours, "decorator": decorated}
    if ops.exists(ops.BUILTIN_OP):
        found["builtin"] = ops.resolve(ops.BUILTIN_OP)
    return found


def data(shape, seed):
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    return x, (448.0 * 6.0 / x.float().abs().max()).reshape(1)


def same(got, want) -> dict:
    """Byte for byte; scales also without their padding, which a kernel need not write."""
    from hearth.kernels.selftest import unswizzle

    rows, blocks = want[0].shape[0], want[0].shape[1] // 8
    inner = [unswizzle(sf.view(want[1].dtype), rows, blocks) for sf in (got[1], want[1])]
    return {
        "codes": bool((got[0] == want[0]).all()),
        "scales": bool((inner[0] == inner[1]).all()),
        "padding": bool((got[1] == want[1]).all()),
    }


def selftest() -> object:
    from hearth.kernels import ops
    from hearth.kernels.selftest import self_test

    out = {}
    for name in ("direct", "hearth", "builtin"):
        call = ways_once().get(name)
        if call:
            result = self_test(call)
            out[name] = {"status": result.status, "reason": result.reason}
    out["chosen"] = ops.fp4_quantize_op().qualname
    return out


_WAYS: dict = {}


def ways_once() -> dict:
    if not _WAYS:
        _WAYS.update(ways())
    return _WAYS


def opcheck() -> object:
    import torch

    from hearth.kernels import ops

    ways_once()
    layouts = {
        "128x4": {},
        "8x4": {"is_sf_8x4_layout": True},
        "linear": {"is_sf_swizzled_layout": False},
        "mxfp4": {"sf_vec_size": 32, "sf_use_ue8m0": True},
    }
    out = {}
    for shape in SHAPES:
        for title, flags in layouts.items():
            for major in ("row", "column"):
                x, scale = data(shape if major == "row" else shape[::-1], 1)
                x = x if major == "row" else x.t()
                if major == "column" and x.shape[-2] % flags.get("sf_vec_size", 16):
                    continue
                try:
                    seen = torch.library.opcheck(ops.resolve("hearth::fp4_quantize"), (x, scale), flags)
                    verdict = "ok" if set(seen.values()) == {"SUCCESS"} else str(seen)
                except Exception as error:
                    verdict = f"{type(error).__name__}: {error}"[:300]
                out[f"{shape} {title} {major}"] = verdict
    others = {
        "nvfp4_quantize": (*data((16, 512), 2), 0, 16, None),
        "mxfp4_quantize": (data((16, 512), 2)[0], 0),
        "block_scale_interleave": (torch.randint(0, 255, (3, 100, 32), dtype=torch.uint8, device="cuda"),),
    }
    ops.register()
    for name, args in others.items():
        try:
            seen = torch.library.opcheck(ops.resolve(f"hearth::{name}"), args)
            out[name] = "ok" if set(seen.values()) == {"SUCCESS"} else str(seen)
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"[:300]
    return {
        "all_ok": set(out.values()) == {"ok"},
        "count": len(out),
        "not_ok": {k: v for k, v in out.items() if v != "ok"},
    }


def capture(call, x, scale):
    import torch

    call(x, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call(x, scale)
    return graph, outputs


def graph() -> object:
    """Capture, poison the outputs, replay on new data: as the direct call, byte for byte?"""
    import torch

    out = {}
    for name, call in ways_once().items():
        for shape in SHAPES:
            x, scale = data(shape, 3)
            captured, outputs = capture(call, x, scale)
            verdicts = []
            for seed in (4, 5, 6):
                fresh, new_scale = data(shape, seed)
                x.copy_(fresh)
                scale.copy_(new_scale)
                for output in outputs:
                    output.view(torch.uint8).fill_(0xA5)
                captured.replay()
                torch.cuda.synchronize()
                verdict = same(outputs, ways_once()["direct"](fresh, new_scale))
                verdict["poison_left"] = bool((outputs[0] == 0xA5).all())
                verdicts.append(verdict)
            out[f"{name} {shape}"] = verdicts
    good = all(v["codes"] and v["scales"] and not v["poison_left"] for vs in out.values() for v in vs)
    return {"all_equal": good, "replays": out, "replay_us_per_call": replay_cost()}


def replay_cost() -> dict:
    """GPU time of a call inside a graph of 100, in microseconds (medians of 15 replays, ways interleaved)."""
    import torch

    graphs = {}
    x, scale = data((16, 6144), 7)
    for name, call in ways_once().items():
        call(x, scale)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(100):
                call(x, scale)
    times: dict = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, one in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            one.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 10)
    return {name: {"median": statistics.median(t), "raw": t} for name, t in times.items()}


def overhead() -> object:
    """CPU time of one eager call in microseconds: rounds interleaved, the order turned each round."""
    import torch

    x, scale = data((16, 6144), 8)
    names = list(ways_once())
    for call in ways_once().values():
        for _ in range(50):
            call(x, scale)
    times: dict = {name: [] for name in names}
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            call = ways_once()[name]
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call(x, scale)
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
            torch.cuda.synchronize()
    medians = {name: statistics.median(t) for name, t in times.items()}
    return {
        "median_us": medians,
        "over_direct_us": {name: m - medians["direct"] for name, m in medians.items()},
        "raw_us": times,
    }


def compiled() -> object:
    """fullgraph=True, eager and inductor, static and dynamic: as the direct call, byte for byte?"""
    import torch

    out = {}
    for name, call in ways_once().items():
        for backend in ("eager", "inductor"):
            for dynamic in (False, True):
                if name in ("hearth_op", "decorator", "builtin") and dynamic:
                    continue
                title = f"{name} {backend} {'dynamic' if dynamic else 'static'}"
                torch._dynamo.reset()
                try:
                    function = torch.compile(
                        lambda x, s, call=call: call(x * 1, s),
                        fullgraph=True,
                        backend=backend,
                        dynamic=dynamic,
                    )
                    verdicts = []
                    for shape in ((16, 6144), (100, 6144), (512, 6144)):
                        x, scale = data(shape, 9)
                        verdicts.append(same(function(x, scale), ways_once()["direct"](x, scale)))
                    good = all(v["codes"] and v["scales"] for v in verdicts)
                    out[title] = "bit-exact" if good else verdicts
                except Exception as error:
                    out[title] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]
    return out


def gate() -> object:
    from hearth.kernels.trace import check

    document = check(everything=True).to_json()
    document["ops"] = [
        {k: row[k] for k in ("op", "traceable", "required", "frame", "reason")} for row in document["ops"]
    ]
    document["attempts"] = [
        {k: row[k] for k in ("op", "traceable", "frame", "reason")} for row in document["attempts"]
    ]
    return document


SECTIONS = {f.__name__: f for f in (first_call, selftest, opcheck, graph, overhead, compiled, gate)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--section"]:
        print(json.dumps(SECTIONS[sys.argv[2]](*sys.argv[3:])))
    elif len(sys.argv) >= 3:
        main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    else:
        sys.exit(__doc__)
