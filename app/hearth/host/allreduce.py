"""All-reduce over every GPU of this host: does it end, is it right, how fast is it.

Runs with the engine's interpreter, which has torch and perhaps no Hearth: nothing of Hearth is imported here.
Prints one JSON object a line: {"stage": "torch"|"start"|"first"|"done", ...}, so that whoever waits knows
where it stopped.

    python allreduce.py [--backend nccl|gloo] [--ranks N]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from typing import Any

SMALL, LARGE = 1024, 64 * 1024 * 1024
"""Elements of 4 bytes: a decode-sized message, and 256 MiB for the bandwidth."""
ROUNDS = 10


def say(stage: str, **facts: Any) -> None:
    """One line for whoever waits."""
    print(json.dumps({"stage": stage, **facts}), flush=True)


def expected(ranks: int) -> float:
    """The sum that every element must have when rank r gives r + 1."""
    return ranks * (ranks + 1) / 2


def bus_bandwidth(size: int, ranks: int, seconds: float) -> float:
    """GB/s on the busiest link, as nccl-tests counts it: size / time * 2 (n - 1) / n."""
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def rank_main(rank: int, ranks: int, backend: str, port: int) -> None:
    """One process of the group."""
    import torch
    import torch.distributed as dist

    on_gpu = backend == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks)
    wrong = reduce_once(torch, dist, device, SMALL, rank, ranks)
    if rank == 0:
        say("first", wrong=wrong)
    wrong += reduce_once(torch, dist, device, LARGE if on_gpu else SMALL * 64, rank, ranks)
    seconds, size = timed(torch, dist, device, LARGE if on_gpu else SMALL * 64)
    if rank == 0:
        say("done", wrong=wrong, busbw=round(bus_bandwidth(size, ranks, seconds), 2), bytes=size)
    dist.destroy_process_group()


def reduce_once(torch: Any, dist: Any, device: Any, count: int, rank: int, ranks: int) -> int:
    """How many elements came out wrong, over all ranks."""
    values = torch.full((count,), float(rank + 1), device=device)
    dist.all_reduce(values)
    wrong = (values != expected(ranks)).sum().to(torch.int64).reshape(1)
    dist.all_reduce(wrong)
    return int(wrong.item())


def timed(torch: Any, dist: Any, device: Any, count: int) -> tuple[float, int]:
    """(seconds of one all-reduce, bytes), the mean of several after a warm-up."""
    values = torch.zeros(count, device=device)
    for _ in range(3):
        dist.all_reduce(values)
    settle(torch, device)
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    settle(torch, device)
    return (time.perf_counter() - begin) / ROUNDS, count * 4


def settle(torch: Any, device: Any) -> None:
    """Wait for what a GPU still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peers(torch: Any, count: int) -> list[str]:
    """Pairs of GPUs that can't reach each other's memory."""
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Start a process for each GPU and wait for them."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", default="nccl")
    arguments.add_argument("--ranks", type=int, default=0)
    options = arguments.parse_args()
    try:
        import torch
        import torch.multiprocessing as multiprocessing
    except ImportError as error:
        say("torch", missing=str(error))
        return
    on_gpu = options.backend == "nccl"
    gpus = torch.cuda.device_count() if on_gpu else 0
    ranks = options.ranks or gpus
    say("torch", version=torch.__version__, gpus=gpus)
    if ranks < 2 or (on_gpu and ranks > gpus):
        return
    # As SGLang sets them; NVLink multicast is not for every machine, and PCIe has none.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    say("start", ranks=ranks, unreachable=peers(torch, ranks) if on_gpu else [])
    multiprocessing.spawn(rank_main, (ranks, options.backend, free_port()), nprocs=ranks)


if __name__ == "__main__":
    main()
