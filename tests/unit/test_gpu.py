"""GPU memory: with no NVML, with a made-up one that fails card by card, and with one that hangs."""

import asyncio
import os
import threading
from types import SimpleNamespace

import pynvml
import pytest

from hearth.host.gpu import Gpus

GIB = 1 << 30


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Used bytes of each card, None for one that fell off the bus; change it in place."""
    used: list[int | None] = [3 * GIB, None, 1 * GIB]

    def memory(index: int, version: object = None) -> SimpleNamespace:
        if version is not None:
            raise pynvml.NVMLError_FunctionNotFound()
        if (value := used[index]) is None:
            raise pynvml.NVMLError_GpuIsLost()
        return SimpleNamespace(used=value)

    process = SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)
    fakes = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(used),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda index: b"RTX PRO 6000",
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetComputeRunningProcesses": lambda index: [process] if index == 2 else [],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)
    return used


async def test_nothing_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError_LibraryNotFound()

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    gpus = Gpus()
    assert (gpus.count, gpus.driver(), gpus.names(), gpus.used_bytes()) == (0, None, [], [])
    assert gpus.foreign_processes() == []
    assert await gpus.wait_memory_below([], 0, 0.1)
    gpus.close()


def test_what_the_cards_say(cards: list[int | None]) -> None:
    gpus = Gpus()
    assert gpus.names() == ["RTX PRO 6000"] * 3
    assert gpus.driver() == "580.95.05"
    assert gpus.used_bytes() == [3 * GIB, 0, 1 * GIB]
    ((index, pid, command, size),) = gpus.foreign_processes()
    assert (index, pid, size) == (2, os.getpid(), 0)
    assert "--" not in command
    assert gpus.foreign_processes(ours=[os.getpid()]) == []


def test_who_holds_memory_is_named_before_a_start(cards: list[int | None]) -> None:
    cards[2] = 137 * GIB
    first, second = Gpus().held(2 * GIB)
    assert first == "GPU 0: 3.0 GiB are in use already, by processes that can't be seen from here"
    assert second.startswith(f"GPU 2: 137.0 GiB are in use already, by pid {os.getpid()} (")
    assert Gpus().held(200 * GIB) == []


async def test_waiting_for_memory(cards: list[int | None]) -> None:
    gpus = Gpus()
    assert await gpus.wait_memory_below([3 * GIB, 0, GIB], 0, 1)
    assert not await gpus.wait_memory_below([2 * GIB, 0, GIB], GIB - 1, 0.3)
    threading.Timer(0.3, cards.__setitem__, (0, 2 * GIB)).start()
    assert await gpus.wait_memory_below([2 * GIB, 0, GIB], 0, 10)


async def test_a_driver_that_hangs_costs_the_timeout_and_no_more(
    cards: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    gpus = Gpus()
    monkeypatch.setattr(gpus, "used_bytes", never.wait)
    async with asyncio.timeout(60):
        assert not await gpus.wait_memory_below([0], 0, 0.2)
    never.set()
