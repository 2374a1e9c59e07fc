"""The bake around the compiler: lists, jobs, progress, errors, interruption.

A script stands in for ninja here; tests/bake compiles for real.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import alive
from test_elf import SM_90A, SM_120F, elf, fatbin

from hearth.cli.bake import _Lines, line_of
from hearth.errors import CheckFailed, ConfigError, ExitCode, HearthError, MissingError
from hearth.kernels import bake as baking
from hearth.kernels import cuda_home, ninja
from hearth.kernels.elf import Arch
from hearth.kernels.manifest import load, verify
from hearth.kernels.needs import (
    Need,
    eta_seconds,
    generators,
    job_limit,
    load_list,
    machine_room_gib,
    need_of,
)
from hearth.kernels.ninja import BuildDiskFull, BuildFailed, BuildOutOfMemory, Progress, Stream

ROOT = Path(__file__).resolve().parents[2]
GLM5 = ROOT / "images" / "kernels-glm5-sm120.yaml"


# --- what to compile, and with how many jobs


@pytest.mark.parametrize(
    ("version", "has", "lacks"),
    [
        ("0.6.3", {"fp4_quantization_120", "fused_moe_120"}, {"fp4_quantization_120f", "sparse_mla_sm120"}),
        ("0.6.11.post1", {"fp4_quantization_120f"}, {"fp4_quantization_120", "sparse_mla_sm120"}),
        (
            "0.7.2.post1",
            {"fp4_quantization_120f", "sparse_mla_sm120", "dsv3_fused_routing"},
            {"fp4_quantization_120"},
        ),
    ],
)
def test_the_glm5_list_by_flashinfer_version(version: str, has: set[str], lacks: set[str]) -> None:
    names = {item.name for item in load_list(GLM5).modules if item.applies(version)}
    assert has <= names
    assert not lacks & names
    assert names <= set(generators())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "not readable as YAML"),
        ("model: m\narchs: ['12.0f']\nmodules: []", "modules"),
        ("model: m\narchs: ['blackwell']\nmodules: [{name: a, why: b}]", "archs"),
        ("model: m\narchs: ['12.0f']\nmodules: [{name: a}]", "modules.0.why"),
        ("model: m\narchs: ['12.0f']\nmodules: [{name: a, why: b, when: c}]", "modules.0.when"),
        ("model: m\narchs: ['12.0f']\nmodules: [{name: ../a, why: b}]", "modules.0.name"),
        ("model: m\narchs: ['12.0f']\nmodules: [{name: a, why: b, flashinfer: new}]", "no version range"),
    ],
)
def test_a_bad_list_names_file_and_key(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_list(path)
    assert str(path) in str(caught.value)


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_list(tmp_path / "no.yaml")


@pytest.mark.parametrize(
    ("gib", "cores", "room", "asked", "jobs"),
    [
        (9.0, 64, 128.0, None, 14),
        (1.2, 16, 128.0, None, 16),
        (9.0, 64, 128.0, 4, 4),
        (9.0, 8, 4.0, None, 1),
        (1.0, 2, 24.0, 8, 8),
    ],
)
def test_jobs(gib: float, cores: int, room: float, asked: int | None, jobs: int) -> None:
    assert job_limit(gib, cores=cores, room_gib=room, asked=asked) == jobs


@given(st.floats(0.1, 20), st.integers(1, 256), st.floats(0, 2000), st.none() | st.integers(1, 64))
def test_jobs_never_exceed_memory_but_one(gib: float, cores: int, room: float, asked: int | None) -> None:
    jobs = job_limit(gib, cores=cores, room_gib=room, asked=asked)
    assert jobs == 1 or jobs * gib <= room
    assert 1 <= jobs <= (asked or cores)


def test_unknown_modules_need_the_default_memory() -> None:
    assert need_of("nobody_knows").gib == 7.0
    assert need_of("fused_moe_120").gib > 8
    assert machine_room_gib() > 0


def test_eta() -> None:
    known = Need(gib=1, cpu_seconds=100, heavy=1, source="test")
    assert eta_seconds(known, 4, 8, 0, None, 20) == 80
    assert eta_seconds(known, 4, 8, 0, 4, 20) == 30
    assert eta_seconds(known, 4, 8, 4, 8, 200) == 200
    unknown = Need(gib=1, source="test")
    assert eta_seconds(unknown, 1, 8, 0, 8, 5) is None
    assert eta_seconds(unknown, 1, 8, 2, 8, 10) == 30


# --- ninja's output


def test_counts_and_the_lines_of_what_failed() -> None:
    stream = Stream()
    lines = [
        "ninja: Entering directory `x'",
        "[1/3] c++ a",
        "warning: b",
        "FAILED: [code=1] b.o",
        "nvcc b",
        "b: error: c",
    ]
    assert [stream.feed(line) for line in lines] == [False, True, False, False, False, False]
    assert (stream.done, stream.total) == (1, 3)
    assert list(stream.lines)[1:] == lines[3:]
    stream.feed("[2/3] c++ c")
    stream.feed("note: of c")
    assert "note: of c" not in stream.lines


NVCC = '/x/quantization.cu(12): error: identifier "foo" is undefined'


@pytest.mark.parametrize(
    ("lines", "code", "kills", "kind", "words"),
    [
        (
            ["FAILED: [code=1] a.o", "nvcc -c a.cu", "warning: x", NVCC, "1 error detected"],
            1,
            0,
            BuildFailed,
            "foo",
        ),
        (
            ["FAILED: [code=1] a.o", "a.h:19:10: fatal error: cublasLt.h: No such file"],
            1,
            0,
            BuildFailed,
            "cublasLt.h",
        ),
        (["FAILED: [code=1] a.so", "/usr/bin/ld: cannot find -lcuda: No such"], 1, 0, BuildFailed, "-lcuda"),
        (
            ["FAILED: [code=255] a.o", "nvcc fatal   : Unsupported gpu architecture"],
            1,
            0,
            BuildFailed,
            "Unsupported",
        ),
        (["FAILED: [code=127] a.o", "/bin/sh: 1: nvcc: not found"], 1, 0, BuildFailed, "not found"),
        (["ninja: error: 'a.cu', needed by 'a.o', missing"], 1, 0, BuildFailed, "missing"),
        ([], 2, 0, BuildFailed, "ninja ended with 2"),
        (
            ["FAILED: [code=137] a.o", "nvcc error : 'cicc' died due to signal 9 (Kill)"],
            1,
            0,
            BuildOutOfMemory,
            "--jobs 2",
        ),
        (
            ["FAILED: a.o", "c++: fatal error: Killed signal terminated cc1plus"],
            1,
            0,
            BuildOutOfMemory,
            "Killed",
        ),
        (["FAILED: [code=255] a.o", "error: x"], 1, 1, BuildOutOfMemory, "9 GiB a job"),
        ([], -9, 0, BuildOutOfMemory, "killed"),
        (["FAILED: a.o", "a.s: fatal error: No space left on device"], 1, 0, BuildDiskFull, "no space"),
    ],
)
def test_one_clear_error(
    lines: list[str], code: int, kills: int, kind: type[BuildFailed], words: str
) -> None:
    error = ninja.failure("moe", code, lines, jobs=4, gib=9.0, oom_kills=kills)
    assert type(error) is kind
    assert words in str(error)
    assert str(error).startswith("moe: ")
    assert "\n" not in str(error)


def test_lines_for_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    report = _Lines()
    for done in (0, 0, 1, 1):
        report(Progress("fp4", done, 8, 10.0 + done, 90.0))
    report(Progress("fp4", 8, 8, 99.0, 0.0, end=True))
    assert capsys.readouterr().err.splitlines() == [
        "fp4: 0/8, 10 s, about 90 s left",
        "fp4: 1/8, 11 s, about 90 s left",
        "fp4: done in 99 s",
    ]
    assert line_of(Progress("fp4", 0, None, 1.0, None)) == "fp4: starting, 1 s"


# --- the whole, with stand-ins for FlashInfer and ninja

WORKER = """
import json, os, pathlib, sys
verb, request, result = sys.argv[2:]
work = pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"])
modules = []
for name in json.loads(pathlib.Path(request).read_text())["modules"]:
    folder = work / name
    folder.mkdir(exist_ok=True)
    flags = "cuda_cflags = $common_cflags $\\n    -I/x $\\n    -O3 $\\n    -gencode=a\\n"
    (folder / "build.ninja").write_text(flags)
    aot = work.parent / "site" / name / (name + ".so")
    library = folder / (name + ".so")
    modules.append({"name": name, "build_dir": str(folder), "library": str(library), "sources": 2,
                    "path": str(aot), "is_aot": aot.exists()})
pathlib.Path(result).write_text(json.dumps({"versions": {"flashinfer": "0.7.2"}, "modules": modules}))
"""


class Stage:
    """A fake interpreter and a fake ninja in one folder, and requests that use them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        (folder / "state").mkdir()
        self.script("python", WORKER)
        self.builds(elf(fatbin(SM_120F)))

    def script(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!{sys.executable}\n{textwrap.dedent(body)}")
        path.chmod(0o755)

    def builds(self, library: bytes) -> None:
        (self.folder / "library").write_bytes(library)
        self.script(
            "ninja",
            f"""
            import pathlib, shutil, sys
            folder = pathlib.Path(sys.argv[2])
            target = folder / (folder.name + ".so")
            if target.exists():
                print("ninja: no work to do."); sys.exit(0)
            print("[1/2] nvcc a"); print("[2/2] link", flush=True)
            shutil.copy({str(self.folder / "library")!r}, target)
            """,
        )

    def request(self, *modules: str, archs: tuple[str, ...] = ("12.0f",), **more: object) -> baking.Request:
        cuda = cuda_home.CudaHome(self.folder / "cuda", "13.0")
        wanted = tuple(Arch.parse(arch) for arch in archs)
        out, state, python = self.folder / "out", self.folder / "state", self.bin / "python"
        return baking.Request(modules or ("fp4",), wanted, out, state, python, cuda, **more)  # type: ignore[arg-type]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def quiet(_: Progress) -> None:
    """No report."""


def test_a_bake_lists_what_it_made_and_a_second_does_nothing(stage: Stage) -> None:
    steps: list[Progress] = []
    result = baking.bake(stage.request("fp4", "moe"), steps.append)
    assert set(result.changed) == {"fp4", "moe"}
    assert {step.module for step in steps if step.end} == {"fp4", "moe"}
    assert max(step.done for step in steps) == 2
    out = stage.folder / "out"
    listed = load(out / "kernels.json").libraries
    assert [(lib.name, lib.archs, lib.flags) for lib in listed] == [
        ("fp4", ("sm_120f",), ("-O3", "-gencode=a")),
        ("moe", ("sm_120f",), ("-O3", "-gencode=a")),
    ]
    assert listed[0].built_with == {"flashinfer": "0.7.2", "cuda": "13.0"}
    assert verify(out / "kernels.json", out, (12, 0)).ok
    stamp = (out / "kernels.json").stat().st_mtime_ns
    assert baking.bake(stage.request("fp4", "moe"), quiet).changed == ()
    assert (out / "kernels.json").stat().st_mtime_ns == stamp
    assert not (stage.folder / "state" / "tmp").exists()


def test_a_later_bake_adds_to_the_manifest(stage: Stage) -> None:
    baking.bake(stage.request("a"), quiet)
    baking.bake(stage.request("b"), quiet)
    assert [lib.name for lib in load(stage.folder / "out" / "kernels.json").libraries] == ["a", "b"]


def test_a_damaged_manifest_is_set_aside(stage: Stage) -> None:
    out = stage.folder / "out"
    out.mkdir()
    (out / "kernels.json").write_text("{half")
    baking.bake(stage.request(), quiet)
    assert [path.read_text() for path in out.glob("kernels.json.damaged-*")] == ["{half"]
    assert len(load(out / "kernels.json").libraries) == 1


def test_code_for_another_gpu_is_refused_and_not_published(stage: Stage) -> None:
    stage.builds(elf(fatbin(SM_90A)))
    with pytest.raises(CheckFailed, match=r"fp4: has code for sm_90a, not for 12\.0f"):
        baking.bake(stage.request(), quiet)
    assert not (stage.folder / "out").exists()


def test_install_copies_and_asks_flashinfer(stage: Stage) -> None:
    result = baking.bake(stage.request(install=True), quiet)
    site = stage.folder / "site"
    assert result.installed == site
    assert verify(site / "kernels.json", site, (12, 0)).ok


def test_a_compiler_error_stops_the_other_modules_too(stage: Stage) -> None:
    stage.script(
        "ninja",
        """
        import os, pathlib, sys, time
        folder = pathlib.Path(sys.argv[2])
        if folder.name == "bad":
            time.sleep(0.3); print("FAILED: [code=1] a.o"); print("a.cu(1): error: no"); sys.exit(1)
        time.sleep(60)
        """,
    )
    begin = time.monotonic()
    with pytest.raises(BuildFailed, match=r"bad: a\.cu\(1\): error: no"):
        baking.bake(stage.request("bad", "other", jobs=4), quiet)
    assert time.monotonic() - begin < 50
    assert "error: no" in (stage.folder / "state" / "bad" / "build.log").read_text()


def test_two_bakes_in_one_state_folder(stage: Stage) -> None:
    with baking._locked(stage.folder / "state"), pytest.raises(baking.BakeBusy):
        baking.bake(stage.request(), quiet)


def test_no_interpreter_and_a_broken_one(stage: Stage) -> None:
    stage.script("python", "raise SystemExit('torch is broken')")
    with pytest.raises(MissingError, match="torch is broken"):
        baking.bake(stage.request(), quiet)
    (stage.bin / "python").unlink()
    with pytest.raises(MissingError, match="No such file"):
        baking.bake(stage.request(), quiet)


SLOW_NINJA = """
import os, pathlib, subprocess, sys, time
# Like ninja: each compiler in a process group of its own; unlike it, deaf to SIGTERM.
import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "300"], process_group=0)
pathlib.Path(sys.argv[2], "pids").write_text(f"{os.getpid()} {child.pid}")
print("[0/2] x", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_compiler(stage: Stage, signum: int) -> None:
    stage.script("ninja", SLOW_NINJA)
    driver = stage.folder / "driver.py"
    driver.write_text(
        "import sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT / 'tests' / 'unit')!r})\n"
        "import test_bake as t\nfrom hearth.errors import HearthError\n"
        f"folder = Path({str(stage.folder)!r})\n"
        "stage = t.Stage.__new__(t.Stage); stage.folder = folder; stage.bin = folder / 'bin'\n"
        "try: t.baking.bake(stage.request(), t.quiet)\n"
        "except HearthError as error: print(error); sys.exit(error.code)\n"
    )
    process = subprocess.Popen([sys.executable, str(driver)], stdout=subprocess.PIPE, text=True)
    pids = stage.folder / "state" / "fp4" / "pids"
    deadline = time.monotonic() + 30
    while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=40)
    assert process.returncode == ExitCode.RETRY
    assert "the same command goes on" in out
    for pid in map(int, pids.read_text().split()):
        assert not alive(pid)


# --- the worker, with a stand-in for the flashinfer package

FLASHINFER = """
import pathlib
class Spec:
    sources = [1, 2]
    def __init__(self, name):
        self.name = name
        self.build_dir = pathlib.Path("/b") / name
        self.jit_library_path = self.build_dir / (name + ".so")
    def write_ninja(self):
        pathlib.Path(WHERE, self.name).touch()
class CuteDsl:
    name = "cute"
"""


def ask(
    tmp_path: Path, *modules: str, package: bool = True, table: dict[str, str] | None = None
) -> dict[str, object]:
    if package:
        jit = tmp_path / "site" / "flashinfer" / "jit"
        (jit / "deep").mkdir(parents=True, exist_ok=True)
        (jit.parent / "__init__.py").touch()
        (jit / "__init__.py").touch()
        spec = "__import__('flashinfer.jit.core').jit.core.Spec('cascade')"
        (jit / "deep" / "__init__.py").write_text(f"def gen_cascade_module():\n    return {spec}\n")
        (jit / "core.py").write_text(f"WHERE = {str(tmp_path)!r}\n{FLASHINFER}")
        (jit / "fp4.py").write_text(
            "from .core import Spec, CuteDsl\n"
            "def gen_x(): return Spec('fp4_quantization_120f')\n"
            "def gen_cute_module(): return CuteDsl()\n"
            "def gen_old_module():\n    raise RuntimeError('No supported CUDA architectures')\n"
        )
    request, result = tmp_path / "q.json", tmp_path / "a.json"
    request.write_text(json.dumps({"modules": modules, "generators": table or {}}))
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    worker = ROOT / "app" / "hearth" / "kernels" / "bake_worker.py"
    subprocess.run([sys.executable, "-S", worker, "plan", request, result], env=env, check=False)
    answer: dict[str, object] = json.loads(result.read_text())
    return answer


def test_worker_by_table_and_by_convention(tmp_path: Path) -> None:
    table = {"fp4_quantization_120f": "flashinfer.jit.fp4:gen_x"}
    answer = ask(tmp_path, "fp4_quantization_120f", "cascade", table=table)
    assert answer["modules"] == [
        {"name": name, "build_dir": f"/b/{name}", "library": f"/b/{name}/{name}.so", "sources": 2}
        for name in ("fp4_quantization_120f", "cascade")
    ]
    assert (tmp_path / "cascade").exists()


@pytest.mark.parametrize(
    ("module", "table", "kind", "words"),
    [
        ("nope", {}, "unknown_module", "has no such module"),
        ("nope", {"nope": "flashinfer.jit.gone:gen"}, "unknown_module", "has no such module"),
        ("nope", {"nope": "flashinfer.jit.fp4:gen_x"}, "unknown_module", "makes 'fp4_quantization_120f'"),
        ("cute", {}, "unsupported", "compiles on a GPU"),
        ("old", {}, "unsupported", "FlashInfer refuses: No supported"),
    ],
)
def test_worker_refusals(tmp_path: Path, module: str, table: dict[str, str], kind: str, words: str) -> None:
    error = ask(tmp_path, module, table=table)["error"]
    assert isinstance(error, dict)
    assert error["kind"] == kind
    assert words in error["message"]
    assert isinstance(baking._refusal(error), HearthError)


def test_worker_without_flashinfer(tmp_path: Path) -> None:
    error = ask(tmp_path, "fp4", package=False)["error"]
    assert isinstance(error, dict)
    assert error["kind"] == "no_flashinfer"
    assert isinstance(baking._refusal(error), MissingError)


# --- the toolkit


def packages(folder: Path) -> Path:
    """A tree as PyPI's packages unpack it, with scripts for the tools."""
    tree = folder / "nvidia" / "cu13"
    for part, _ in cuda_home._PARTS:
        path = tree / part
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
        path.chmod(0o755)
    return tree


def test_a_cuda_home_out_of_packages_and_again(tmp_path: Path) -> None:
    packages(tmp_path)
    for _ in range(2):
        home = cuda_home.resolve(None, [tmp_path / "none", tmp_path], tmp_path / "home")
    assert home.release == "13.0"
    lib64 = home.path / "lib64"
    assert (lib64 / "libcudart.so").resolve().name == "libcudart.so.13"
    assert (lib64 / "libnvrtc.so").exists()
    assert (lib64 / "stubs" / "libcuda.so").read_bytes()[:4] == b"\x7fELF"
    assert cuda_home.resolve(home.path, [], tmp_path / "unused") == home


def test_missing_packages_and_a_foreign_ptxas_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"requirements/cuda-compiler\.lock"):
        cuda_home.resolve(None, [tmp_path], tmp_path / "home")
    tree = packages(tmp_path)
    (tree / "bin" / "ptxas").write_text("#!/bin/sh\necho release 12.9,\n")
    with pytest.raises(MissingError, match=r"nvcc is of CUDA 13\.0 but ptxas of 12\.9"):
        cuda_home.resolve(None, [tmp_path], tmp_path / "home")
    (tree / "include" / "cublasLt.h").unlink()
    with pytest.raises(MissingError, match="lacks nvidia-cublas"):
        cuda_home.resolve(None, [tmp_path], tmp_path / "home")


def test_room_lets_one_module_run_alone_whatever_it_needs() -> None:
    async def run() -> list[int]:
        room = baking._Room(4, 2.0)
        small = baking.Module("fp4_quantization_120f", Path(), Path(), 7)
        large = baking.Module("fused_moe_120", Path(), Path(), 96)
        jobs: list[int] = []

        async def hold(module: baking.Module) -> None:
            async with room.take(module) as count:
                jobs.append(count)
                await asyncio.sleep(0.01)

        await asyncio.gather(hold(small), hold(large), hold(small))
        return jobs

    assert sorted(asyncio.run(run())) == [1, 1, 1]
