"""Compile FlashInfer modules ahead of time, with no GPU in the machine.

FlashInfer's own generators write the build files (`bake_worker.py`, in the engine's Python); ninja runs
them here, several modules at once as far as cores and memory go; each library is then read for its
architectures and listed in `kernels.json`. Ninja's state is kept below the state folder, so a build that
was stopped goes on where it was, and one that is complete does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hearth.errors import CheckFailed, ConfigError, ExitCode, HearthError, MissingError, StateError
from hearth.kernels import cuda_home, manifest, ninja
from hearth.kernels.elf import Arch
from hearth.kernels.manifest import Library, Manifest
from hearth.kernels.needs import (
    Need,
    eta_seconds,
    generators,
    job_limit,
    machine_cores,
    machine_room_gib,
    need_of,
    oom_kills,
)
from hearth.kernels.ninja import Progress

_WORKER = Path(__file__).with_name("bake_worker.py")
_WORKER_ERRORS: dict[str, type[HearthError]] = {"unknown_module": ConfigError, "unsupported": ConfigError}


class BakeBusy(HearthError):
    """Another bake works in the same state folder."""

    code = ExitCode.RETRY


class BakeStopped(HearthError):
    """Somebody interrupted the bake."""

    code = ExitCode.RETRY


@dataclass(frozen=True)
class Request:
    """What to compile, for which GPUs, with what, and where it goes.

    `python` is the interpreter that has FlashInfer; `cuda` a checked toolkit; `jobs` caps the compile jobs
    (None: all cores); with `install` the libraries go into that FlashInfer's `data/aot` too.
    """

    modules: tuple[str, ...]
    archs: tuple[Arch, ...]
    out: Path
    state: Path
    python: Path
    cuda: cuda_home.CudaHome
    jobs: int | None = None
    install: bool = False


@dataclass(frozen=True)
class Module:
    """One module's build, as FlashInfer laid it out. `sources` counts its files."""

    name: str
    build_dir: Path
    library: Path
    sources: int

    @property
    def need(self) -> Need:
        return need_of(self.name)


@dataclass(frozen=True)
class Plan:
    """Every module's build, and the versions it is made with (package: version)."""

    modules: tuple[Module, ...]
    versions: dict[str, str]


@dataclass(frozen=True)
class Result:
    """What lies in the out folder now. `changed` names the libraries that this bake made anew."""

    libraries: tuple[Library, ...]
    changed: tuple[str, ...]
    seconds: float
    installed: Path | None = None


Report = Callable[[Progress], None]


def bake(request: Request, report: Report) -> Result:
    """Compile, check and list every module.

    Raises ConfigError (unknown module), MissingError (no FlashInfer, no compiler), BuildFailed and its
    kinds (the compiler's first error, killed for memory, disk full), CheckFailed (a library without code
    for a GPU that was asked for), BakeBusy, BakeStopped. Interrupted, it leaves no compiler running and
    loses no finished object.
    """
    started = time.monotonic()
    try:
        with _locked(request.state), _scratch(request.state) as scratch:
            env = _environment(request, scratch)
            plan = _plan(request, env, scratch)
            asyncio.run(_build(plan, request, env, report))
            libraries = tuple(_take(module, request, plan.versions) for module in plan.modules)
            changed = _publish(request.out, plan, libraries)
            installed = _install(request, plan, libraries, env, scratch) if request.install else None
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        raise BakeStopped("stopped", "the same command goes on where this one was") from error
    except OSError as error:
        raise StateError(f"{error.filename or request.out}: {error.strerror or error}") from error
    return Result(libraries, changed, time.monotonic() - started, installed)


@contextlib.contextmanager
def _locked(state: Path) -> Iterator[None]:
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BakeBusy(
                f"{state}: another bake is at work there", "wait for it, or use --state"
            ) from error
        yield


@contextlib.contextmanager
def _scratch(state: Path) -> Iterator[Path]:
    """A folder for temporary files, the compiler's too, emptied whatever happens."""
    scratch = state / "tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _environment(request: Request, scratch: Path) -> dict[str, str]:
    """The environment of generators and compilers: this one's, with every place and architecture set."""
    dropped = {"FLASHINFER_DISABLE_JIT", "FLASHINFER_NVCC", "CUDA_PATH", "MAX_JOBS", "NINJA_STATUS"}
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    path = os.pathsep.join((str(request.cuda.path / "bin"), str(request.python.parent), env.get("PATH", "")))
    return {
        **env,
        "PATH": path,
        "CUDA_HOME": str(request.cuda.path),
        "FLASHINFER_CUDA_ARCH_LIST": " ".join(arch.dotted for arch in request.archs),
        "FLASHINFER_WORKSPACE_BASE": str(request.state.resolve()),
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(scratch.resolve()),
    }


def _plan(request: Request, env: Mapping[str, str], scratch: Path) -> Plan:
    answer = _ask(request, "plan", env, scratch)
    modules = tuple(
        Module(item["name"], Path(item["build_dir"]), Path(item["library"]), int(item["sources"]))
        for item in answer["modules"]
    )
    return Plan(modules, {**answer["versions"], "cuda": request.cuda.release})


def _ask(request: Request, verb: str, env: Mapping[str, str], scratch: Path) -> dict[str, Any]:
    """Run the worker. Its JSON answer; its refusals become errors of ours."""
    ask, answer = scratch / f"{verb}.request.json", scratch / f"{verb}.result.json"
    ask.write_text(json.dumps({"modules": list(request.modules), "generators": generators()}))
    command = [str(request.python), str(_WORKER), verb, str(ask), str(answer)]
    try:
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise MissingError(f"{request.python}: {error.strerror or error}", "say --python") from error
    if not answer.is_file():
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MissingError(f"{request.python}: FlashInfer can't be asked: {last[:300]}")
    result: dict[str, Any] = json.loads(answer.read_text())
    if "error" in result:
        raise _refusal(result["error"])
    return result


def _refusal(error: Mapping[str, str]) -> HearthError:
    kind = _WORKER_ERRORS.get(error["kind"], MissingError)
    hint = {
        "no_flashinfer": "say --python of an interpreter that has it",
        "unknown_module": f"known: {', '.join(sorted(generators()))}",
    }.get(error["kind"], "")
    return kind(error["message"], hint)


async def _build(plan: Plan, request: Request, env: Mapping[str, str], report: Report) -> None:
    """Run every module's ninja, the most demanding first; the first failure stops them all."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, task.cancel)
    room = _Room(request.jobs or machine_cores(), machine_room_gib())
    ordered = sorted(plan.modules, key=lambda module: -(module.need.cpu_seconds or module.need.gib * 100))
    tool = _ninja(env)
    # Raised outside `except*`: Python before 3.11.4 would wrap it in a group again.
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for module in ordered:
                group.create_task(_build_one(module, room, tool, env, report))
    except* HearthError as errors:
        failure = errors.exceptions[0]
    finally:
        for signum in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(signum)
    if failure is not None:
        raise failure from None


def _ninja(env: Mapping[str, str]) -> Path:
    found = shutil.which("ninja", path=env["PATH"])
    if not found:
        raise MissingError("ninja isn't installed", "pip install ninja")
    return Path(found)


async def _build_one(module: Module, room: _Room, tool: Path, env: Mapping[str, str], report: Report) -> None:
    async with room.take(module) as jobs:
        clock, kills = _Clock(module, jobs, report), oom_kills()
        ticking = asyncio.create_task(clock.tick())
        try:
            code, lines = await ninja.run(tool, module.build_dir, jobs, env, clock.moved)
        finally:
            ticking.cancel()
        if code != 0:
            killed = oom_kills() - kills
            gib = module.need.gib
            raise ninja.failure(module.name, code, lines, jobs=jobs, gib=gib, oom_kills=killed)
        clock.over()


class _Clock:
    """Reports one module's progress: when a source is done, and every second in between."""

    def __init__(self, module: Module, jobs: int, report: Report) -> None:
        self._module, self._jobs, self._report = module, jobs, report
        self._started = time.monotonic()
        self._done: int = 0
        self._total: int | None = None

    def moved(self, done: int, total: int | None) -> None:
        """Take ninja's new counts."""
        self._done, self._total = done, total
        self._tell()

    def over(self) -> None:
        """Say that the module is built."""
        self._tell(end=True)

    async def tick(self) -> None:
        """Repeat the report each second until cancelled."""
        while True:
            self._tell()
            await asyncio.sleep(1)

    def _tell(self, end: bool = False) -> None:
        elapsed = time.monotonic() - self._started
        need, built = self._module.need, self._module.sources + 1
        left = eta_seconds(need, self._jobs, built, self._done, self._total, elapsed)
        self._report(Progress(self._module.name, self._done, self._total, elapsed, 0.0 if end else left, end))


class _Room:
    """Cores and memory, shared between the modules that build at once."""

    def __init__(self, cores: int, gib: float) -> None:
        self._cores, self._gib, self._busy = cores, gib, 0
        self._freed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def take(self, module: Module) -> Any:
        """Wait for room for at least one job; yields how many jobs the module may run."""
        async with self._freed:
            await self._freed.wait_for(lambda: self._fits(module))
            jobs = job_limit(module.need.gib, cores=min(self._cores, module.sources), room_gib=self._gib)
            self._change(jobs, module, -1)
        try:
            yield jobs
        finally:
            async with self._freed:
                self._change(jobs, module, +1)
                self._freed.notify_all()

    def _fits(self, module: Module) -> bool:
        """Whatever its need, a module may run alone."""
        return self._busy == 0 or (self._cores >= 1 and self._gib >= module.need.gib)

    def _change(self, jobs: int, module: Module, sign: int) -> None:
        self._cores += sign * jobs
        self._gib += sign * jobs * module.need.gib
        self._busy -= sign


def _take(module: Module, request: Request, versions: Mapping[str, str]) -> Library:
    """Describe a built library after checking that each wanted GPU can run it."""
    library = manifest.describe(module.library, module.name, versions, compile_flags(module.build_dir))
    own = [Arch.parse(arch) for arch in library.archs]
    for wanted in request.archs:
        if own and not any(arch.runs_on(wanted.major, wanted.minor) for arch in own):
            raise CheckFailed(
                f"{module.name}: has code for {', '.join(library.archs)}, not for {wanted.dotted}",
                "the module is made for another GPU: choose another module or --archs",
            )
    return library


def compile_flags(build_dir: Path) -> tuple[str, ...]:
    """nvcc's flags from a module's build.ninja, without the include paths of this machine."""
    text = (build_dir / "build.ninja").read_text(encoding="utf-8").replace("$\n", " ")
    line = next((line for line in text.splitlines() if line.startswith("cuda_cflags = ")), "")
    words = line.removeprefix("cuda_cflags = ").split()
    return tuple(dict.fromkeys(word for word in words if not word.startswith(("$", "-I", "-isystem"))))


def _publish(out: Path, plan: Plan, libraries: tuple[Library, ...]) -> tuple[str, ...]:
    """Copy what differs into `out` and write its manifest.

    Returns the names of the libraries that were copied.
    """
    changed = tuple(
        library.name
        for module, library in zip(plan.modules, libraries, strict=True)
        if _copy(module.library, manifest.library_path(out, library.name), library.sha256)
    )
    listed = out / manifest.NAME
    before = _listed_before(listed)
    kept = tuple(lib for lib in before.libraries if manifest.library_path(out, lib.name).is_file())
    after = Manifest(libraries=kept).merged(libraries)
    if after != before or not listed.is_file():
        manifest.save(listed, after)
    return changed


def _listed_before(path: Path) -> Manifest:
    """The manifest that is there, or an empty one; a damaged one is set aside, not lost."""
    if not path.exists():
        return Manifest(libraries=())
    try:
        return manifest.load(path)
    except manifest.ManifestError:
        path.replace(path.with_name(f"{path.name}.damaged-{int(time.time())}"))
        return Manifest(libraries=())


def _copy(source: Path, target: Path, sha256: str) -> bool:
    """Put the file in place whole or not at all; whether it was needed."""
    if target.is_file() and manifest.sha256_of(target) == sha256:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(source, aside)
        aside.chmod(0o644)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    return True


def _install(
    request: Request, plan: Plan, libraries: tuple[Library, ...], env: Mapping[str, str], scratch: Path
) -> Path:
    """Copy into the installed FlashInfer, then ask it whether it takes each library from there."""
    places = {item["name"]: Path(item["path"]) for item in _ask(request, "aot", env, scratch)["modules"]}
    folder = places[plan.modules[0].name].parent.parent
    _publish(folder, plan, libraries)
    refused = [item["name"] for item in _ask(request, "aot", env, scratch)["modules"] if not item["is_aot"]]
    if refused:
        raise CheckFailed(f"{folder}: FlashInfer doesn't take {', '.join(refused)} from there")
    return folder
