"""`hearth launch`: what hearth.service runs on the host."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from hearth.deploy.onhost import usable
from hearth.deploy.release import secret_names
from hearth.deploy.releases import load
from hearth.errors import HearthError
from hearth.host.container import Wanted
from hearth.host.launcher import Launch, Launcher
from hearth.host.notify import Notifier, status
from hearth.yamltext import read

DOCKER_WAIT = 120.0


def launch(
    release: Annotated[
        Path, typer.Option("--release", help="Folder of the release.", envvar="HEARTH_RELEASE")
    ] = Path("/var/lib/hearth/releases/current"),
    name: Annotated[str, typer.Option("--name", help="Name of the container.")] = "hearth",
    docker_wait: Annotated[
        float | None,
        typer.Option(help="Seconds to wait for Docker Engine (120 under systemd, else 0).", min=0.0),
    ] = None,
) -> None:
    """Run a release's container and speak for it to systemd (Type=notify).

    READY when /readyz is 200, STATUS with what goes on, more time while a start advances, WATCHDOG while the
    supervisor's loop turns. SIGTERM drains and stops; a second one kills. Exits as the supervisor did.
    """
    _log_to_stderr()
    notifier = Notifier()
    try:
        wanted = _launch(release, name, _wait(docker_wait, notifier))
    except HearthError as error:
        notifier.send([status(str(error))])
        raise
    raise typer.Exit(int(asyncio.run(Launcher(wanted, notifier).run())))


def _wait(said: float | None, notifier: Notifier) -> float:
    if said is not None:
        return said
    return DOCKER_WAIT if notifier.connected else 0.0


def _launch(folder: Path, name: str, docker_wait: float) -> Launch:
    """Everything that is known before Docker is asked. Raises ConfigError or MissingError."""
    release = load(folder)
    path = folder.resolve() / release.config.file  # resolved: a switch of `current` mustn't change what runs
    config = usable(release.container, read(path), str(path))
    published = release.container.published(config.ports.supervisor)
    assert published is not None  # usable() has seen to it
    host = socket.gethostname()
    wanted = Wanted(name, release.id, release.image.digest, release.container, path, host=host)
    runtime = Path(os.environ.get("RUNTIME_DIRECTORY", "/run/hearth"))
    return Launch(wanted, config, published.reach, secret_names(config), runtime, docker_wait)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[hearth launch] %(message)s"))
    logging.getLogger("hearth").addHandler(handler)
    logging.getLogger("hearth").setLevel(logging.INFO)
