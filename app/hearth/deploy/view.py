"""The progress of a run on the terminal: a live table where there is one, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from hearth.deploy.progress import SLOW, Done, Progress
from hearth.deploy.report import duration

_TICK = 30.0
_LOOK = 10.0
WATCHED = ("Activate the release", "Go back")
"""Tasks during which the service itself says how far it is."""
Look = Callable[[str], str]


class View:
    """Takes ansible-runner's events and shows them. A context manager.

    `look` asks a host what its service says of itself; it may take seconds, and "" stands for nothing.
    """

    def __init__(self, progress: Progress, console: Console | None = None, look: Look | None = None) -> None:
        self.progress = progress
        self._look = look
        self._said: dict[str, str] = {}
        self._lock = threading.Lock()
        self._console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._live = Live(
            get_renderable=self._table, console=self._console, refresh_per_second=2, transient=True
        )
        self._plain = not self._console.is_terminal
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._watch, daemon=True)] if look else []
        self._threads += [threading.Thread(target=self._tick, daemon=True)] if self._plain else []

    def __enter__(self) -> View:
        for thread in self._threads:
            thread.start()
        if not self._plain:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if not self._plain:
            self._live.stop()

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
        for column in ("host", "role", "task", "elapsed", ""):
            table.add_column(column)
        with self._lock:
            for host, each in sorted(self.progress.now.items()):
                took = now - each.since
                style = "yellow" if took >= SLOW else ""
                slow = " slow" if took >= SLOW else ""
                table.add_row(
                    host,
                    each.role,
                    each.task,
                    f"{duration(took)}{slow}",
                    self._said.get(host, ""),
                    style=style,
                )
        return table

    def _title(self, now: float) -> str:
        done, changed = len(self.progress.done), len(self.progress.changed())
        return f"{duration(now - self.progress.started)}, {done} tasks done, {changed} changed"

    def _watch(self) -> None:
        """Ask hosts that wait for READY what their service says, and show it when it says something new."""
        while self._look is not None and not self._stop.wait(_LOOK):
            with self._lock:
                hosts = watched(self.progress)
            self._said = {host: said for host, said in self._said.items() if host in hosts}
            for host in hosts:
                said = self._look(host)
                if self._plain and said and said != self._said.get(host):
                    self.say(f"... {host}  {said}")
                self._said[host] = said

    def _tick(self) -> None:
        """Without a terminal: now and then say what takes so long."""
        while not self._stop.wait(_TICK):
            now = time.monotonic()
            with self._lock:
                slow = [(host, each) for host, each in self.progress.now.items() if now - each.since >= SLOW]
            for host, each in slow:
                self.say(f"... {host}  {each.role}: {each.task} since {duration(now - each.since)}")


def watched(progress: Progress) -> list[str]:
    """The hosts whose service is worth asking now."""
    return [host for host, now in progress.now.items() if now.task in WATCHED]


def line(done: Done) -> str:
    """One ended task as a line."""
    tail = f": {done.message}" if done.message else ""
    return f"{done.status:<11} {done.host}  {done.place} ({duration(done.seconds)}){tail}"
