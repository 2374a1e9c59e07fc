"""Asks this host what hearth.host.probes lists. Every question has a time limit and none may raise."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hearth.host.checks_base import Output
from hearth.host.probes import COMMANDS, DISK, FILES

LIMIT = 20.0
"""Seconds for one command: `nvidia-smi -q` without the persistence daemon takes seconds on eight cards."""
_MOST = 8 * 1024 * 1024
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_GPU_TOOLS = ("nvidia_smi", "lspci", "modinfo", "mokutil", "nvidia_ctk", "cdi", "kernel_log")
_CPUS = 512
"""Files of one pattern that are read at most."""


def collect(limit: float = LIMIT, gpus: bool = True) -> dict[str, Output]:
    """Facts by probe name, all but `disk`. Without `gpus` no GPU tool is run."""
    left_out = () if gpus else _GPU_TOOLS
    commands = {name: argv for name, argv in COMMANDS.items() if name not in left_out}
    with ThreadPoolExecutor(8) as pool:
        answers = {name: pool.submit(ask, argv, limit) for name, argv in commands.items()}
        facts = {name: answer.result() for name, answer in answers.items()}
    return facts | {name: read(pattern) for name, pattern in FILES.items()}


def ask_disks(paths: Iterable[str], limit: float = LIMIT) -> Output:
    """The `disk` fact of these paths and /dev/shm."""
    return ask((*DISK, *sorted({nearest(path) for path in (*paths, "/dev/shm")})), limit)


def ask(argv: Sequence[str], limit: float = LIMIT, env: Mapping[str, str] | None = None) -> Output:
    """Run a command; its stdout and stderr together. One that doesn't end is killed and not waited for:
    a process that hangs in the driver can't be."""
    own = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ.get('PATH', '')}:{_PATH}", **(env or {})}
    program = shutil.which(argv[0], path=own["PATH"])
    if program is None:  # the exec itself would say "not allowed" for a folder of PATH that is closed to us
        return Output(problem="not allowed" if os.access(argv[0], os.F_OK) else "not installed")
    try:
        process = subprocess.Popen(
            argv,
            executable=program,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=own,
            start_new_session=True,
        )
    except OSError as error:
        return Output(problem=error.strerror or "can't be run")
    try:
        data, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired as late:
        _kill(process)
        return Output(_text(late.stdout or b""), problem=f"no answer in {limit:g} s")
    return Output(_text(data), process.returncode)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        process.stdout.close()


def read(pattern: str) -> Output:
    """A file, or all files of a pattern, one after the other."""
    names = sorted(Path("/").glob(pattern.lstrip("/")))[:_CPUS]
    if not names:
        return Output(problem="no such file")
    texts, problem = [], ""
    for name in names:
        try:
            with name.open("rb") as file:
                texts.append(_text(file.read(_MOST)))
        except OSError as error:
            problem = (
                "not allowed" if isinstance(error, PermissionError) else (error.strerror or "can't be read")
            )
    return Output("".join(texts)) if texts else Output(problem=problem)


def nearest(path: str) -> str:
    """The path, or the nearest folder above it that exists."""
    folder = Path(path).absolute()
    while folder != folder.parent:
        with contextlib.suppress(OSError):
            if folder.exists():
                break
        folder = folder.parent
    return str(folder)


def _text(data: bytes) -> str:
    return data[:_MOST].decode("utf-8", errors="replace")
