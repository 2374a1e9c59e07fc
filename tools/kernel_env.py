#!/usr/bin/env python3
"""Set up FlashInfer beside a torch, with no GPU: for the kernel tests, and to bake kernels on any machine.

    python3 tools/kernel_env.py [--flashinfer 0.7.2]

Makes a virtual environment in ${HEARTH_CACHE:-~/.cache/hearth}/kernels/ from a hash-locked list, once for
each lock; a later call finds it at once. The last line of standard output is its Python. Needs only Python's
standard library. Exit codes are those of `hearth` (docs/operations.md).

Run that Python with FLASHINFER_WORKSPACE_BASE (a folder that can be written) and FLASHINFER_CUDA_ARCH_LIST
set: without a GPU, importing FlashInfer needs both.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cpu_engine as common

ROOT = Path(__file__).resolve().parents[1]
LOCKS = {
    "0.7.2": ROOT / "requirements" / "kernels-0.7.2.lock",
    "0.6.3": ROOT / "requirements" / "kernels-0.6.3.lock",
}
TORCH_CPU = ROOT / "requirements" / "kernels-torch-cpu.lock"
MARKER = "hearth-ready"


def env_dir(version: str) -> Path:
    """The environment's folder: its name changes with the lock and the Python that runs it."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {platform.machine()}".encode())
    for path in (LOCKS[version], TORCH_CPU, common.CUDA_LIBS):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return common.cache_dir() / "kernels" / f"{version}-{digest.hexdigest()[:12]}"


def ready(env: Path) -> bool:
    """Whether the set-up of this folder was finished and its Python is still on the machine."""
    return (env / MARKER).is_file() and (env / "bin" / "python").exists()


def build(version: str, env: Path) -> None:
    """Make the environment; the marker comes last, so an interrupted set-up is made anew."""
    shutil.rmtree(env, ignore_errors=True)
    log = env.with_name(env.name + ".log")
    log.write_text("")
    common.say(f"setting up FlashInfer {version} in {env} (1 to 5 minutes, once)")
    with log.open("ab") as sink:
        made = subprocess.run([sys.executable, "-m", "venv", str(env)], stdout=sink, stderr=sink, check=False)
    if made.returncode:
        raise common.pip_error(log)
    try_cpu_torch(env, log)
    common.pip_install(env, LOCKS[version], log)
    if common.wants_cuda_libs(env):
        common.say("pip took a CUDA build of torch; its libraries are needed too")
        common.pip_install(env, common.CUDA_LIBS, log)
    check_import(env, log)
    (env / MARKER).write_text(f"{version}\n")


def try_cpu_torch(env: Path, log: Path) -> None:
    """Take a CPU build of torch if pip has one at hand; without it the lock's own build is installed."""
    pip = [str(env / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--require-hashes", "--no-input"]
    with log.open("ab") as sink:
        subprocess.run([*pip, "-r", str(TORCH_CPU)], stdout=sink, stderr=sink, check=False)


def check_import(env: Path, log: Path) -> None:
    """Import FlashInfer once, before anybody relies on the environment."""
    with tempfile.TemporaryDirectory() as scratch, log.open("ab") as sink:
        variables = os.environ | {"FLASHINFER_WORKSPACE_BASE": scratch, "FLASHINFER_CUDA_ARCH_LIST": "12.0a"}
        command = [str(env / "bin" / "python"), "-c", "import flashinfer, pytest, wrapt"]
        if subprocess.run(command, stdout=sink, stderr=sink, env=variables, check=False).returncode:
            raise common.pip_error(log)


def ensure(version: str) -> Path:
    """Return the Python of the ready environment, made now if need be. Raises SetupError or OSError."""
    env = env_dir(version)
    python = env / "bin" / "python"
    if ready(env):
        return python
    common.check_python()
    env.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with common.only_one(env):
        if not ready(env):
            build(version, env)
            common.say(f"FlashInfer {version} is ready after {time.monotonic() - started:.0f} s")
    return python


def main() -> int:
    """Parse, set up, print the Python's path."""
    parser = argparse.ArgumentParser(description="Set up FlashInfer with no GPU.")
    parser.add_argument("--flashinfer", choices=sorted(LOCKS), default="0.7.2", help="FlashInfer version")
    args = parser.parse_args()
    common.say = lambda text: print(f"kernel env: {text}", file=sys.stderr, flush=True)
    try:
        print(ensure(args.flashinfer))
    except common.SetupError as error:
        common.say(f"error: {error}")
        return error.code
    except OSError as error:
        common.say(
            f"error: {error.filename}: {error.strerror}: set HEARTH_CACHE to a folder that can be written"
        )
        return common.DISK
    except KeyboardInterrupt:
        common.say("interrupted; what was made is not used, the next call starts anew")
        return common.RETRY
    return 0


if __name__ == "__main__":
    sys.exit(main())
