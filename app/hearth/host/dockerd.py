"""Docker Engine's client, and what its refusals mean.

Every error of the SDK becomes one HearthError: what Docker said, what that means, the fix, an exit code. The
wordings are data (`docker_errors.yaml`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import requests
import yaml
from docker.client import DockerClient
from docker.errors import APIError, DockerException, InvalidArgument, NotFound

from hearth.errors import ExitCode, HearthError

_DATA = Path(__file__).with_name("docker_errors.yaml")
_PATIENCE = 60
"""Seconds that one question to the Engine may take."""


class EngineError(HearthError):
    """Docker Engine refused; `code` says what kind of refusal it was."""

    def __init__(self, message: str, hint: str, code: ExitCode) -> None:
        super().__init__(message, hint)
        self.code = code


class EngineAway(EngineError):
    """Nothing answers at Docker's socket: it isn't running, or starts again."""

    def __init__(self, why: str) -> None:
        hint = "start it: systemctl start docker"
        super().__init__(f"Docker Engine doesn't answer: {why}", hint, ExitCode.UNREACHABLE)


@dataclass(frozen=True)
class Meaning:
    """One row of docker_errors.yaml."""

    match: re.Pattern[str]
    code: ExitCode
    say: str
    fix: str
    example: str


@cache
def meanings() -> tuple[Meaning, ...]:
    """The table, in its order."""
    rows: list[dict[str, str]] = yaml.safe_load(_DATA.read_text(encoding="utf-8"))
    return tuple(
        Meaning(re.compile(row["match"], re.I), ExitCode[row["code"]], row["say"], row["fix"], row["example"])
        for row in rows
    )


def refusal(said: str) -> EngineError:
    """The error for what the Engine said (pure)."""
    said = " ".join(said.split())
    for row in meanings():
        if row.match.search(said):
            return EngineError(f"{row.say} (Docker: {said[:300]})", row.fix, row.code)
    return EngineError(f"Docker Engine refused: {said[:400]}", "see journalctl -u docker", ExitCode.RETRY)


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Around every use of the SDK: its errors become EngineError or EngineAway.

    NotFound passes through, and so does InvalidArgument, which would be a mistake of ours.
    """
    try:
        yield
    except (NotFound, InvalidArgument):
        raise
    except APIError as error:
        raise refusal(str(error.explanation or error)) from error
    except (DockerException, requests.RequestException, OSError) as error:
        raise away(error) from error


def away(error: Exception) -> EngineError:
    """The error for an Engine that can't be talked to."""
    said = str(error)
    if "Permission denied" in said or "PermissionError" in said:
        return EngineError(
            "Docker Engine: permission denied at its socket", "run it as root (sudo)", ExitCode.PERMISSION
        )
    if "FileNotFoundError" in said or "No such file" in said:
        return EngineAway("there is no socket")
    if "Connection refused" in said:
        return EngineAway("connection refused")
    return EngineAway(" ".join(said.split())[:200])


@contextlib.contextmanager
def engine() -> Iterator[Any]:
    """A client of the Engine that DOCKER_HOST names, else the local one. Raises EngineError or EngineAway."""
    with asking(), contextlib.closing(DockerClient.from_env(timeout=_PATIENCE)) as client:
        yield client
