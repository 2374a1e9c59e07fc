"""Talking to systemd: the notification protocol of sd_notify(3), and nothing where there is no systemd."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

READY, STOPPING, WATCHDOG = "READY=1", "STOPPING=1", "WATCHDOG=1"
_STATUS_MAX = 250


class Notifier:
    """Sends messages to the socket that systemd named in NOTIFY_SOCKET; without one it does nothing."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        said = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{said[1:]}" if said.startswith("@") else said

    @property
    def connected(self) -> bool:
        """Whether systemd listens."""
        return bool(self._address)

    def send(self, messages: Sequence[str]) -> None:
        """Send them as one datagram. A systemd that can't be reached is logged, never fatal."""
        if not self._address or not messages:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.sendto("\n".join(messages).encode(), self._address)
        except OSError as error:
            log.warning("systemd can't be told %s: %s", messages[0], error)


def status(sentence: str) -> str:
    """The message that `systemctl status` shows: one line, not too long."""
    line = " ".join(sentence.split())
    return f"STATUS={line if len(line) <= _STATUS_MAX else line[: _STATUS_MAX - 3] + '...'}"


def extend(seconds: float) -> str:
    """The message that asks for this much time from now on, while starting or stopping."""
    return f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}"
