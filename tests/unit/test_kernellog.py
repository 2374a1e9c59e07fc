"""Errors of GPUs: from the kernel log (a pipe in its place, and the real one), and from NVML (made up)."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from hearth.board import Board
from hearth.config import parse as parse_config
from hearth.errors import ExitCode
from hearth.failure import FailureKind
from hearth.faultwatch import FaultWatch
from hearth.host import kernellog
from hearth.host.gpu import Gpus
from hearth.host.kernellog import KernelLog, message
from hearth.host.nvmlevents import NvmlEvents
from hearth.host.xid import Xid
from hearth.ladder import GraphPlan
from hearth.metrics import Metrics
from hearth.supervisor import Supervisor

OFF_THE_BUS = "NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus."
ADDRESSES = ("00000000:01:00.0", "00000000:C1:00.0")
PLAN = GraphPlan("disabled", "full", None)


def record(text: str, number: int = 339) -> bytes:
    return f"3,{number},5140900,-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:c1:00.0\n".encode()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A pipe in place of /dev/kmsg: (path to read, descriptor to write)."""
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    yield path, writer
    with contextlib.suppress(OSError):
        os.close(writer)


async def until(done: Any) -> None:
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0.01)


def test_the_text_of_a_record() -> None:
    assert message(record(OFF_THE_BUS).decode()) == OFF_THE_BUS
    assert message("6,1,2,c;a;b") == "a;b"
    assert message(OFF_THE_BUS) == OFF_THE_BUS


async def test_records_become_xids(pipe: tuple[Path, int]) -> None:
    path, writer = pipe
    found: list[Xid] = []
    following = KernelLog(found.append, path)
    assert following.start() == ""
    os.write(writer, record("usb 1-1: new device") + record(OFF_THE_BUS) + b"\xff\xfe rubbish\n")
    await until(lambda: found)
    assert [(xid.number, xid.bus, xid.fatal) for xid in found] == [(79, "0000:c1:00", True)]
    following.close()
    following.close()


async def test_why_it_cannot_be_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    missing = tmp_path / "kmsg"
    assert KernelLog(print, missing).start() == f"{missing}: No such file or directory"
    plain = tmp_path / "plain"
    plain.touch()
    assert "Operation not permitted" in KernelLog(print, plain).start()


async def test_without_the_log_the_metric_is_absent_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernellog, "PATH", tmp_path / "none")
    monkeypatch.setattr(pynvml, "nvmlInit", _no_nvml)
    caplog.set_level(logging.INFO)
    metrics = Metrics()
    watch = FaultWatch(Board(PLAN, PLAN), metrics, ADDRESSES)
    watch.start()
    watch.close()
    assert b"hearth_gpu_fault" not in metrics.render()
    assert [r.message.count("hearth_gpu_fault") for r in caplog.records if "Xid" in r.message] == [1]


async def test_which_card_it_was(pipe: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    path, writer = pipe
    monkeypatch.setattr(kernellog, "PATH", path)
    board, metrics = Board(PLAN, PLAN), Metrics()
    watch = FaultWatch(board, metrics, ADDRESSES)
    watch.start()
    stranger = OFF_THE_BUS.replace("c1", "e1")
    harmless = "NVRM: Xid (PCI:0000:c1:00): 31, pid=7, name=python3, Ch 0000000a"
    os.write(writer, record(stranger) + record(harmless))
    await until(lambda: _drained(writer))
    assert board.gpu_fault is None
    os.write(writer, record(OFF_THE_BUS) + record("NVRM: Xid (PCI:0000:01:00): 119, pid=1, Timeout"))
    await until(lambda: b'hearth_gpu_fault{gpu="0"} 1.0' in metrics.render())
    assert b'hearth_gpu_fault{gpu="1"} 1.0' in metrics.render()
    assert board.gpu_fault is not None
    assert board.gpu_fault.number == 79
    watch.close()


def _no_nvml() -> None:
    raise pynvml.NVMLError_LibraryNotFound()


@dataclass
class Nvml:
    """NVML's events, made up: (card, Xid) to report, and what each card says about its recovery."""

    events: list[tuple[int, int]] = field(default_factory=list)
    recovery: dict[int, int] = field(default_factory=dict)
    broken: bool = False

    def wait(self, _set: object, _ms: int) -> SimpleNamespace:
        if self.broken:
            raise pynvml.NVMLError_Unknown()
        if not self.events:
            time.sleep(0.01)
            raise pynvml.NVMLError_Timeout()
        card, number = self.events.pop(0)
        return SimpleNamespace(device=card, eventData=number)

    def value(self, card: int, _ids: list[int]) -> list[SimpleNamespace]:
        value = SimpleNamespace(uiVal=self.recovery.get(card, 0))
        return [SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=value)]


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """A machine without a kernel log to read, with two cards that NVML knows."""
    made_up = Nvml()
    monkeypatch.setattr(kernellog, "PATH", tmp_path / "none")
    fakes = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlEventSetCreate": object,
        "nvmlEventSetFree": lambda _set: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceRegisterEvents": lambda *_: None,
        "nvmlDeviceGetPciInfo": lambda card: SimpleNamespace(busId=ADDRESSES[card].encode()),
        "nvmlEventSetWait_v2": made_up.wait,
        "nvmlDeviceGetFieldValues": made_up.value,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)
    return made_up


async def test_without_the_kernel_log_nvml_is_the_witness(nvml: Nvml) -> None:
    board, metrics = Board(PLAN, PLAN), Metrics()
    watch = FaultWatch(board, metrics, ADDRESSES)
    watch.start()
    assert b'hearth_gpu_fault{gpu="1"} 0.0' in metrics.render()
    nvml.events.append((1, 31))
    await until(lambda: not nvml.events)
    nvml.events.append((1, 79))
    await until(lambda: board.gpu_fault is not None)
    assert board.gpu_fault is not None
    assert (board.gpu_fault.number, board.gpu_fault.line) == (79, "NVML: Xid 79 on 00000000:C1:00.0")
    assert b'hearth_gpu_fault{gpu="1"} 1.0' in metrics.render()
    watch.close()


@pytest.mark.parametrize(
    ("number", "recovery", "fatal"),
    [(154, 2, True), (154, 0, False), (154, 3, False), (999, 1, True), (45, 0, False)],
)
async def test_the_driver_says_whether_a_card_must_be_reset(
    nvml: Nvml, number: int, recovery: int, fatal: bool
) -> None:
    found: list[Xid] = []
    nvml.recovery[0] = recovery
    events = NvmlEvents(found.append)
    assert events.start() == ""
    nvml.events.append((0, number))
    await until(lambda: found)
    assert found[0].fatal is fatal
    events.close()


async def test_a_card_that_was_lost_before_is_known_at_once(nvml: Nvml) -> None:
    nvml.recovery[1] = 2
    board, metrics = Board(PLAN, PLAN), Metrics()
    watch = FaultWatch(board, metrics, ADDRESSES)
    watch.start()
    assert board.gpu_fault is not None
    assert (board.gpu_fault.number, board.gpu_fault.bus) == (154, "00000000:c1:00.0")
    assert b'hearth_gpu_fault{gpu="0"} 0.0' in metrics.render()
    assert b'hearth_gpu_fault{gpu="1"} 1.0' in metrics.render()
    watch.close()


async def test_nvml_that_breaks_ends_the_watch_and_nothing_else(
    nvml: Nvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.broken = True
    events = NvmlEvents(print)
    assert events.start() == ""
    await until(lambda: "can't be followed any more" in caplog.text)
    events.close()


async def test_cards_that_report_no_events(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise pynvml.NVMLError_NotSupported()

    monkeypatch.setattr(pynvml, "nvmlDeviceRegisterEvents", refuse)
    assert NvmlEvents(print).start() == "NVML: no GPU that reports events"


def _drained(writer: int) -> bool:
    """Whether nothing is left in the pipe."""
    import array
    import fcntl
    import termios

    left = array.array("i", [0])
    fcntl.ioctl(writer, termios.FIONREAD, left)
    return left[0] == 0


async def test_a_lost_gpu_ends_the_engine_and_asks_for_a_person(
    pipe: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port_factory: Any
) -> None:
    """The engine here is a script that only waits: what is tried is the way from the log to the exit code."""
    path, writer = pipe
    monkeypatch.setattr(kernellog, "PATH", path)
    monkeypatch.setattr(Gpus, "addresses", lambda self: list(ADDRESSES))
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\nexec sleep 600\n")
    engine.chmod(0o755)
    ports = f"{{engine: {unused_tcp_port_factory()}, supervisor: {unused_tcp_port_factory()}}}"
    paths = f"{{state: {tmp_path}/s, runtime: {tmp_path}/r, cache: {tmp_path}/c}}"
    text = f"model: {{path: {tmp_path}, served_name: m}}\nengine: {{version: 0.5.23, python: {engine}}}\n"
    supervisor = Supervisor(parse_config(f"{text}ports: {ports}\npaths: {paths}\n", "test"), None, {})
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.board.state == "starting" or running.done())
    os.write(writer, record(OFF_THE_BUS))
    async with asyncio.timeout(60):
        assert await running is ExitCode.HOST_ACTION
    failure = supervisor.board.incidents[-1].failure
    assert (failure.kind, failure.evidence) == (FailureKind.GPU_FAULT, (OFF_THE_BUS,))
    assert "power" in failure.hint
    counted = supervisor.metrics.registry.get_sample_value
    assert counted("hearth_failures_total", {"kind": "gpu_fault"}) == 1
    assert counted("hearth_engine_restarts_total", {"kind": "gpu_fault"}) == 0


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK | os.W_OK), reason="no access to /dev/kmsg here")
async def test_the_real_kernel_log() -> None:
    """A harmless number on an address that no machine has, so that no other watcher stops for it."""
    found: list[Xid] = []
    following = KernelLog(found.append)
    reason = following.start()
    if reason:
        pytest.skip(reason)
    mark = f"hearth-test-{os.getpid()}"
    with open("/dev/kmsg", "wb", buffering=0) as kmsg:  # noqa: PTH123 - pathlib seeks, which kmsg refuses
        kmsg.write(f"<6>NVRM: Xid (PCI:ffff:ff:1f): 45, name={mark}\n".encode())
    await until(lambda: any(mark in xid.line for xid in found))
    assert all(not xid.fatal for xid in found)
    following.close()
