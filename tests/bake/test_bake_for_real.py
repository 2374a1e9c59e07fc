"""A real compile of FlashInfer's FP4 quantizer for SM120, with no GPU, and what the checks then catch."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hearth.errors import ExitCode
from hearth.kernels.elf import read_archs
from hearth.kernels.manifest import library_path, load, verify
from hearth.session import ENDED

from .conftest import Baker, cache

pytestmark = pytest.mark.bake
FP4 = "fp4_quantization_120f"
KV = "fp4_kv_quant"


@pytest.fixture(scope="module")
def baked(baker: Baker) -> Path:
    """The folder with the FP4 quantizer (about two minutes on two idle cores, once) and a small module."""
    out = cache() / "out"
    done = baker.run(out, f"{FP4},{KV}", "12.0f")
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def folder(baked: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(baked, tmp_path / "aot"))


def cuobjdump(toolkit: Path, path: Path) -> str:
    tool = toolkit / "nvidia" / "cu13" / "bin" / "cuobjdump"
    return subprocess.run([tool, "--list-elf", path], capture_output=True, text=True, check=True).stdout


def test_the_manifest_shows_sm_120_and_nothing_else(baked: Path, toolkit: Path) -> None:
    libraries = {library.name: library for library in load(baked / "kernels.json").libraries}
    assert {FP4, KV} <= set(libraries)
    assert libraries[FP4].archs == libraries[KV].archs == ("sm_120f",)
    assert libraries[FP4].built_with["flashinfer"] == "0.7.2.post1"
    assert libraries[FP4].built_with["cuda"] == "13.0"
    assert "-gencode=arch=compute_120f,code=sm_120f" in libraries[FP4].flags
    listing = cuobjdump(toolkit, library_path(baked, FP4))
    assert "sm_120" in listing
    assert listing.count(".cubin") == listing.count("sm_120.cubin")


def test_it_verifies_for_the_card_and_its_sibling_but_not_for_others(baked: Path) -> None:
    assert verify(baked / "kernels.json", baked, (12, 0), {"flashinfer": "0.7.2.post1"}).ok
    assert verify(baked / "kernels.json", baked, (12, 1)).ok
    assert "wrong arch" in str(verify(baked / "kernels.json", baked, (9, 0)).failures)


def test_a_second_bake_does_nothing(baked: Path, baker: Baker) -> None:
    there = written(baked, "*.so"), written(baker.state, "*.o")
    done = baker.run(baked, f"{FP4},{KV}", "12.0f")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["changed"] == []
    assert (written(baked, "*.so"), written(baker.state, "*.o")) == there


def remove(path: Path) -> None:
    path.unlink()


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("harm", "words"), [(remove, "missing"), (alter, "changed: sha256"), (truncate, "truncated: ")]
)
def test_harm_to_a_library_is_caught(folder: Path, harm: Callable[[Path], None], words: str) -> None:
    harm(library_path(folder, FP4))
    problems = {c.name: c.problem for c in verify(folder / "kernels.json", folder, (12, 0)).libraries}
    assert words in str(problems[FP4])
    assert problems[KV] is None


def test_a_library_for_another_gpu_in_the_right_place_is_caught(
    folder: Path, baker: Baker, tmp_path: Path, toolkit: Path
) -> None:
    done = baker.run(tmp_path / "hopper", "concat_mla", "9.0a")
    assert done.returncode == 0, done.stderr
    hopper = library_path(tmp_path / "hopper", "concat_mla")
    assert read_archs(hopper) == ("sm_90a",)
    assert "sm_90a" in cuobjdump(toolkit, hopper)
    shutil.copy(hopper, library_path(folder, FP4))
    report = verify(folder / "kernels.json", folder, (12, 0))
    assert "has code for sm_90a where sm_120f was baked" in str(report.failures)
    honest = verify(tmp_path / "hopper" / "kernels.json", tmp_path / "hopper", (12, 0))
    assert "wrong arch: has code for sm_90a, this GPU is 12.0" in str(honest.failures)


def test_another_flashinfer_is_caught(folder: Path) -> None:
    report = verify(folder / "kernels.json", folder, (12, 0), {"flashinfer": "0.6.3"})
    assert "version skew" in str(report.failures)


def test_flashinfer_takes_the_installed_library(baker: Baker, python: Path, baked: Path) -> None:
    script = "import importlib.util as u; print(u.find_spec('flashinfer').submodule_search_locations[0])"
    package = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout
    aot = Path(package.strip()) / "data" / "aot"
    assert not aot.exists(), f"{aot}: this environment isn't as tools/kernel_env.py makes it"
    try:
        done = baker.run(baked, KV, "12.0f", "--install")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["installed"] == str(aot)
        assert verify(aot / "kernels.json", aot, (12, 0)).ok
    finally:
        shutil.rmtree(aot, ignore_errors=True)


def test_each_error_is_one_line(baker: Baker, tmp_path: Path) -> None:
    done = baker.run(tmp_path, "nope", "12.0f")
    assert done.returncode == ExitCode.CONFIG
    assert done.stderr.splitlines()[-1].startswith("hearth: nope: FlashInfer 0.7.2.post1 has no such module")
    broken = Baker(baker.python, baker.toolkit, tmp_path / "state")
    command = broken.command(tmp_path, KV, "12.0f")
    env_breaks = ["env", "FLASHINFER_EXTRA_CUDAFLAGS=-include no_such_header.h", *command]
    done = subprocess.run(env_breaks, capture_output=True, text=True)
    assert done.returncode == ExitCode.CHECK_FAILED
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"hearth: {KV}: ")
    assert "no_such_header.h" in last


def test_ctrl_c_leaves_no_compiler(baker: Baker, tmp_path: Path) -> None:
    own = Baker(baker.python, baker.toolkit, tmp_path / "state")
    process = subprocess.Popen(own.command(tmp_path, FP4, "12.0f"), stderr=subprocess.PIPE, text=True)
    compilers = wait_for(
        lambda: [p for p in running(str(tmp_path)) if "cicc" in p.name() or "cc1plus" in p.name()]
    )
    assert compilers, "no compiler started within two minutes"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.RETRY
    assert "the same command goes on" in err
    assert running(str(tmp_path)) == []


def test_an_interrupted_bake_goes_on_where_it_was(baker: Baker, tmp_path: Path) -> None:
    own = Baker(baker.python, baker.toolkit, tmp_path / "state")
    command = own.command(tmp_path / "out", f"{KV},fp4_kv_dequant", "12.0f", "--jobs", "1")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: compiled(own.state)), "no object file within two minutes"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == ExitCode.RETRY
    assert not (tmp_path / "out" / "kernels.json").exists()
    kept = objects(own.state)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert kept
    assert kept.items() <= objects(own.state).items(), "compiled again what was there"
    assert len(objects(own.state)) > len(kept)
    assert verify(tmp_path / "out" / "kernels.json", tmp_path / "out", (12, 0)).ok


def written(folder: Path, pattern: str) -> dict[Path, int]:
    """Files and when each was written (ns)."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob(pattern)}


def compiled(state: Path) -> bool:
    """Whether ninja has noted an object file as finished."""
    return any(".o\t" in log.read_text() for log in state.rglob(".ninja_log"))


def objects(state: Path) -> dict[Path, int]:
    """Finished object files: ninja removes half-made ones."""
    return written(state, "*.o")


def wait_until(look: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not look():
        time.sleep(0.1)
    return look()


def running(text: str) -> list[psutil.Process]:
    """Live processes whose command line has that text."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] not in ENDED and text in " ".join(process.info["cmdline"] or ()):
            found.append(process)
    return found


def wait_for(look: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if found := look():
                return found
        except psutil.NoSuchProcess:
            continue
        time.sleep(0.2)
    return []
