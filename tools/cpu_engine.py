#!/usr/bin/env python3
"""Set up a real SGLang engine that runs on a CPU, for the demo and the tests.

    python3 tools/cpu_engine.py [--version 0.5.23]

Makes a virtual environment in ${HEARTH_CACHE:-~/.cache/hearth}/engines/ from a hash-locked list, once for
each lock; a later call finds it at once. The last line of standard output is its Python. Needs only
Python's standard library. Exit codes are those of `hearth` (docs/operations.md).
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[1]
SHIMS = ROOT / "tools" / "cpu_shims"
CPU_TORCH = ROOT / "images" / "cpu-torch.lock"
CUDA_LIBS = ROOT / "images" / "cpu-cuda-libs.lock"
LOCKS = {
    "0.5.23": ROOT / "images" / "cpu.lock",
    "0.5.21": ROOT / "images" / "cpu-0.5.21.lock",
}
NEEDED_GIB = 6
MARKER = "hearth-ready"
# Exit codes, as in app/hearth/errors.py.
USAGE, CHECK_FAILED, UNREACHABLE, DISK, RETRY, MISSING = 2, 3, 69, 73, 75, 79


class SetupError(Exception):
    """What stops the set-up: one line with the fix in it, the exit code, and output to show above it."""

    def __init__(self, code: int, message: str, output: str = "") -> None:
        super().__init__(message)
        self.code, self.output = code, output


def say(text: str) -> None:
    """Tell the person waiting; standard output is kept for the result."""
    print(f"cpu engine: {text}", file=sys.stderr, flush=True)


# --- where ---


def cache_dir() -> Path:
    """Hearth's cache: $HEARTH_CACHE, else hearth/ in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("HEARTH_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hearth"


def engine_dir(version: str) -> Path:
    """The environment's folder: its name changes with the lock, the shims, and the Python that runs it."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {platform.machine()}".encode())
    for path in (LOCKS[version], CPU_TORCH, CUDA_LIBS, *sorted(p for p in SHIMS.iterdir() if p.is_file())):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return cache_dir() / "engines" / f"{version}-{digest.hexdigest()[:12]}"


def ready(engine: Path) -> bool:
    """Whether the set-up of this folder was finished and its Python is still on the machine."""
    return (engine / MARKER).is_file() and (engine / "bin" / "python").exists()


# --- what must hold before ---


def check_python() -> None:
    """Refuse a Python that can't make the environment, with the fix."""
    if sys.version_info < (3, 11):  # noqa: UP036  a person may run this with any Python
        raise SetupError(MISSING, f"Python {platform.python_version()} is too old: run it with 3.11 or newer")
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        raise SetupError(MISSING, "this Python has no venv module: `apt-get install python3-venv`")


def check_disk(folder: Path) -> None:
    """Refuse to start what can't fit."""
    free = shutil.disk_usage(folder).free / 2**30
    if free < NEEDED_GIB:
        fix = "free some, or set HEARTH_CACHE to a folder on a larger disk"
        raise SetupError(DISK, f"{folder}: {free:.1f} GiB free, {NEEDED_GIB} GiB needed: {fix}")


@contextlib.contextmanager
def only_one(engine: Path) -> Iterator[None]:
    """Hold the folder's lock; a second set-up waits, and says for what."""
    with engine.with_name(engine.name + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is setting up {engine}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        yield


# --- pip, with progress ---


class Progress:
    """Turns pip's output lines into a line or so every few seconds: phase, count, package, seconds."""

    def __init__(self, total: int, every: float = 3.0) -> None:
        self.total, self.every = total, every
        self.started = self.said = time.monotonic()
        self.seen = 0
        self.last = "starting pip"

    def line(self, text: str) -> None:
        """Take one line of pip."""
        name = text.strip().split("/")[-1]
        if text.startswith("Collecting "):
            self.seen += 1
            self.last = f"getting {text.split()[1]}"
        elif re.match(r"\s+Downloading ", text):
            self.last = f"downloading {name.removeprefix('Downloading ')}"
        elif text.startswith("Installing collected"):
            self.last = "unpacking"

    def tick(self, unpacked: int) -> None:
        """Say where things are, when it is time to."""
        now = time.monotonic()
        if now - self.said < self.every:
            return
        self.said = now
        count = unpacked if self.last == "unpacking" else self.seen
        say(f"[{min(count, self.total):3}/{self.total}] {self.last} ({now - self.started:.0f} s)")


def count_packages(lock: Path) -> int:
    """How many packages a lock has (those of other platforms included)."""
    return len(re.findall(r"^\S+==", lock.read_text(), re.MULTILINE))


def installed(engine: Path) -> int:
    """How many packages are unpacked in the environment by now."""
    return len(list(engine.glob("lib/python3*/site-packages/*.dist-info")))


def pip_install(engine: Path, lock: Path, log: Path) -> None:
    """Install a lock into the environment. Raises SetupError with pip's reason and the log's path."""
    command = [engine / "bin" / "python", "-I", "-u", "-m", "pip", "install", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "-r", lock]
    scratch = engine / "tmp"  # on the disk whose space was checked, and gone with the folder
    scratch.mkdir()
    code = follow([str(part) for part in command], engine, lock, log, scratch)
    shutil.rmtree(scratch)
    if code:
        raise setup_error(log)


def follow(command: list[str], engine: Path, lock: Path, log: Path, scratch: Path) -> int:
    """Run pip, copy its output to the log, show progress; its exit code."""
    progress = Progress(count_packages(lock))
    before = installed(engine)
    env = os.environ | {"TMPDIR": str(scratch)}
    with logged(log, command) as sink, log.open("rb") as source:
        source.seek(0, os.SEEK_END)
        # pip inherits the folder's lock, so that a pip whose parent was killed still holds it.
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=env, close_fds=False
        )
        try:
            while pip.poll() is None:
                time.sleep(0.3)
                for line in source:
                    progress.line(line.decode(errors="replace"))
                progress.tick(installed(engine) - before)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    return pip.returncode


@contextlib.contextmanager
def logged(log: Path, command: list[str]) -> Iterator[BinaryIO]:
    """Open the log to append a command's output, headed by the command."""
    with log.open("ab") as sink:
        sink.write(f"\n$ {' '.join(command)}\n".encode())
        sink.flush()
        yield sink


def run(command: list[str], log: Path) -> None:
    """Run a command, its output going to the log. Raises SetupError with its last lines when it fails."""
    with logged(log, command) as sink:
        code = subprocess.run(command, stdout=sink, stderr=sink, check=False).returncode
    if code:
        raise setup_error(log)


REASONS = (
    ("No space left on device", DISK, "the disk is full: free some, or set HEARTH_CACHE to a larger disk"),
    ("DO NOT MATCH THE HASHES", CHECK_FAILED, "a package differs from its lock: check the index pip uses"),
    (
        r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError"
        r"|\(from versions: none\)",
        UNREACHABLE,
        "no package index answers: check the network, and pip's index and proxy (`pip config list`)",
    ),
    (
        r"\(from versions: ",
        MISSING,
        "the package index lacks a package for this Python and machine: try Python 3.11 to 3.13 on x86_64",
    ),
)


def setup_error(log: Path) -> SetupError:
    """Say why the log's last command failed, as far as its output tells."""
    text = log.read_text(errors="replace").rpartition("\n$ ")[2]  # of the last command
    tail = "".join(f"    {line}\n" for line in text.splitlines()[-12:])
    for pattern, code, reason in REASONS:
        if re.search(pattern, text):
            return SetupError(code, f"{reason} (log: {log})", tail)
    return SetupError(
        CHECK_FAILED, f"the set-up failed; the last lines are above, all of them in {log}", tail
    )


# --- the environment ---


def site_packages(engine: Path) -> Path:
    """The environment's package folder."""
    return engine / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"


def wants_cuda_libs(engine: Path) -> bool:
    """Whether the torch that pip took is a CUDA build, which can't be imported without its libraries."""
    text = (site_packages(engine) / "torch" / "version.py").read_text()
    return re.search(r"^cuda\b.*=\s*None", text, re.MULTILINE) is None


def add_shims(engine: Path) -> None:
    """Put the stand-ins for CUDA-only packages beside the packages."""
    for shim in SHIMS.iterdir():
        if shim.is_file():
            shutil.copy2(shim, site_packages(engine))


def build(version: str, engine: Path) -> None:
    """Make the environment; the marker comes last, so an interrupted set-up is made anew."""
    shutil.rmtree(engine, ignore_errors=True)
    check_disk(engine.parent)
    log = engine.with_name(engine.name + ".log")
    log.write_text("")
    say(f"setting up SGLang {version} in {engine} (2 to 10 minutes, once)")
    run([sys.executable, "-m", "venv", str(engine)], log)
    with contextlib.suppress(SetupError):  # not offered here: the next lock takes PyPI's build
        pip_install(engine, CPU_TORCH, log)
    pip_install(engine, LOCKS[version], log)
    if wants_cuda_libs(engine):
        say("pip took a CUDA build of torch; its libraries are needed too")
        check_disk(engine.parent)
        pip_install(engine, CUDA_LIBS, log)
    add_shims(engine)
    check_imports(engine, log)
    (engine / MARKER).write_text(f"{version}\n")


def check_imports(engine: Path, log: Path) -> None:
    """Import what has a habit of not importing, before anybody relies on the environment."""
    say("checking that it imports")
    code = "import torch, torchvision, transformers, sgl_kernel, sglang; print(torch.__version__)"
    run([str(engine / "bin" / "python"), "-I", "-c", code], log)


def ensure(version: str) -> Path:
    """Return the Python of the ready environment, made now if need be."""
    engine = engine_dir(version)
    python = engine / "bin" / "python"
    if ready(engine):
        return python
    check_python()
    engine.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with only_one(engine):
        if not ready(engine):
            build(version, engine)
            say(f"took {time.monotonic() - started:.0f} s")
    return python


def main() -> int:
    """Parse, set up, print the Python's path."""
    parser = argparse.ArgumentParser(description="Set up a real SGLang engine that runs on a CPU.")
    parser.add_argument("--version", choices=sorted(LOCKS), default="0.5.23", help="SGLang version")
    parser.add_argument("--print-python", action="store_true", help="say nothing else when it is ready")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        python = ensure(args.version)
    except SetupError as error:
        sys.stderr.write(error.output)
        say(f"error: {error}")
        return error.code
    except OSError as error:
        say(f"error: {error.filename}: {error.strerror}: set HEARTH_CACHE to a folder that can be written")
        return DISK
    except KeyboardInterrupt:
        say("interrupted; what was made is not used, the next call starts anew")
        return RETRY
    if not args.print_python:
        say(f"SGLang {args.version} is ready")
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
