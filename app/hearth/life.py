"""One life of the engine: from its spawn until it is gone, or until it has to go."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hearth.board import Board
from hearth.bundle import Story
from hearth.config import Config
from hearth.engine.classify import classify, hang_failure
from hearth.engine.effective import differences, effective_plan, unused
from hearth.engine.logstream import LogStream, log_pipe
from hearth.engine.phases import PhaseTracker
from hearth.engine.ports import owner
from hearth.engine.probe import CanaryResult, Probe
from hearth.engine.process import EngineProcess, StopReport
from hearth.engine.redact import Redactor
from hearth.engine.signatures import live_signature
from hearth.failure import Failure, FailureKind, Phase
from hearth.host import xid
from hearth.kernels.seal import CompileWatch
from hearth.ladder import GraphPlan
from hearth.metrics import Metrics
from hearth.precheck import check_kernels
from hearth.pulse import CANARY_TRIES, Pulse, numerics, unanswered

log = logging.getLogger(__name__)

TICK = 0.5
LAST_WORDS = 3.0
"""Seconds that an engine with a fatal line gets to die by itself and say more."""
RETRY_CANARY = 10.0


@dataclass(frozen=True)
class Launch:
    """What to start, and what is known about it."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    plan: GraphPlan


class Life:
    """Spawns the engine, follows its log and its answers, and says how it ended."""

    def __init__(
        self,
        config: Config,
        launch: Launch,
        board: Board,
        metrics: Metrics,
        probe: Probe,
        redactor: Redactor,
        forward: int | None,
        on_serving: Callable[[], None],
    ) -> None:
        self._config, self._launch = config, launch
        self._board, self._metrics = board, metrics
        self._probe, self._redactor = probe, redactor
        self._forward, self._on_serving = forward, on_serving
        self._wake = asyncio.Event()
        self._fatal_at: float | None = None
        self._tracker = PhaseTracker({phase: config.limits.phase(phase) for phase in Phase}, time.monotonic())
        self._compiles = CompileWatch([config.paths.cache])
        self._asking: asyncio.Task[CanaryResult] | None = None
        self._process: EngineProcess | None = None
        self._stream: LogStream | None = None

    async def live(self, stop: asyncio.Event) -> Failure | None:
        """Run until the engine fails (the Failure) or `stop` is set (None). `end` must follow."""
        if self._config.engine.verify_kernels:
            failure = await check_kernels(self._config.engine.python, self._launch.env)
            if failure is not None or stop.is_set():
                return failure
        await self._spawn()
        assert self._process is not None
        stopping = asyncio.create_task(stop.wait())
        exiting = asyncio.create_task(self._process.wait_exit())
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({stopping, exiting, watching}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                return None
            if exiting.done():
                return await self._post_mortem(exiting.result())
            return watching.result()
        finally:
            tasks = [task for task in (stopping, exiting, watching, self._asking) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def end(self, drain: float) -> StopReport | None:
        """Stop the engine: `drain` seconds for running requests, then kill; returns when all are gone."""
        if self._process is None:
            return None
        report = await self._process.stop(drain, self._config.limits.kill)
        if self._stream is not None:
            await self._stream.drained(LAST_WORDS)
            self._stream.close()
        return report

    async def kill_now(self) -> None:
        """Cut a drain short."""
        if self._process is not None:
            self._process.kill()

    @property
    def pids(self) -> list[int]:
        """Pids of the engine's living processes, main first."""
        return [] if self._process is None else self._process.descendants()

    def story(self) -> Story:
        """How far the engine came, as of now; `sections` has the lines once it is gone."""
        phase, seconds = self._tracker.phase, self._tracker.seconds
        silent = 0.0 if self._stream is None else time.monotonic() - self._stream.last_line_at
        spent = {name.value: value + (silent if name is phase else 0.0) for name, value in seconds.items()}
        return Story((), spent, phase, self._tracker.progress_text, silent, self._launch.argv)

    def sections(self) -> list[tuple[str, list[str]]]:
        """The kept lines of each phase that the engine went through."""
        stream = self._stream
        if stream is None:
            return []
        kept = [(str(phase), stream.section(phase)) for phase in ("", *self._tracker.seconds)]
        return [(phase, lines) for phase, lines in kept if lines]

    async def _spawn(self) -> None:
        self._metrics.engine_restarted()
        read_end, write_end = log_pipe()
        try:
            self._process = await EngineProcess.spawn(
                self._launch.argv, self._launch.env, write_end, runtime_dir=self._config.paths.runtime
            )
        except BaseException:
            os.close(read_end)
            raise
        loop = asyncio.get_running_loop()
        self._stream = LogStream(read_end, self._forward, self._redactor, self._on_lines, loop)
        self._stream.start()
        self._show_phase()

    def _on_lines(self, lines: Sequence[str]) -> None:
        now = time.monotonic()
        for index, line in enumerate(lines):
            if self._tracker.observe(line, now) is not None:
                self._show_phase(index)
                self._wake.set()
            if self._fatal_at is None and live_signature(line) is not None:
                self._fatal_at = now
                self._wake.set()
        self._board.progress = self._tracker.progress_text

    def _show_phase(self, index: int | None = None) -> None:
        """Tell the board, and the log's ring that the phase began at line `index` of this batch."""
        phase = self._tracker.phase
        if self._stream is not None:
            self._stream.mark(phase, index)
        self._board.phase = phase
        seconds = self._tracker.seconds
        self._board.phase_seconds = {name.value: value for name, value in seconds.items()}
        self._metrics.set_phases(seconds)

    async def _watch(self) -> Failure:
        """Look at the engine until it fails without dying."""
        while not self._tracker.ready:
            await self._pause(TICK)
            failure = self._given_up() or self._overdue()
            if failure is not None:
                return failure
        failure = await self._verify()
        if failure is not None:
            return failure
        self._on_serving()
        return await self._attend()

    async def _pause(self, seconds: float) -> None:
        """Wait, or less when a line asks for attention."""
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            return
        self._wake.clear()

    def _given_up(self) -> Failure | None:
        """A GPU is lost, or a fatal line after which the engine lives longer than its last words take."""
        if self._board.gpu_fault is not None:
            return xid.failure(self._board.gpu_fault, self._tracker.phase)
        if self._fatal_at is None or time.monotonic() - self._fatal_at < LAST_WORDS:
            return None
        return classify(self._lines(), None, self._tracker.phase)

    def _overdue(self) -> Failure | None:
        overdue = self._tracker.overdue(time.monotonic())
        return None if overdue is None else hang_failure(overdue, self._lines())

    async def _verify(self) -> Failure | None:
        """The engine says it is ready: is it our engine, and does it answer right?"""
        stranger = self._stranger_on_port()
        if stranger is not None:
            return stranger
        results: list[CanaryResult] = []
        while len(results) < CANARY_TRIES:
            result = await self._ask_canary()
            if result.ok:
                await self._compare_plan()
                return None
            if result.verdict == "wrong":
                return numerics(result, Phase.WARMUP)
            results.append(result)
        return unanswered(results, Phase.WARMUP)

    def _stranger_on_port(self) -> Failure | None:
        """SGLang prints READY even when its warm-up reached another server on the same port."""
        assert self._process is not None
        port = self._config.ports.engine
        holder = owner(port)
        if holder is None or holder.pid is None or holder.pid in self._process.descendants():
            return None
        return Failure(
            FailureKind.PORT_IN_USE,
            Phase.BIND,
            evidence=(f"port {port} is held by {holder}",),
            hint="stop that process or change ports.engine",
            source="hearth: port owner",
        )

    async def _ask_canary(self) -> CanaryResult:
        canary, model = self._config.canary, self._config.model.served_name
        result = await self._probe.canary(
            model, canary.prompt, canary.expect, canary.max_tokens, canary.timeout
        )
        self._board.canary_ok, self._board.canary_detail = result.ok, result.detail
        self._metrics.canary_ok.set(result.ok)
        self._metrics.canary_seconds.set(result.seconds)
        return result

    async def _compare_plan(self) -> None:
        info = await self._probe.server_info()
        effective = effective_plan(self._launch.plan, info, self._tracker.seconds)
        self._board.effective = effective
        self._note_downgrades(differences(self._launch.plan, effective))

    def _note_downgrades(self, sentences: Sequence[str]) -> None:
        """Show each silent downgrade, once for each axis: what the engine says of itself comes first."""
        known = {sentence.partition(":")[0] for sentence in self._board.downgrades}
        for sentence in sentences:
            if sentence.partition(":")[0] not in known:
                self._board.downgrades.append(sentence)
                self._metrics.plan_differs.set(len(self._board.downgrades))
                log.warning("The engine runs less than it was asked for: %s", sentence)

    async def _attend(self) -> Failure:
        """Poll a serving engine until it fails."""
        limits, canary = self._config.limits, self._config.canary
        pulse = Pulse(limits.stall, time.monotonic())
        self._compiles.mark()
        next_canary = time.monotonic() + canary.interval
        await self._poll(pulse, 0.0)
        polled = time.monotonic()
        while True:
            await self._pause(limits.poll)
            now = time.monotonic()
            failure = self._given_up()
            if failure is None and now - polled >= min(limits.poll, 1.0):
                failure = await self._poll(pulse, now - polled)
                polled = now
            if failure is None and self._asking is not None and self._asking.done():
                result, self._asking = self._asking.result(), None
                failure = pulse.canary(result)
                next_canary = now + (canary.interval if result.ok else RETRY_CANARY)
            if failure is not None:
                return failure
            if self._asking is None and now >= next_canary:
                self._asking = asyncio.create_task(self._ask_canary())

    async def _poll(self, pulse: Pulse, seconds: float) -> Failure | None:
        samples = await self._probe.samples()
        pulse.observe(samples, time.monotonic())
        board = self._board
        if samples is not None:
            board.rates = self._metrics.take(samples, seconds)
            board.running, board.queued = samples.running, samples.queued
            board.kv_usage, board.passes = samples.kv_usage, samples.passes
            board.history.add(time.time(), board.rates["generation"], board.rates["prefill"])
            self._note_downgrades(unused(self._launch.plan, samples.passes))
        for name in self._compiles.scan():
            self._metrics.compiles.inc()
            log.warning("Compiled while serving: %s", name)
        return pulse.stalled(time.monotonic())

    async def _post_mortem(self, status: int) -> Failure:
        """Why the engine died: read to the end of its log, then classify."""
        assert self._stream is not None
        await self._stream.drained(LAST_WORDS)
        if self._board.gpu_fault is not None:
            return xid.failure(self._board.gpu_fault, self._tracker.phase)
        failure = classify(self._lines(), status, self._tracker.phase)
        if failure is not None:
            return failure
        return Failure(
            FailureKind.UNKNOWN,
            self._tracker.phase,
            evidence=(f"the engine exited with status {status} without being asked", *self._lines()[-5:]),
            hint="somebody may have stopped it: look for a SIGTERM from outside",
            source="hearth: exit status",
        )

    def _lines(self) -> list[str]:
        return self._stream.all_lines() if self._stream is not None else []
