"""`hearth warm`: start the engine once to fill the caches that only a GPU can fill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import aiohttp
import typer

from hearth.engine.dialect import dialect_for
from hearth.engine.logstream import LogStream, log_pipe
from hearth.engine.process import EngineProcess
from hearth.engine.redact import Redactor
from hearth.errors import CheckFailed, ConfigError, ExitCode, HearthError
from hearth.host.gpu import Gpus
from hearth.kernels import warm as warming
from hearth.kernels.seal import CompileWatch

_DRAIN_SECONDS, _KILL_SECONDS = 60.0, 30.0
_POLL_SECONDS, _NEWS_SECONDS = 2.0, 30.0


class WarmStopped(HearthError):
    """Somebody interrupted the warming."""

    code = ExitCode.RETRY


@dataclass(frozen=True)
class Engine:
    """The command that fills the caches, its SGLang version, and how to see that it is ready."""

    command: tuple[str, ...]
    version: str
    ready_url: str | None
    ready_line: re.Pattern[str] | None
    timeout: float


def warm(
    root: Annotated[Path, typer.Option(help="Caches go to ROOT/KEY.")],
    command: Annotated[str, typer.Option(help="The engine's command line, in the compiler image.")],
    engine_version: Annotated[str, typer.Option(help="Its SGLang version: decides the cache variables.")],
    image_digest: Annotated[str, typer.Option(envvar="HEARTH_IMAGE_DIGEST", help="Of the image to serve.")],
    gpu: Annotated[str, typer.Option(help="GPU type; asked from NVML where not given.")] = "",
    driver: Annotated[str, typer.Option(help="Driver version; asked from NVML where not given.")] = "",
    ready_url: Annotated[str | None, typer.Option(help="Ready when this answers 200.")] = None,
    ready_line: Annotated[str | None, typer.Option(help="Ready when a log line matches this.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for ready.")] = 7200,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fill the kernel caches for this image, GPU and driver; does nothing where they are there."""
    key = warming.cache_key(image_digest, *_machine(gpu, driver))
    engine = _engine(command, engine_version, ready_url, ready_line, timeout)
    try:
        result = asyncio.run(_run(root, key, engine))
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        raise WarmStopped("stopped; nothing half-made was kept") from error
    if as_json:
        typer.echo(json.dumps({**vars(result), "path": str(result.path), "key": key}))
        return
    what = "filled" if result.fresh else "there already"
    size = f"{result.files} files, {result.size} bytes"
    typer.echo(f"{result.path}: {what}, {size}, made in {result.seconds:.0f} s")
    for name in result.pruned:
        typer.echo(f"removed {name}")


def _machine(gpu: str, driver: str) -> tuple[str, str]:
    """GPU type and driver version, from NVML where not said. Raises ConfigError where neither knows."""
    if gpu and driver:
        return gpu, driver
    gpus = Gpus()
    try:
        names = sorted(set(gpus.names()))
        seen_driver = gpus.driver()
    finally:
        gpus.close()
    if not (gpu or names) or not (driver or seen_driver):
        raise ConfigError(
            "no GPU to be asked what it is", "say --gpu and --driver, or run it where the GPUs are"
        )
    return gpu or "+".join(names), driver or str(seen_driver)


def _engine(
    command: str, version: str, ready_url: str | None, ready_line: str | None, timeout: float
) -> Engine:
    if not (ready_url or ready_line):
        raise ConfigError("nothing says when the engine is ready", "say --ready-url or --ready-line")
    try:
        words = tuple(shlex.split(command))
        pattern = re.compile(ready_line) if ready_line else None
    except (ValueError, re.error) as error:
        raise ConfigError(f"--command or --ready-line: {error}") from error
    if not words:
        raise ConfigError("--command is empty")
    dialect_for(version)
    return Engine(words, version, ready_url, pattern, timeout)


async def _run(root: Path, key: str, engine: Engine) -> warming.Warmed:
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    return await warming.warm(root, key, starter(engine))


def starter(engine: Engine) -> Callable[[Path], Awaitable[None]]:
    """What `warming.warm` calls: runs the engine, its caches in a folder, until it was ready and is gone."""

    async def start(folder: Path) -> None:
        env = {**os.environ, **dialect_for(engine.version).cache_env(str(folder))}
        ready = asyncio.Event()
        read, write = log_pipe()
        process = await EngineProcess.spawn(engine.command, env, write)

        def look(lines: list[str]) -> None:
            if engine.ready_line and any(engine.ready_line.search(line) for line in lines):
                ready.set()

        log = LogStream(read, 2, Redactor(()), look, asyncio.get_running_loop())
        log.start()
        try:
            await _until_ready(engine, process, ready, log, CompileWatch([folder]))
        finally:
            await process.stop(_DRAIN_SECONDS, _KILL_SECONDS)
            await log.drained(5)
            log.close()

    return start


async def _until_ready(
    engine: Engine, process: EngineProcess, ready: asyncio.Event, log: LogStream, watch: CompileWatch
) -> None:
    """Wait until the log or the URL says ready. Raises CheckFailed where the engine ends or time is up."""
    started = told = time.monotonic()
    while not ready.is_set():
        if process.exit_status is not None:
            await log.drained(5)
            last = next(
                (line.strip() for line in reversed(log.tail(50)) if line.strip()), "it printed nothing"
            )
            raise CheckFailed(
                f"the engine ended with {process.exit_status} before it was ready: {last[:300]}"
            )
        now = time.monotonic()
        if now - started > engine.timeout:
            raise CheckFailed(f"the engine wasn't ready after {engine.timeout:.0f} s", "raise --timeout")
        if now - told > _NEWS_SECONDS:
            told = now
            typer.echo(
                f"hearth: {now - started:.0f} s, {len(watch.scan())} artifacts since the last line", err=True
            )
        if engine.ready_url and await _answers(engine.ready_url):
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ready.wait(), _POLL_SECONDS)


def _ended_early(status: int, lines: list[str]) -> CheckFailed:
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    return CheckFailed(f"the engine ended with {status} before it was ready: {last[:300]}")


async def _answers(url: str) -> bool:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
            session.get(url) as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return False
