"""The supervisor's loop: start the engine, watch it, name what went wrong, decide, act."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from hearth.board import Board, Incident
from hearth.config import Config
from hearth.engine.command import engine_argv, engine_env
from hearth.engine.dialect import dialect_for
from hearth.engine.ports import ensure_free
from hearth.engine.probe import Probe
from hearth.errors import ExitCode, HearthError, StateError
from hearth.failure import Failure
from hearth.faultwatch import FaultWatch
from hearth.host.gpu import Gpus
from hearth.kernels.warm import unlike as warmed_unlike
from hearth.ladder import GraphPlan
from hearth.life import Launch, Life
from hearth.metrics import Metrics
from hearth.planstore import PlanStore, fingerprint
from hearth.policy import Action, Decision, Event, Rules, decide
from hearth.reporter import Reporter
from hearth.states import State, allowed
from hearth.web import Web

log = logging.getLogger(__name__)

MEMORY_SLACK = 1 << 30
"""Bytes above the idle level that still count as "memory is free again"."""
_API_KEYS = ("api_key", "admin_api_key")
_FINAL = {ExitCode.HOST_ACTION: State.HOST_ACTION_REQUIRED}


class Supervisor:
    """Keeps one engine serving. `run` returns the exit code of `hearth serve`."""

    def __init__(self, config: Config, architecture: str | None, secrets: Mapping[str, str]) -> None:
        self._config, self._secrets = config, secrets
        self._dialect = dialect_for(config.engine.version, architecture)
        wanted = self._dialect.resolve(config.graphs.wanted, config.graphs.decode_max_bs)
        self._ladder = self._dialect.ladder(wanted)
        self._rules = _rules(config)
        self._gpus = Gpus()
        self._store = PlanStore(config.paths.state)
        self._key = fingerprint(_facts(config, self._gpus))
        self._events: list[Event] = []
        self._failed_at: float | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reporter = Reporter(config, secrets)
        self._redactor = self._reporter.redact
        self.metrics = Metrics(config.engine.version, config.image_digest)
        self.board = self._new_board(wanted)
        self._faults = FaultWatch(self.board, self.metrics, self._gpus.addresses())
        self._web = Web(self.board, self.metrics, config.ports.supervisor_host, config.ports.supervisor)

    def _new_board(self, wanted: GraphPlan) -> Board:
        remembered = self._store.recall(self._key, wanted)
        board = Board(wanted=wanted, plan=wanted if remembered is None else remembered.plan)
        board.engine_version = self._config.engine.version
        board.model = self._config.model.served_name
        board.endpoint = f"http://{_reachable(self._config.ports.engine_host)}:{self._config.ports.engine}"
        if remembered is not None:
            board.ladder_steps = len(remembered.failures)
            self._events = [Event(0.0, f, remembered.wanted, True) for f in remembered.failures]
        return board

    async def run(self) -> ExitCode:
        """Serve until told to stop or until nothing more can be done."""
        self._listen_to_signals()
        self.metrics.set_state(State.IDLE, State.IDLE)
        self._show_plan()  # steps down are remembered from earlier runs
        ensure_free(self._config.ports.engine_host, self._config.ports.engine)
        await self._web.start()
        unlike = warmed_unlike(self._config.paths.cache, self._env().get("PATH"))
        if unlike is not None:
            log.warning("%s", unlike)
        turning = asyncio.create_task(self._turn())
        if self._config.profile == "gpu":
            self._faults.start()
        try:
            async with self._new_probe() as probe:
                return await self._keep_serving(probe)
        finally:
            turning.cancel()
            self._faults.close()
            self._save_last_status()
            await self._reporter.close(self._hurry.is_set())
            await self._web.stop()

    async def _keep_serving(self, probe: Probe) -> ExitCode:
        if self.board.plan != self.board.wanted:
            self._say(f"Remembered: {_describe(self.board.wanted)} did not work here; starting lower.")
        while True:
            self._move(State.STARTING, f"Starting the engine with {_describe(self.board.plan)}.")
            baseline = self._gpus.used_bytes()
            for sentence in self._gpus.held(MEMORY_SLACK):
                log.warning("%s", self._redactor(sentence))
            life = self._new_life(probe)
            try:
                failure = await life.live(self._stop)
            except HearthError:
                await life.end(0)
                raise
            if failure is None:
                return await self._drain(life)
            code = await self._recover(life, failure, baseline)
            if code is not None:
                return code

    async def _drain(self, life: Life) -> ExitCode:
        drain = self._config.limits.drain
        self._move(State.DRAINING, f"Stopping: running requests get {drain:g} s.")
        hurry = asyncio.create_task(self._kill_when_hurried(life))
        report = await life.end(drain)
        hurry.cancel()
        how = "ended by itself" if report and report.drained else "was killed"
        self._move(State.STOPPED, f"Stopped: the engine {how}; no process is left.")
        return ExitCode.OK

    async def _kill_when_hurried(self, life: Life) -> None:
        await self._hurry.wait()
        await life.kill_now()

    async def _recover(self, life: Life, failure: Failure, baseline: list[int]) -> ExitCode | None:
        """Clear the ground after a failure and decide; the exit code when that is the end."""
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        self.board.canary_ok = False
        self.metrics.canary_ok.set(False)
        self.metrics.failures.labels(failure.kind.value).inc()
        self._move(State.RECOVERING, f"The engine failed: {failure.sentence}")
        story = life.story()
        snapshot = await self._reporter.look(failure, life.pids)
        await life.end(0)
        await self._wait_for_memory(baseline)
        plan = self.board.plan
        decision = decide(failure, plan, self._ladder, self._events, self._rules, now)
        story = replace(story, sections=life.sections())
        bundle = await self._reporter.report(self.board, failure, decision, self._events, (snapshot, story))
        self._events.append(Event(now, failure, plan, decision.action is Action.STEP_DOWN))
        self.board.incidents.append(Incident(time.time(), failure, plan, decision.sentence, bundle))
        if failure.hint:
            log.warning("Hint: %s", failure.hint)
        if decision.plan is None:
            return self._give_up(decision)
        self._adopt(decision, failure)
        return await self._back_off(decision)

    def _give_up(self, decision: Decision) -> ExitCode:
        code = decision.exit_code
        end = _FINAL.get(code, State.GAVE_UP)
        self._move(end, f"Stopped for good: {decision.sentence}. Exit code {code.value}: {code.meaning}.")
        return code

    def _adopt(self, decision: Decision, failure: Failure) -> None:
        assert decision.plan is not None
        board = self.board
        board.restarts += 1
        self.metrics.restarts.labels(failure.kind.value).inc()
        if decision.action is Action.STEP_DOWN:
            self.metrics.count_fallback(board.plan, decision.plan, failure)
            board.ladder_steps += 1
        board.plan, board.effective, board.downgrades = decision.plan, None, []
        self._show_plan()

    async def _back_off(self, decision: Decision) -> ExitCode | None:
        self._say(f"Decided: {decision.sentence}.")
        if decision.delay <= 0:
            return None
        delay = decision.delay * random.uniform(0.8, 1.2)
        self._move(State.BACKOFF, f"Waiting {delay:.1f} s before the next start ({decision.sentence}).")
        try:
            await asyncio.wait_for(self._stop.wait(), delay)
        except TimeoutError:
            return None
        self._move(State.DRAINING, "Stopping: no engine is running.")
        self._move(State.STOPPED, "Stopped.")
        return ExitCode.OK

    async def _wait_for_memory(self, baseline: list[int]) -> None:
        limit = self._config.limits.memory_free
        if not await self._gpus.wait_memory_below(baseline, MEMORY_SLACK, limit):
            log.warning("GPU memory is still in use %g s after the engine is gone", limit)

    def _serving(self) -> None:
        """The engine answers right."""
        board = self.board
        if self._failed_at is not None:
            downtime = time.monotonic() - self._failed_at
            self.metrics.recovery.observe(downtime)
            self._reporter.ready_again(board, downtime)
            self._failed_at = None
        self._show_plan()
        lower = "" if board.plan == board.wanted else f"; wanted was {_describe(board.wanted)}"
        self._move(State.SERVING, f"Serving {board.model} with {_describe(board.plan)}{lower}.")
        failures = [event.failure for event in self._events if event.stepped]
        try:
            self._store.remember(self._key, board.plan, board.wanted, failures)
        except StateError as error:
            log.warning("The plan can't be remembered: %s", error)

    def _show_plan(self) -> None:
        board = self.board
        effective = board.effective or board.plan
        self.metrics.set_plan(board.wanted, effective, board.ladder_steps, len(board.downgrades))

    def _new_life(self, probe: Probe) -> Life:
        launch = Launch(self._argv(), self._env(), self.board.plan)
        forward = sys.stdout.fileno()
        return Life(
            self._config, launch, self.board, self.metrics, probe, self._redactor, forward, self._serving
        )

    def _argv(self) -> tuple[str, ...]:
        config = self._config
        argv = engine_argv(
            config.engine.python,
            self._dialect,
            self.board.plan,
            str(config.model.path),
            config.ports.engine_host,
            config.ports.engine,
            config.model.served_name,
            config.engine.args,
        )
        return (*argv, *self._secret_arguments())

    def _secret_arguments(self) -> tuple[str, ...]:
        """API keys go to SGLang through a file of its own `--config`, so that no argv shows them."""
        keys = {n.replace("_", "-"): self._secrets[n] for n in _API_KEYS if n in self._secrets}
        if not keys:
            return ()
        path = self._config.paths.runtime / "engine-secrets.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            yaml.safe_dump(keys, file)
        return ("--config", str(path))

    def _env(self) -> dict[str, str]:
        config = self._config
        return engine_env(self._dialect, config.engine.env, config.engine.pass_env, str(config.paths.cache))

    def _new_probe(self) -> Probe:
        url = self.board.endpoint
        return Probe(url, self._secrets.get("api_key", ""), self._secrets.get("admin_api_key", ""))

    async def _turn(self) -> None:
        while True:
            self.board.loop_turned_at = time.monotonic()
            await asyncio.sleep(1.0)

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """The first signal drains, the second kills."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    def _move(self, state: State, sentence: str) -> None:
        previous = self.board.state
        if not allowed(previous, state):
            raise AssertionError(f"no move from {previous} to {state}")
        self.board.state, self.board.state_since = state, time.time()
        self.metrics.set_state(previous, state)
        self._say(sentence)

    def _say(self, sentence: str) -> None:
        sentence = self._redactor(sentence)
        self.board.say(sentence)
        log.info("%s", sentence)

    def _save_last_status(self) -> None:
        """What `hearth status` shows when no supervisor answers any more."""
        path = self._config.paths.state / "last-status.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.board.to_json()), encoding="utf-8")
        except OSError as error:
            log.warning("%s: can't be written: %s", path, error)


def _rules(config: Config) -> Rules:
    limits, ladder = config.limits, config.graphs.ladder
    return Rules(
        window=limits.restart_window,
        count=limits.restart_count,
        backoff=limits.backoff,
        backoff_max=limits.backoff_max,
        ladder_enabled=ladder.enabled,
        allow_eager=ladder.allow_eager,
    )


def _facts(config: Config, gpus: Gpus) -> dict[str, Any]:
    """What must be equal for a remembered plan to hold (DESIGN: fingerprint)."""
    return {
        "image_digest": config.image_digest,
        "engine_version": config.engine.version,
        "model": [str(config.model.path), config.model.revision],
        "engine_args": config.engine.args,
        "engine_env": config.engine.env,
        "gpus": gpus.names(),
        "driver": gpus.driver(),
    }


def _reachable(host: str) -> str:
    """A host that a client on this machine can connect to."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)


def _describe(plan: GraphPlan) -> str:
    """For a sentence: `the standard plan (prefill disabled, decode full, batch 32)`."""
    size = "" if plan.decode_max_bs is None else f", batch {plan.decode_max_bs}"
    name = "a mixed" if "," in plan.name else f"the {plan.name}"
    return f"{name} plan (prefill {plan.prefill}, decode {plan.decode}{size})"
