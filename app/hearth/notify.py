"""Tells a webhook what a person should know at once, whether or not any monitoring runs.

Each document is posted by a daemon thread of its own, a few times if need be: neither recovery nor exit waits
for a slow receiver. (asyncio's look-up of a host name runs in a thread that the interpreter waits for when it
ends, so asyncio is no help here.) The webhook's address may hold a token and is never logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hearth import __version__
from hearth.config import Notify
from hearth.config_types import WebAddress
from hearth.errors import ConfigError, MissingError
from hearth.scrub import address_secrets, header_secrets, shown_address

log = logging.getLogger(__name__)

WAITS = (1.0, 5.0, 25.0)
"""Seconds before each further try."""
MOST_PENDING = 16
_LATER = frozenset({408, 425, 429})


@dataclass(frozen=True)
class Target:
    """Where documents go, and which."""

    url: str
    headers: Mapping[str, str]
    events: frozenset[str]
    timeout: float

    @property
    def shown(self) -> str:
        """The address as it may be logged."""
        return shown_address(self.url)

    @property
    def secrets(self) -> list[str]:
        """What must not reach a log."""
        headers = (part for value in self.headers.values() for part in header_secrets(value))
        return [*address_secrets(self.url), *headers]


def read_target(settings: Notify) -> Target | None:
    """The webhook that the config names, if any. Raises MissingError or ConfigError naming key and file."""
    url = settings.url
    if settings.url_file is not None:
        url = _address(_read("notify.url_file", settings.url_file), settings.url_file)
    if url is None:
        return None
    headers = {
        name: _read(f"notify.header_files.{name}", path) for name, path in settings.header_files.items()
    }
    return Target(url, headers, frozenset(settings.events), settings.timeout)


def _read(key: str, path: Path) -> str:
    """A file's one line."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise MissingError(f"{key}: {path}: no such file", "put the value there") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not plain ASCII"
        raise ConfigError(f"{key}: {path}: can't be read: {why}") from None
    if not text or not text.isprintable():
        raise ConfigError(f"{key}: {path}: not one line of text", "put the value there, alone in one line")
    return text


def _address(text: str, path: Path) -> str:
    try:
        return str(TypeAdapter(WebAddress).validate_python(text))
    except ValidationError:
        raise ConfigError(
            f"notify.url_file: {path}: not a web address", "write https://HOST/PATH in it"
        ) from None


class Notifier:
    """Posts documents to a target; without one it does nothing."""

    def __init__(self, target: Target | None, waits: Sequence[float] = WAITS) -> None:
        self._target, self._waits = target, waits
        self._pending: list[threading.Thread] = []

    def wants(self, event: str) -> bool:
        """Whether somebody is to be told of such an event."""
        return self._target is not None and event in self._target.events

    def post(self, document: Mapping[str, Any]) -> None:
        """Send a document in the background. Never raises, never waits."""
        if self._target is None:
            return
        self._pending = [thread for thread in self._pending if thread.is_alive()]
        if len(self._pending) >= MOST_PENDING:
            log.warning("Webhook %s: not told of %s: too slow", self._target.shown, document.get("event"))
            return
        body = json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
        event = str(document.get("event"))
        thread = threading.Thread(target=self._deliver, args=(self._target, event, body), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is to be had: no reason to stop
            log.warning("Webhook %s: not told of %s: %s", self._target.shown, event, error)
        else:
            self._pending.append(thread)

    async def close(self, seconds: float | None = None) -> bool:
        """Wait for what is unsent: `seconds`, or else the target's timeout. False where something is left."""
        limit = seconds if seconds is not None else self._target.timeout if self._target else 0.0
        end = time.monotonic() + limit
        while any(thread.is_alive() for thread in self._pending):
            if time.monotonic() >= end:
                assert self._target is not None
                log.warning("Webhook %s: something is still unsent at the end", self._target.shown)
                return False
            await asyncio.sleep(0.05)
        return True

    def _deliver(self, target: Target, event: str, body: bytes) -> None:
        """Try until it is taken, refused for good, or tried often enough; says once how it ended badly."""
        problem, final = "", False
        for wait in (0.0, *self._waits):
            time.sleep(wait)
            problem, final = _try(target, body)
            if not problem:
                return
            if final:
                break
        log.warning("Webhook %s: not told of %s: %s", target.shown, event, problem)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A POST that is redirected would become a GET, and its headers would go to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _try(target: Target, body: bytes) -> tuple[str, bool]:
    """One POST: what went wrong (empty where it was taken), and whether trying again is pointless."""
    headers = {
        "User-Agent": f"hearth/{__version__}",
        **target.headers,
        "Content-Type": "application/json",
        "Connection": "close",
    }
    request = urllib.request.Request(target.url, body, headers, method="POST")
    try:
        with _OPENER.open(request, timeout=target.timeout):
            return "", True
    except urllib.error.HTTPError as error:
        with error:
            return f"it answered {error.code}", error.code < 500 and error.code not in _LATER
    except urllib.error.URLError as error:
        return f"{type(error.reason).__name__}: {_plain(error.reason, target)}", False
    except (OSError, HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {_plain(error, target)}", False


def _plain(error: object, target: Target) -> str:
    """An error's text, unless it repeats something secret."""
    text = str(error)[:200]
    return "(not shown)" if any(secret in text for secret in target.secrets) else text
