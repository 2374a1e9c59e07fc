"""Xid errors as NVML reports them: the witness in a container, which may not read the kernel log.

NVML tells the number and the card, no text. Whether the card must be reset it says by its recovery action
(drivers from R560 on), which also settles Xid 154.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import pynvml

from hearth.host.xid import Xid, from_number

log = logging.getLogger(__name__)

_WAIT_MS = 1000
_NEEDS = frozenset({1, 2, 4, 6, 7})
"""nvmlDeviceGpuRecoveryAction_t: GPU reset, node reboot, drain and reset, bus reset, system reboot."""
_RECOVERY_FIELD = getattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)


def standing() -> list[Xid]:
    """Cards of which the driver says now that they need a reset or a reboot: an Xid 154 each."""
    found = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                if _must_recover(handle):
                    found.append(from_number(_bus(handle), 154, recovery=True))
        pynvml.nvmlShutdown()
    return found


class NvmlEvents:
    """Calls `on_xid` on the event loop for each Xid of any card, until `close`."""

    def __init__(self, on_xid: Callable[[Xid], None]) -> None:
        self._on_xid = on_xid
        self._stop = threading.Event()
        self._set: Any = None

    def start(self) -> str:
        """Begin. Returns why that can't be done, or nothing."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            return f"NVML: {error}"
        try:
            self._set = pynvml.nvmlEventSetCreate()
            watched = sum(map(self._register, range(pynvml.nvmlDeviceGetCount())))
        except pynvml.NVMLError as error:
            self._free()
            return f"NVML: {error}"
        if not watched:
            self._free()
            return "NVML: no GPU that reports events"
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._wait, args=(loop,), name="nvml-events", daemon=True).start()
        return ""

    def close(self) -> None:
        """Stop; the thread ends within a second, or stays behind when the driver hangs."""
        self._stop.set()

    def _register(self, index: int) -> bool:
        with contextlib.suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
            return True
        return False

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.is_set():
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, _WAIT_MS)
            except pynvml.NVMLError_Timeout:
                continue
            except pynvml.NVMLError as error:
                log.warning("NVML's events can't be followed any more: %s", error)
                break
            found = _xid(event)
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self._on_xid, found)
        self._free()

    def _free(self) -> None:
        with contextlib.suppress(pynvml.NVMLError):
            if self._set is not None:
                pynvml.nvmlEventSetFree(self._set)
            pynvml.nvmlShutdown()
        self._set = None


def _xid(event: Any) -> Xid:
    return from_number(_bus(event.device), int(event.eventData), _must_recover(event.device))


def _bus(handle: Any) -> str:
    with contextlib.suppress(pynvml.NVMLError):
        address = pynvml.nvmlDeviceGetPciInfo(handle).busId
        return address.decode() if isinstance(address, bytes) else str(address)
    return "unknown"


def _must_recover(handle: Any) -> bool:
    """Whether the driver says that the card needs a reset or a reboot; False where it says nothing."""
    if _RECOVERY_FIELD is None:
        return False
    with contextlib.suppress(pynvml.NVMLError):
        value = pynvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_FIELD])[0]
        return value.nvmlReturn == pynvml.NVML_SUCCESS and int(value.value.uiVal) in _NEEDS
    return False
