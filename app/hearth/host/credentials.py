"""Secrets on their way from systemd's credentials to the container: files only, for one user only."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hearth.errors import ExitCode, HearthError, MissingError
from hearth.host.spec import USER_ID


class CredentialError(HearthError):
    """The secrets can't be handed over."""

    code = ExitCode.PERMISSION


def hand_over(
    names: Mapping[str, str], runtime: Path, environ: Mapping[str, str] = os.environ
) -> Path | None:
    """A folder with the named credentials that only the container's user can read; None without names.

    `names`: credential by config key. `runtime` must lie on a tmpfs (systemd's RuntimeDirectory does). Raises
    MissingError (naming the key and the unit's line) or CredentialError.
    """
    if not names:
        return None
    given = Path(environ.get("CREDENTIALS_DIRECTORY", "/nonexistent"))
    for key, name in names.items():
        if not (given / name).is_file():
            raise MissingError(
                f"{key}: the unit has no credential {name!r}",
                f"it needs LoadCredential={name}:/etc/hearth/secrets/{name}: deploy again",
            )
    try:
        return _copy(sorted(set(names.values())), given, runtime)
    except OSError as error:
        raise CredentialError(f"{error.filename or runtime}: {error.strerror}", "run it as root") from error


def _copy(names: list[str], given: Path, runtime: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="secrets-", dir=runtime))  # mode 0700
    try:
        for name in names:
            _write(folder / name, (given / name).read_bytes())
        os.chown(folder, USER_ID, USER_ID)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _write(path: Path, value: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
    with os.fdopen(handle, "wb") as file:
        file.write(value)
        os.fchown(file.fileno(), USER_ID, USER_ID)
