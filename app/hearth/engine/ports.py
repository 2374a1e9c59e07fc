"""Whether a port is free, and who has it.

SGLang finds a taken port only after the whole load, and prints `fired up and ready to roll!` first where
another SGLang owns it: so Hearth looks before it spawns.
"""

from __future__ import annotations

import errno
import shlex
import socket
from dataclasses import dataclass
from typing import Any

import psutil

from hearth.engine.redact import Redactor
from hearth.errors import ConfigError, PortInUse

_UNSEEN = "its owner can't be seen from here: as root on the host, run ss -ltnp 'sport = :{port}'"


@dataclass(frozen=True)
class Owner:
    """The process that has a port; `pid` is None where it can't be seen (another user's or container's)."""

    pid: int | None
    command: str = ""


def ensure_free(host: str, port: int) -> None:
    """Bind and listen for a moment, as the engine will. Raises PortInUse or ConfigError naming both."""
    try:
        places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host {host!r}: {error}", "write an address of this machine, or 0.0.0.0"
        ) from error
    problems = [_try(family, address, host, port) for family, *_, address in places]
    if None not in problems:
        # A name may stand for IPv4 and IPv6: one that works is enough.
        raise ConfigError(f"can't listen on {host} port {port}: {problems[0]}")


def owner(port: int) -> Owner | None:
    """Who listens on a TCP port (else: who uses it at all), None when nobody does."""
    users = _users(port)
    if not users:
        return None
    pid = min(users, key=lambda user: (user.status != psutil.CONN_LISTEN, user.pid is None)).pid
    return Owner(pid, _command(pid) if pid else "")


def _try(family: int, address: Any, host: str, port: int) -> str | None:
    """What keeps the engine from listening there, None when nothing does. Raises PortInUse."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As uvicorn does: connections in TIME_WAIT don't count as taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(host, port) from error
        return error.strerror
    return None


def _taken(host: str, port: int) -> PortInUse:
    found = owner(port)
    if found is None:
        return PortInUse(
            f"port {port} on {host} is taken", "nobody listens: old connections close in a minute"
        )
    if found.pid is None:
        return PortInUse(f"port {port} on {host} is taken", _UNSEEN.format(port=port))
    return PortInUse(
        f"port {port} on {host} is taken by process {found.pid}: {found.command}",
        "stop it, or choose another port",
    )


def _users(port: int) -> list[Any]:
    try:
        connections = psutil.net_connections(kind="tcp")
    except (OSError, psutil.Error):
        return []
    return [c for c in connections if c.laddr and c.laddr.port == port and c.status != psutil.CONN_TIME_WAIT]


def _command(pid: int) -> str:
    try:
        words = psutil.Process(pid).cmdline()
        text = shlex.join(words) if words else psutil.Process(pid).name()
    except psutil.Error:
        return "(already gone)"
    return " ".join(Redactor(())(text).split())[:300]
