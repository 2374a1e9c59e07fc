"""The unit, as systemd sees it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hearth.errors import ExitCode, HearthError, MissingError

UNIT = "hearth.service"
_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "ExecMainStatus",
    "NRestarts",
    "InvocationID",
    "StatusText",
    "ExecMainStartTimestampMonotonic",
    "FragmentPath",
)
_PATIENCE = 60.0


class SystemdRefused(HearthError):
    """systemctl said no."""

    code = ExitCode.PERMISSION


@dataclass(frozen=True)
class UnitState:
    """What `systemctl show` says of the unit."""

    load: str = "loaded"
    active: str = "inactive"
    sub: str = "dead"
    result: str = "success"
    exit_status: int = 0
    restarts: int = 0
    invocation: str = ""
    """A new id for each start."""
    status: str = ""
    """What the launcher last said."""
    started: float = 0.0
    """When its main process started, in seconds of `time.monotonic`."""
    path: str = ""
    """The unit's file."""

    @property
    def ready(self) -> bool:
        """Type=notify: running means that READY was sent."""
        return self.active == "active" and self.sub == "running"


class Unit(Protocol):
    """What an activation needs of systemd."""

    def show(self) -> UnitState: ...

    def restart(self) -> None: ...

    def stop(self) -> None: ...


class Systemctl:
    """`systemctl` for one unit. Raises SystemdRefused or MissingError."""

    def __init__(self, unit: str = UNIT) -> None:
        self._unit = unit

    def show(self) -> UnitState:
        """The unit's state now."""
        return parse(self._run("show", self._unit, f"--property={','.join(_PROPERTIES)}"))

    def restart(self) -> None:
        """Have it restarted (or started); doesn't wait. Earlier failures don't count against it."""
        self._run("reset-failed", self._unit, may_fail=True)
        self._run("restart", "--no-block", self._unit)

    def stop(self) -> None:
        """Stop it; doesn't wait."""
        self._run("stop", "--no-block", self._unit)

    def _run(self, verb: str, *words: str, may_fail: bool = False) -> str:
        command: Sequence[str] = ("systemctl", verb, *words)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
        except FileNotFoundError:
            raise MissingError("systemctl: not found", "this host needs systemd") from None
        except subprocess.TimeoutExpired:
            raise SystemdRefused(f"systemctl {verb}: no answer in {_PATIENCE:g} s") from None
        if done.returncode != 0 and not may_fail:
            words_ = " ".join(done.stderr.split())[-300:]
            raise SystemdRefused(f"systemctl {verb} {self._unit}: {words_}", "run it as root (sudo)")
        return done.stdout


def parse(text: str) -> UnitState:
    """The state from `systemctl show`'s lines."""
    said = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return UnitState(
        load=said.get("LoadState", ""),
        active=said.get("ActiveState", ""),
        sub=said.get("SubState", ""),
        result=said.get("Result", ""),
        exit_status=_number(said.get("ExecMainStatus", "")),
        restarts=_number(said.get("NRestarts", "")),
        invocation=said.get("InvocationID", ""),
        status=said.get("StatusText", ""),
        started=_number(said.get("ExecMainStartTimestampMonotonic", "")) / 1e6,
        path=said.get("FragmentPath", ""),
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
