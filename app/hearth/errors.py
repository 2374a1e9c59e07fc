"""The exception tree and the one exit-code table.

HearthError
├── ConfigError       a config file, flag or environment value that can't be used
├── UnknownVersion    an engine version outside the dialect table
├── MissingError      a file, model, kernel or tool that has to be there and isn't
├── PortInUse         somebody else listens where the engine must
├── Unreachable       a supervisor or engine that doesn't answer
├── StateError        a state file that can't be used or written
└── CheckFailed       a check ran and its answer is "no" (doctor, trace, kernels verify)
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `hearth`. docs/operations.md repeats this table; a test compares them."""

    OK = 0
    BUG = 1
    USAGE = 2
    CHECK_FAILED = 3
    UNREACHABLE = 69
    GAVE_UP = 70
    HOST_ACTION = 71
    DISK = 73
    RETRY = 75
    RECREATE = 76
    PERMISSION = 77
    CONFIG = 78
    MISSING = 79
    PORT_IN_USE = 80
    OOM = 81

    @property
    def meaning(self) -> str:
        """One line for a person."""
        return _MEANINGS[self]

    @property
    def restartable(self) -> bool:
        """Whether systemd may start the unit again by itself after this code."""
        return self in _RESTARTABLE


_MEANINGS = {
    ExitCode.OK: "done, or stopped as asked",
    ExitCode.BUG: "unexpected error in Hearth itself; please report it",
    ExitCode.USAGE: "wrong command-line use",
    ExitCode.CHECK_FAILED: "a check ran and failed",
    ExitCode.UNREACHABLE: "no supervisor or engine answers there",
    ExitCode.GAVE_UP: "every step down was tried, or the engine died too often",
    ExitCode.HOST_ACTION: "the host needs a person: GPU reset, reboot or driver",
    ExitCode.DISK: "a disk is full or not writable",
    ExitCode.RETRY: "busy now (lock held, interrupted); try again",
    ExitCode.RECREATE: "the container lost its GPUs: make a new one",
    ExitCode.PERMISSION: "not allowed",
    ExitCode.CONFIG: "the configuration can't work; nothing was started",
    ExitCode.MISSING: "a model, kernel, compiler or file is missing",
    ExitCode.PORT_IN_USE: "another process owns a port",
    ExitCode.OOM: "not enough GPU memory to load; no graph plan can fix it",
}
_RESTARTABLE = {ExitCode.BUG, ExitCode.UNREACHABLE, ExitCode.RETRY, ExitCode.RECREATE}


class HearthError(Exception):
    """What a person can do something about. `str()` is one line: place, what is wrong, what to do."""

    code = ExitCode.BUG

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class ConfigError(HearthError):
    """A config file, flag or environment value that can't be used."""

    code = ExitCode.CONFIG


class UnknownVersion(ConfigError):
    """An engine version outside the dialect table."""


class MissingError(HearthError):
    """A file, model, kernel or tool that has to be there and isn't."""

    code = ExitCode.MISSING


class PortInUse(HearthError):
    """Somebody else listens where the engine must."""

    code = ExitCode.PORT_IN_USE


class Unreachable(HearthError):
    """A supervisor or engine that doesn't answer."""

    code = ExitCode.UNREACHABLE


class StateError(HearthError):
    """A state file that can't be used or written."""

    code = ExitCode.DISK


class CheckFailed(HearthError):
    """A check ran and its answer is no."""

    code = ExitCode.CHECK_FAILED
