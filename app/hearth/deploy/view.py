"""The progress of a run on the terminal: a live table where there is one, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from hearth.deploy.progress import SLOW, Done, Progress
from hearth.deploy.report import duration

_TICK = 30.0


class View:
    """Takes ansible-runner's events and shows them. A context manager."""

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        self.progress = progress
        self._lock = threading.Lock()
        self._console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._live = Live(
            get_renderable=self._table, console=self._console, refresh_per_second=2, transient=True
        )
        self._plain = not self._console.is_terminal
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> View:
        (self._ticker.start if self._plain else self._live.start)()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        (self._ticker.join if self._plain else self._live.stop)()

    def event(self, event: Mapping[str, Any]) -> bool:
        """One event; True keeps it in the run's record."""
        with self._lock:
            done = self.progress.take(event, time.monotonic())
        if done is not None and (done.status not in ("ok", "skipped") or done.seconds >= SLOW):
            self._console.print(line(done), markup=False)
        return True

    def say(self, text: str) -> None:
        """A line of our own."""
        self._console.print(text, markup=False)

    def _table(self) -> Table:
        now = time.monotonic()
        table = Table(box=None, pad_edge=False, title_justify="left", title=self._title(now))
        for column in ("host", "role", "task", "elapsed"):
            table.add_column(column)
        with self._lock:
            for host, each in sorted(self.progress.now.items()):
                took = now - each.since
                style = "yellow" if took >= SLOW else ""
                slow = " slow" if took >= SLOW else ""
                table.add_row(host, each.role, each.task, f"{duration(took)}{slow}", style=style)
        return table

    def _title(self, now: float) -> str:
        done, changed = len(self.progress.done), len(self.progress.changed())
        return f"{duration(now - self.progress.started)}, {done} tasks done, {changed} changed"

    def _tick(self) -> None:
        """Without a terminal: now and then say what takes so long."""
        while not self._stop.wait(_TICK):
            now = time.monotonic()
            with self._lock:
                slow = [(host, each) for host, each in self.progress.now.items() if now - each.since >= SLOW]
            for host, each in slow:
                self.say(f"... {host}  {each.role}: {each.task} since {duration(now - each.since)}")


def line(done: Done) -> str:
    """One ended task as a line."""
    tail = f": {done.message}" if done.message else ""
    return f"{done.status:<11} {done.host}  {done.place} ({duration(done.seconds)}){tail}"
