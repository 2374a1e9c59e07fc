#!/usr/bin/env python3
"""Hearth and a real SGLang on a real GPU: starts, plans, faults, the seed story, a sealed run, overhead.

    python3 tests/gpu/engine/scenario.py PART --out FOLDER --work FOLDER [--seconds 560] [--site FOLDER]

PART is `smoke` (one cold start, the seed story from nothing), `main` (everything for one GPU) or `tp` (two
GPUs). Every engine is started by `hearth serve`. The steps come in the order of their value, and results
and logs are written again after each, so that a run that is cut off loses nothing. `--cpu PYTHON` tries the
driver itself with an engine for CPU. Engines that only start or are broken run side by side; where speed is
measured, one works at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE))

import models  # noqa: E402
import steps  # noqa: E402
from bare import Bare  # noqa: E402
from run import Run  # noqa: E402
from served import Machine, Served, Wish  # noqa: E402

SANDBOX_USER = 65534
GPU_ARGS: dict[str, Any] = {
    "load-format": "dummy",
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "disable-radix-cache": True,
    "grammar-backend": "none",
    "context-length": 8192,
    "chunked-prefill-size": 2048,
    "mem-fraction-static": 0.5,
    "max-total-tokens": 65536,
    "max-running-requests": 64,
    "cuda-graph-max-bs-prefill": 1024,
    "sleep-on-idle": True,
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "SGLANG_HOST_IP": "127.0.0.1"}
# A host may forbid NVLink multicast to its guests: what forbids it has to reach the engine.
PASSED = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")


def gpu_machine(work: Path, site: Path | None) -> Machine:
    """The machine's own Python with the payload in front; this process runs on the same.

    Hearth and the faults are copied, since the sealed run's user may not be allowed to read the checkout.
    """
    for source, name in ((ROOT / "app", "app"), (Path(steps.FAULTS), "faults")):
        shutil.copytree(source, work / name, dirs_exist_ok=True)
    folders = [*([site] if site else []), work / "app", work / "faults"]
    os.environ["PYTHONPATH"] = ":".join(map(str, folders[:-1]))
    env = {**OFFLINE, **LOCAL, "PYTHONPATH": ":".join(map(str, folders))}
    env.update({name: os.environ[name] for name in PASSED if name in os.environ})
    return Machine(sys.executable, "0.5.17", work, env, GPU_ARGS)


def cpu_machine(work: Path, python: str) -> Machine:
    """An engine for CPU, to try this driver."""
    args = {
        key: GPU_ARGS[key] for key in ("load-format", "sampling-backend", "sleep-on-idle", "context-length")
    }
    args.update({"device": "cpu", "attention-backend": "torch_native", "max-total-tokens": 16384})
    env = {**OFFLINE, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": steps.FAULTS}
    return Machine(python, "0.5.23", work, {**env, "OMP_NUM_THREADS": "1"}, args, "cpu")


def trigger(run: Run, name: str) -> dict[str, str]:
    return {"HEARTH_GPU_TRIGGER": str(run.machine.work / f"{name}.trigger")}


# --- parts ---


async def smoke(run: Run) -> None:
    """Cold: one plan with empty caches, and the seed story from its beginning, side by side."""
    cold = run.serve(Wish("cold", "breakable,full"))
    story = run.serve(seed("seed-raw", "raw_fp4"))
    await run.step("facts", asyncio.to_thread(steps.facts, run))
    work = [run.step("doctor", steps.doctor(run)), run.step("cold", steps.started(run, cold))]
    await asyncio.gather(*work, run.step("seed-raw", steps.started(run, story)))
    if cold.status.get("ready"):
        await run.step("cold-plan", steps.measure_in_turns(run, {"breakable": cold.url}, 1))
    save_caches(run)
    for each in (cold, story):
        run.say(f"{each.wish.name}: {each.status.get('sentence')}")


def seed(name: str, fault: str) -> Wish:
    """The seed story's engine: FlashInfer's function in the linear layers, torch.compile over them."""
    env = {"HEARTH_GPU_FAULT": fault}
    return Wish(name, "tc_piecewise,full", env=env, cache="cache-fp4")


def save_caches(run: Run) -> None:
    """What was compiled, to take along to the next machine."""
    with tarfile.open(run.out / "caches.tar.gz", "w:gz") as archive:
        for name in ("cache", "cache-fp4"):
            if (run.machine.work / name).is_dir():
                archive.add(run.machine.work / name, name)
    run.say(f"caches: {(run.out / 'caches.tar.gz').stat().st_size / 2**20:.1f} MiB")


async def main_part(run: Run) -> None:
    """Everything for one GPU."""
    limits = {"stall": 10, "poll": 2}
    plans = {
        "standard": run.serve(Wish("standard", "standard", env=trigger(run, "standard"))),
        "breakable": run.serve(Wish("breakable", "breakable,full", extra={"limits": limits})),
        "tc_piecewise": run.serve(Wish("tc", "tc_piecewise,full", env=trigger(run, "tc"))),
        "eager": run.serve(Wish("eager", "eager")),
    }
    alone = Bare(Served(run.machine, Wish("alone", "standard", env=trigger(run, "alone"))))
    run.running.append(alone)
    alone.start()
    await run.step("facts", asyncio.to_thread(steps.facts, run))
    await run.step("starts", steps.start_all(run, *plans.values()))
    await run.step("alone", alone.ready(min(60, run.left)))
    up = {name: each for name, each in plans.items() if each.status.get("ready")}
    before = await steps.passes(up)
    await run.step("plans", steps.measure_in_turns(run, {n: each.url for n, each in up.items()}, 6))
    after = await steps.passes(up)
    run.results["passes"] = {"before": before, "after": after}
    if "standard" in up:
        bare = alone if alone.process and alone.process.poll() is None else None
        await run.step("overhead", steps.overhead(run, up["standard"], bare, 10, 768))
    alone.kill()
    if "eager" in up:
        await run.step("stop", up["eager"].stop())
    await second_wave(run, up)
    for each in run.running:
        each.kill()
    await asyncio.sleep(2)
    if run.left > 90:
        await run.step("capture-oom", steps.capture_oom(run))
    if run.left > 60:
        await run.step("stranger", steps.stranger(run, 0))


async def second_wave(run: Run, up: dict[str, Served]) -> None:
    """Three faults on running engines, and three more starts, side by side."""
    fp4 = run.serve(seed("seed-op", "hearth_fp4"))
    moe = {
        "moe-standard": run.serve(Wish("moe-standard", "standard", "moe")),
        "moe-breakable": run.serve(Wish("moe-breakable", "breakable,full", "moe")),
    }
    faults = {"sigkill": ("standard", steps.kill_rank), "sigstop": ("breakable", steps.stop_rank)}
    faults["illegal-access"] = ("tc_piecewise", steps.illegal_access)
    work = [run.step(name, act(run, up[plan])) for name, (plan, act) in faults.items() if plan in up]
    work.append(run.step("seed-op", steps.started(run, fp4)))
    story = run.serve(seed("seed-story", "raw_fp4"))
    work.append(run.step("seed-story", steps.started(run, story)))
    work.append(seal_and_serve(run))
    work.append(run.step("moe-starts", steps.start_all(run, *moe.values())))
    await asyncio.gather(*work)
    await run.step("seed-op-plan", steps.measure_in_turns(run, {"tc_piecewise": fp4.url}, 1))
    run.results["seed-op-passes"] = await steps.passes({"seed-op": fp4})
    ready = {name: each.url for name, each in moe.items() if each.status.get("ready")}
    await run.step("moe-plans", steps.measure_in_turns(run, ready, 2))
    for each in (fp4, story, *moe.values()):
        each.kill()


async def seal_and_serve(run: Run) -> None:
    """A copy of the warm cache, sealed; as root, served by a user who may not change it."""

    async def serve() -> dict[str, Any]:
        cache = run.machine.work / "cache-sealed"
        shutil.copytree(run.machine.work / "cache", cache, symlinks=True)
        wish = steps.sealed_wish(run, cache.name, None if os.geteuid() else SANDBOX_USER)
        before = steps.digest(cache)
        served = run.serve(wish)
        try:
            return await steps.sealed(run, served, before)
        finally:
            served.kill()

    await run.step("sealed", serve())


async def tp(run: Run) -> None:
    """Two GPUs."""
    args = {"tp": 2, "enforce-disable-flashinfer-allreduce-fusion": True}
    limits = {"limits": {"stall": 15, "poll": 2, "memory_free": 60}}
    plans = {
        "standard": run.serve(Wish("tp-standard", "standard", args=args, extra=limits)),
        "breakable": run.serve(Wish("tp-breakable", "breakable,full", args=args, extra=limits)),
    }
    await run.step("facts", asyncio.to_thread(steps.facts, run))
    await run.step("starts", steps.start_all(run, *plans.values()))
    up = {name: each for name, each in plans.items() if each.status.get("ready")}
    await run.step("plans", steps.measure_in_turns(run, {n: each.url for n, each in up.items()}, 2))
    run.results["passes"] = await steps.passes(up)
    work = []
    if "standard" in up:
        work.append(run.step("sigkill-rank", steps.kill_rank(run, up["standard"], 1)))
    if "breakable" in up:
        work.append(run.step("sigstop-rank", steps.stop_rank(run, up["breakable"], 1)))
    await asyncio.gather(*work)
    for each in run.running:
        each.kill()
    await asyncio.sleep(2)
    await asyncio.gather(
        run.step("capture-oom", steps.capture_oom(run)), run.step("stranger", steps.stranger(run, 1))
    )


async def cpu(run: Run) -> None:
    """The driver's own steps, with an engine for CPU."""
    one = run.serve(Wish("one", "breakable,full", max_bs=8, extra={"limits": {"stall": 10, "poll": 2}}))
    await run.step("facts", asyncio.to_thread(steps.facts, run))
    await run.step("doctor", steps.doctor(run))
    await run.step("starts", steps.start_all(run, one))
    await run.step("plans", steps.measure_in_turns(run, {"eager": one.url}, 1))
    run.results["passes"] = await steps.passes({"eager": one})
    await run.step("overhead", steps.overhead(run, one, None, 1, 8))
    await run.step("sigkill", steps.kill_rank(run, one))
    await run.step("sigstop", steps.stop_rank(run, one))
    await run.step("stop", one.stop())


PARTS = {"smoke": smoke, "main": main_part, "tp": tp, "cpu": cpu}


async def go(run: Run, part: str) -> None:
    run.gpu.start()
    try:
        async with asyncio.timeout(run.left + 20):
            await PARTS[part](run)
    except TimeoutError:
        run.say("time is over")
    finally:
        run.end()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, help="results go here")
    parser.add_argument("--work", type=Path, required=True, help="models, caches, logs of the engines")
    parser.add_argument("--seconds", type=float, default=560, help="the run is over by then")
    parser.add_argument("--site", type=Path, help="unpacked payload: goes before the engine's own packages")
    parser.add_argument("--cpu", metavar="PYTHON", help="an engine for CPU; only with the part `cpu`")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.cpu:
        models.MODELS["dense"].update(
            num_hidden_layers=2, hidden_size=128, intermediate_size=256, vocab_size=2048
        )
    for name in models.MODELS:
        models.write_model(options.work / "models", name)
    machine = (
        cpu_machine(options.work, options.cpu) if options.cpu else gpu_machine(options.work, options.site)
    )
    asyncio.run(go(Run(machine, options.out, options.seconds), options.part))


if __name__ == "__main__":
    main()
