"""Turns the errors that the driver reports (Xid) into the board's fault and `hearth_gpu_fault`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hearth.board import Board
from hearth.host.kernellog import KernelLog
from hearth.host.nvmlevents import NvmlEvents, standing
from hearth.host.xid import Xid, gpu_index
from hearth.metrics import Metrics

log = logging.getLogger(__name__)


class FaultWatch:
    """Watches the GPUs at these PCI addresses (NVML's order) until `close`."""

    def __init__(self, board: Board, metrics: Metrics, addresses: Sequence[str]) -> None:
        self._board, self._metrics, self._addresses = board, metrics, addresses
        self._log, self._events = KernelLog(self.on_xid), NvmlEvents(self.on_xid)

    def start(self) -> None:
        """Begin with the kernel log, else with NVML; without either say so once and leave the metric out."""
        closed = self._log.start()
        blind = self._events.start() if closed else ""
        if blind:
            log.info(
                "GPU errors (Xid) are not watched, `hearth_gpu_fault` is left out: %s; %s", closed, blind
            )
            return
        log.info("GPU errors (Xid) are watched in %s.", "NVML's events" if closed else "the kernel log")
        self._metrics.watch_gpus([str(index) for index in range(len(self._addresses))])
        for xid in standing():  # a card that was lost before we were started
            self.on_xid(xid)

    def close(self) -> None:
        """Stop watching."""
        self._log.close()
        self._events.close()

    def on_xid(self, xid: Xid) -> None:
        """A fatal one on a card of ours is the engine's failure; another is said and no more."""
        index = gpu_index(xid.bus, self._addresses)
        if not xid.fatal or (index is None and self._addresses):
            log.warning("%s. %s", xid.sentence, xid.line)
            return
        log.error("%s: %s. %s", xid.sentence, xid.do, xid.line)
        self._metrics.gpu_faulted(xid.bus if index is None else str(index))
        self._board.gpu_fault = self._board.gpu_fault or xid
