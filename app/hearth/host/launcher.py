"""The launcher: main process of hearth.service. Runs one release's container and speaks for it to systemd.

A thin shell: what to say and how it ends is decided in `launch_plan`, how the container runs in `container`.
Questions to Docker run in threads and are never waited for: an Engine that hangs or restarts doesn't take a
healthy service down.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hearth.config import Config
from hearth.errors import ExitCode, HearthError
from hearth.host import dockerd
from hearth.host.container import Containers, Running, Wanted
from hearth.host.credentials import hand_over
from hearth.host.dockerd import EngineAway, EngineError
from hearth.host.launch_plan import EXTENSION, End, Gone, Recreations, Watch, ending, told
from hearth.host.logpump import LogPump
from hearth.host.notify import STOPPING, Notifier, extend, status
from hearth.host.supervisor_port import SupervisorPort

log = logging.getLogger(__name__)

TICK = 2.0
STOP_MARGIN = 15.0
"""Seconds beyond the supervisor's own drain and kill after which a stop becomes a kill."""
LAST_WORDS = 5.0
LAST_STATUS = "last-status.json"
"""What the supervisor leaves in its state folder when it ends."""
T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """What to run. `secrets`: credential by config key."""

    wanted: Wanted
    config: Config
    supervisor: str
    """HOST:PORT where the supervisor's port is published."""
    secrets: dict[str, str]
    runtime: Path
    """Folder on a tmpfs for this start."""
    docker_wait: float = 0.0
    """Seconds to wait for a Docker Engine that isn't up yet."""


class Launcher:
    """Runs a release until it ends or is told to stop. `run` returns the launcher's exit code."""

    def __init__(self, launch: Launch, notifier: Notifier) -> None:
        self._launch, self._notifier = launch, notifier
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._recreations = Recreations()
        self._ready_sent = False

    async def run(self) -> ExitCode:
        """Run to the end. Raises HearthError for what can't even be started."""
        self._listen_to_signals()
        try:
            await self._wait_for_docker()
            secrets = hand_over(self._launch.secrets, self._launch.runtime)
            with dockerd.engine() as client:
                containers = Containers(client, self._launch.wanted.name)
                end = await self._keep(containers, replace(self._launch.wanted, secrets=secrets))
        except HearthError as error:
            self._notifier.send([status(str(error))])
            raise
        self._say(end.sentence)
        return end.code

    async def _keep(self, containers: Containers, wanted: Wanted) -> End:
        """One container after the other, as long as a new one is the answer."""
        while True:
            if self._stop.is_set():
                return ending(Gone(0), asked=True)
            if await asyncio.to_thread(containers.remove_leftover):
                log.info("Removed the container %r that an earlier start left.", wanted.name)
            container = await asyncio.to_thread(containers.start, wanted)
            try:
                end = await self._follow(containers, container)
            finally:
                await self._remove(containers, container)
            if not end.recreate:
                return end
            if not self._recreations.allow(time.monotonic()):
                return End(ExitCode.HOST_ACTION, f"{end.sentence} Too often within an hour: see the host.")
            self._say(f"{end.sentence} Making a new one, number {self._recreations.count} within an hour.")

    async def _follow(self, containers: Containers, container: str) -> End:
        """Until the container ends."""
        pump = LogPump(lambda since: containers.log(container, since), asyncio.get_running_loop())
        pump.start()
        begun = time.time()
        watch = Watch(self._launch.config.limits, time.monotonic(), self._ready_sent)
        state = Question(lambda: containers.state(container))
        stopping = Stopping(self._launch, lambda name: containers.signal(container, name), self._notifier)
        async with SupervisorPort() as port:
            port.at(self._launch.supervisor)
            while True:
                seen = await state.answer(TICK)
                if isinstance(seen, Gone):
                    await pump.close(LAST_WORDS)
                    last = await asyncio.to_thread(self._last_status, containers, container, begun)
                    return told(ending(seen, asked=stopping.asked), last)
                if isinstance(seen, Running) and seen.address:
                    inside = f"{seen.address}:{self._launch.config.ports.supervisor}"
                    port.at(self._launch.supervisor, inside)
                self._notifier.send(watch.tick(await port.look(), time.monotonic()))
                self._ready_sent = watch.ready_sent
                await stopping.tick(self._stop.is_set(), self._hurry.is_set())
                await self._pause(pump.ended, stopping.asked)

    def _last_status(self, containers: Containers, container: str, begun: float) -> dict[str, Any] | None:
        """What the supervisor wrote when it ended; None where it is from an earlier start, or none."""
        path = self._launch.config.paths.state / LAST_STATUS
        try:
            found = containers.read(container, path)
            said = json.loads(found[0]) if found is not None and found[1] >= begun - 1 else None
        except (EngineError, OSError, ValueError, tarfile.TarError) as error:
            log.debug("%s can't be read: %s", path, error)
            return None
        return said if isinstance(said, dict) else None

    async def _pause(self, ended: asyncio.Event, stopping: bool) -> None:
        """A tick, or less when there is something to look at."""
        ended.clear()
        wake = self._hurry if stopping else self._stop
        waits = [asyncio.create_task(event.wait()) for event in (ended, *([] if wake.is_set() else [wake]))]
        await asyncio.wait(waits, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()

    async def _remove(self, containers: Containers, container: str) -> None:
        """The unit's ExecStopPost does it again where Docker can't now."""
        try:
            await asyncio.to_thread(containers.remove, container)
        except EngineError as error:
            log.warning("The container can't be removed now: %s", error)

    async def _wait_for_docker(self) -> None:
        """Raises EngineAway when it doesn't come up in time, EngineError when it refuses us."""
        ends = time.monotonic() + self._launch.docker_wait
        told = False
        while True:
            try:
                await asyncio.to_thread(_ping)
            except EngineAway as error:
                if time.monotonic() >= ends or self._stop.is_set():
                    raise
                if not told:
                    self._say(f"Waiting for Docker Engine: {error}")
                told = True
                self._notifier.send([extend(EXTENSION)])
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), TICK)
            else:
                return

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _say(self, sentence: str) -> None:
        log.info("%s", sentence)
        self._notifier.send([status(sentence)])


class Stopping:
    """Hands a stop on to the container: SIGTERM once, SIGKILL when it hurries or takes too long."""

    def __init__(self, launch: Launch, send: Callable[[str], None], notifier: Notifier) -> None:
        limits, posting = launch.config.limits, launch.config.notify.timeout
        self._grace = limits.drain + limits.kill + posting + STOP_MARGIN
        self._send, self._notifier = send, notifier
        self._ends: float | None = None
        self._told = False
        self._killed = False

    @property
    def asked(self) -> bool:
        """Whether a stop was asked for."""
        return self._ends is not None

    async def tick(self, stop: bool, hurry: bool) -> None:
        """Do what is due now."""
        if not stop:
            return
        now = time.monotonic()
        if self._ends is None:
            self._ends = now + self._grace
            log.info("Stopping: the container gets %g s; a second signal kills it.", self._grace)
        self._notifier.send([STOPPING, extend(max(1.0, self._ends - now) + STOP_MARGIN)])
        if not self._told:
            self._told = await self._tell("SIGTERM")
        elif (hurry or now >= self._ends) and not self._killed:
            log.warning("Killing the container: %s.", "a second signal" if hurry else "it took too long")
            self._killed = await self._tell("SIGKILL")

    async def _tell(self, name: str) -> bool:
        """Whether Docker took the signal; where it didn't, the next tick tries again."""
        try:
            await asyncio.to_thread(self._send, name)
        except EngineError as error:
            log.warning("%s can't be sent now: %s", name, error)
            return False
        return True


class Question:
    """A blocking question asked in a thread, one at a time; a late answer comes with a later call."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._task: asyncio.Task[Any] | None = None

    async def answer(self, patience: float) -> Any:
        """The answer, or None when it isn't there within `patience` seconds or Docker can't say."""
        if self._task is None:
            self._task = asyncio.create_task(asyncio.to_thread(self._ask))
        done, _ = await asyncio.wait({self._task}, timeout=patience)
        if not done:
            return None
        task, self._task = self._task, None
        try:
            return task.result()
        except EngineError as error:
            log.debug("Docker can't say how the container is: %s", error)
            return None


def _ping() -> None:
    with dockerd.engine() as client:
        client.ping()
