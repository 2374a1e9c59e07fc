"""The steps: plans measured in turns, faults with their recovery, the seed story, a sealed run, overhead."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import load
from bare import Bare
from run import Run
from served import Served, Wish

FAULTS = str(Path(__file__).resolve().parent / "faults")


def facts(run: Run) -> dict[str, Any]:
    """Versions and hardware."""

    def said(*words: str) -> str:
        try:
            result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
        except OSError as error:
            return str(error)
        return (result.stdout + result.stderr).strip()

    code = "import torch,triton;print(torch.__version__,triton.__version__,torch.version.cuda)"
    query = "--query-gpu=name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "gpus": said("nvidia-smi", query, "--format=csv,noheader").splitlines(),
        "topology": said("nvidia-smi", "topo", "-m"),
        "kernel": " ".join(os.uname()),
        "cpus": os.cpu_count(),
        "python": sys.version,
        "torch_triton_cuda": said(run.machine.python, "-c", code).splitlines()[-1:],
        "nvcc": said("sh", "-c", "nvcc --version | tail -1; gcc --version | head -1; ninja --version"),
        "engine": run.machine.version,
        "engine_args": dict(run.machine.args),
    }


async def doctor(run: Run) -> dict[str, Any]:
    """`hearth doctor --json` and `--collect`, on this machine."""
    found: dict[str, Any] = {}
    for name, words in (("report", ["--json"]), ("collected", ["--collect"])):
        count = str(max(1, len(run.gpu.used_now())))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hearth", "doctor", "--gpu", count, "--gpu-name", "", *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 90)
        try:
            found[name] = json.loads(out)
        except ValueError:
            found[name] = out.decode()[-2000:]
        found[f"{name}_exit"], found[f"{name}_err"] = process.returncode, err.decode()[-1000:]
    return found


# --- starts ---


async def started(run: Run, served: Served, limit: float = 300.0) -> dict[str, Any]:
    """Seconds from the spawn of `hearth serve` to READY, and the report then."""
    seconds = await served.ready(min(limit, run.left))
    return {"ready_seconds": seconds, **served.report()}


async def start_all(run: Run, *serveds: Served) -> dict[str, Any]:
    """Wait for several that were started together; what failed says so in its place."""
    outcomes = await asyncio.gather(*(started(run, each) for each in serveds), return_exceptions=True)
    return {
        each.wish.name: outcome if isinstance(outcome, dict) else {"error": str(outcome), **each.report()}
        for each, outcome in zip(serveds, outcomes, strict=True)
    }


# --- measuring ---


async def measure_plan(session: Any, url: str, slow: bool, full: bool = True) -> dict[str, Any]:
    """One round: first-token times, one stream, 32 requests at once."""
    times = 3 if slow else 8
    return {
        "ttft_32_ms": await load.first_token_ms(session, url, 32, times),
        "ttft_512_ms": await load.first_token_ms(session, url, 512, times),
        "one_stream": await load.single_stream(session, url, 64 if slow else 512),
        "at_once_32": await load.many_at_once(session, url, 32, 32 if slow else 128) if full else None,
    }


async def measure_in_turns(run: Run, plans: dict[str, str], rounds: int) -> dict[str, Any]:
    """A B C, A B C, ...: one engine works at a time; the first round is not counted."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    async with load.client(120) as session:
        for number in range(rounds + 1):
            for name, url in plans.items():
                result = await measure_plan(session, url, name == "eager")
                if number:
                    found[name].append(result)
    return {"rounds": rounds, "plans": found, "summary": {n: _summary(r) for n, r in found.items()}}


def _summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    pooled = {key: [x for r in rounds for x in r[key]] for key in ("ttft_32_ms", "ttft_512_ms")}
    plain = {key: [r[key] for r in rounds] for key in ("one_stream", "at_once_32")}
    return {key: round(statistics.median(values), 2) for key, values in {**pooled, **plain}.items()}


async def passes(serveds: dict[str, Served]) -> dict[str, Any]:
    """Graph passes by mode, from the supervisor, after its next look at the engine."""
    await asyncio.sleep(6)
    return {name: each.report()["graph_passes"] for name, each in serveds.items()}


async def overhead(run: Run, under: Served, alone: Bare | None, rounds: int, tokens: int) -> dict[str, Any]:
    """32 requests at once, in turns: the engine alone, one under Hearth, and that one with Hearth stopped.

    Hearth is scraped every 15 s meanwhile. Two engine processes differ among themselves, so the third way is
    the sharper one: the same engine, its supervisor frozen by SIGSTOP for the length of a round.
    """
    assert under.process is not None
    found: dict[str, list[float]] = {"alone": [], "under": [], "frozen": []}
    under.every = 5.0
    scraping = asyncio.create_task(_scrape(under))
    try:
        async with load.client(60) as session:
            for number in range(rounds + 1):
                for way in ("alone", "under", "frozen") if number % 2 else ("frozen", "under", "alone"):
                    value = await _overhead_round(session, way, under, alone, tokens)
                    if number and value is not None:
                        found[way].append(value)
    finally:
        scraping.cancel()
        under.every = 0.2
    medians = {way: statistics.median(values) for way, values in found.items() if values}
    return {"tokens_per_request": tokens, "tokens_per_second": found, "medians": medians}


async def _overhead_round(
    session: Any, way: str, under: Served, alone: Bare | None, tokens: int
) -> float | None:
    assert under.process is not None
    if way == "alone":
        return await load.many_at_once(session, alone.url, 32, tokens) if alone else None
    if way == "frozen":
        under.process.send_signal(signal.SIGSTOP)
    try:
        return await load.many_at_once(session, under.url, 32, tokens)
    finally:
        under.process.send_signal(signal.SIGCONT)


async def _scrape(served: Served) -> None:
    while True:
        with contextlib.suppress(Exception):
            await served.metrics()
        await asyncio.sleep(15)


# --- faults ---


async def kill_rank(run: Run, served: Served, rank: int = 0) -> dict[str, Any]:
    """SIGKILL a scheduler while it works."""
    before, victim = len(served.status["failures"]), served.scheduler(rank)
    busy = asyncio.create_task(_keep_busy(served))
    await asyncio.sleep(1)
    at = time.time()
    victim.kill()
    return await _recovery(run, served, before, victim.pid, at, busy)


async def stop_rank(run: Run, served: Served, rank: int = 0) -> dict[str, Any]:
    """SIGSTOP a scheduler while it works: with several GPUs the others wait for it in NCCL."""
    before, victim = len(served.status["failures"]), served.scheduler(rank)
    busy = asyncio.create_task(_keep_busy(served))
    await asyncio.sleep(1)
    at = time.time()
    victim.send_signal(signal.SIGSTOP)
    return await _recovery(run, served, before, victim.pid, at, busy)


async def illegal_access(run: Run, served: Served) -> dict[str, Any]:
    """A kernel in the decode step writes to memory that isn't mapped."""
    before, victim = len(served.status["failures"]), served.scheduler()
    busy = asyncio.create_task(_keep_busy(served))
    await asyncio.sleep(1)
    at = time.time()
    Path(served.wish.env["HEARTH_GPU_TRIGGER"]).touch()
    return await _recovery(run, served, before, victim.pid, at, busy)


async def _keep_busy(served: Served) -> None:
    async with load.client(600) as session:
        with contextlib.suppress(Exception):
            await load.many_at_once(session, served.url, 4, 7000)


async def _recovery(
    run: Run, served: Served, before: int, pid: int, at: float, busy: asyncio.Task[None]
) -> dict[str, Any]:
    """Seconds from the fault to: named, memory free, READY. The failure as Hearth named it."""
    await served.until(lambda status: len(status["failures"]) > before, min(180, run.left))
    named = time.time() - at
    busy.cancel()
    await served.ready(min(300, run.left))
    failure = served.status["failures"][before]
    return {
        "seconds_to_named": round(named, 2),
        "seconds_to_memory_free": run.gpu.gone_after(pid, at),
        "seconds_to_ready": round(time.time() - at, 2),
        "failure": failure,
        "since_fault": [e for e in served.timeline if served.begun + e["at"] >= at - 0.5],
        "fault_at": round(at - served.begun, 2),
        **served.report(),
    }


def gib_free(run: Run, gpu: int = 0) -> float:
    """Free memory of a GPU, as the driver says it."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    return pynvml.nvmlDeviceGetMemoryInfo(handle).free / 2**30


async def capture_oom(run: Run, left_gib: float = 3.05, max_bs: int = 4096) -> dict[str, Any]:
    """Decode graphs for a batch that the memory left over can't hold; half of it can."""
    fraction = round(1 - left_gib / gib_free(run), 4)
    wish = Wish(
        "oom",
        "standard",
        "wide",
        max_bs,
        env={"CUDA_VISIBLE_DEVICES": "0"},
        args={"mem-fraction-static": fraction, "max-total-tokens": None, "max-running-requests": max_bs},
        extra={"limits": {"memory_free": 15}},
    )
    served = run.serve(wish)
    try:
        return {"mem_fraction_static": fraction, **await started(run, served)}
    except (RuntimeError, TimeoutError) as error:
        return {"mem_fraction_static": fraction, "error": str(error), **served.report()}
    finally:
        served.kill()


HOLD = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGet(ctypes.byref(device), int(sys.argv[1])) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
code = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(float(sys.argv[2]) * 2**30)))
print("holding" if code == 0 else f"cuMemAlloc: {code}", flush=True)
time.sleep(600)
"""


async def stranger(run: Run, gpu: int, leave_gib: float = 1.5) -> dict[str, Any]:
    """Another process holds almost all memory of one GPU while Hearth starts an engine."""
    size = gib_free(run, gpu) - leave_gib - 0.6
    script = run.machine.work / "hold_memory.py"
    script.write_text(HOLD)
    holder = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(gpu), str(size), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        said = (await asyncio.wait_for(holder.stdout.readline(), 30)).decode().strip()
        wish = Wish("stranger", "standard", env={"CUDA_VISIBLE_DEVICES": str(gpu)})
        served = run.serve(wish)
        at = time.time()
        code = await served.ended(min(200, run.left))
        text = served.log.read_text(errors="replace")
        lines = [line for line in text.splitlines() if " hearth]" in line]
        return {
            "held": said,
            "gib": round(size, 1),
            "pid": holder.pid,
            "exit": code,
            "seconds": round(time.time() - at, 1),
            "hearth_said": lines,
            "named_holder": str(holder.pid) in "\n".join(lines),
            **served.report(),
        }
    finally:
        holder.kill()
        await holder.wait()


# --- sealed ---


def sealed_wish(run: Run, cache: str, user: int | None) -> Wish:
    """No compiler on PATH, JIT off, the cache's files read-only, and a user who owns only its folders."""
    from hearth.kernels.seal import seal_env, seal_tree

    root = run.machine.work / cache
    scratch = run.machine.work / "sealed-scratch"
    tools = run.machine.work / "sealed-bin"
    for folder in (scratch, tools):
        folder.mkdir(exist_ok=True)
    # Triton's key for its compiled stubs depends on whether `file` is there (platform.architecture runs it).
    program = shutil.which("file")
    if program and not (tools / "file").exists():
        (tools / "file").symlink_to(program)
    seal_tree(root)
    for folder in (str(scratch), *(path for path, _, _ in os.walk(root))) if user is not None else ():
        os.chown(folder, user, user)
    env = seal_env(run.machine.version, str(root), str(scratch))
    env.update(
        PATH=str(tools), CUDA_HOME="/nonexistent", HOME=str(scratch), TMPDIR=str(scratch), USER="sealed"
    )
    return Wish("sealed", "breakable,full", env=env, cache=cache, user=user)


def digest(root: Path) -> dict[str, str]:
    """sha256 of every file below a folder."""
    import hashlib

    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.endswith((".lock", ".log"))
    }


async def sealed(run: Run, served: Served, before: dict[str, str]) -> dict[str, Any]:
    """After READY: answers, and that nothing was compiled or changed."""
    result = await started(run, served)
    async with load.client(60) as session:
        answer = await load.ask(session, served.url, 512, 64)
        rate = await load.many_at_once(session, served.url, 32, 64)
    await asyncio.sleep(6)
    page = await served.metrics()
    compiles = [line for line in page.splitlines() if line.startswith("hearth_runtime_compiles_total")]
    after = digest(run.machine.work / served.wish.cache)
    changed = sorted(name for name in {**before, **after} if before.get(name) != after.get(name))
    return {
        **result,
        "tokens": answer.tokens,
        "at_once_32": rate,
        "compiles": compiles,
        "files": len(after),
        "changed": changed,
    }
