"""The plugin: harmless in any interpreter, effective in real SGLang code."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import pytest

from hearth.kernels import plugin
from tests.kernels.conftest import unpacked

HERE = Path(__file__).parent
Run = Callable[..., CompletedProcess[str]]


# --- deciding, without an engine ---


@pytest.mark.parametrize(
    ("version", "needed"),
    [("0.5.6.post2", True), ("0.5.11", True), ("0.5.12", False), ("0.5.23", False), ("unknown", True)],
)
def test_which_engines_need_it(version: str, needed: bool) -> None:
    assert plugin.needs_replacing(version) is needed


def test_only_the_very_functions_are_replaced() -> None:
    raw, other, ours = (lambda: 1), (lambda: 2), (lambda: 3)
    module = ModuleType("sglang.x")
    vars(module).update(fp4_quantize=raw, alias=raw, same_name_elsewhere=other)
    places = plugin.replace_in([module], {id(raw): ours})
    assert places == {"sglang.x.fp4_quantize": id(raw), "sglang.x.alias": id(raw)}
    assert vars(module)["alias"] is ours
    assert vars(module)["same_name_elsewhere"] is other
    assert plugin.replace_in([module], {id(raw): ours}) == {}


def python(code: str, site: Path, *flags: str) -> CompletedProcess[str]:
    """Run the current interpreter with a site folder added at its start, as site-packages is."""
    start = f"import site; site.addsitedir({str(site)!r})\n"
    command = [sys.executable, *flags, "-c", start + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    assert plugin.write_pth(folder) == folder / plugin.PTH_NAME
    return folder


def stand_in(site: Path, name: str, source: str = "") -> None:
    (site / name).mkdir()
    (site / name / "__init__.py").write_text(source)


def dist(site: Path, name: str, version: str) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_hook_is_one_line_that_imports_nothing(site: Path) -> None:
    assert len((site / plugin.PTH_NAME).read_text().splitlines()) == 1
    done = python(
        "import sys; print([m for m in ('hearth', 'wrapt', 'torch', 'json') if m in sys.modules])", site
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_hook_costs_less_than_a_millisecond(site: Path) -> None:
    """The fastest of a few, since the machine has other work."""
    line = (site / plugin.PTH_NAME).read_text()
    code = "import time, sys\nt = time.perf_counter()\nexec(LINE)\nprint(time.perf_counter() - t)"
    times = [float(python(code.replace("LINE", repr(line)), site.parent).stdout) for _ in range(5)]
    assert min(times) < 0.001, times


def test_without_hearth_an_engine_starts_as_before(site: Path) -> None:
    stand_in(site, "sglang")
    done = python("import sglang; print('up')", site, "-I", "-S")
    assert done.stdout == "up\n"
    assert done.stderr == "hearth-fp4: not installed: ModuleNotFoundError(\"No module named 'hearth'\")\n"


def test_without_wrapt_an_engine_starts_as_before(site: Path) -> None:
    stand_in(site, "sglang")
    dist(site, "sglang", "0.5.9")
    done = python("import sys; sys.modules['wrapt'] = None\nimport sglang; print('up')", site)
    assert done.stdout == "up\n"
    assert re.fullmatch(r"hearth-fp4: not replaced in pid \d+: ModuleNotFoundError: .*wrapt.*\n", done.stderr)


def test_without_flashinfer_nothing_is_said(site: Path) -> None:
    stand_in(site, "sglang")
    dist(site, "sglang", "0.5.9")
    done = python("import sglang; print('up')", site)
    assert (done.stdout, done.stderr) == ("up\n", "")


def test_a_new_engine_is_left_alone_and_told_so(site: Path) -> None:
    stand_in(site, "sglang")
    dist(site, "sglang", "0.5.12")
    done = python("import sglang, sys; print('wrapt' in sys.modules)", site)
    assert done.stdout == "False\n"
    assert done.stderr == "hearth-fp4: nothing to replace: sglang 0.5.12 wraps fp4_quantize itself\n"


def test_a_process_without_an_engine_is_left_alone(site: Path) -> None:
    stand_in(site, "flashinfer")
    done = python("import flashinfer, sys; print('hearth' in sys.modules)", site)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_broken_flashinfer_does_not_stop_the_engine(site: Path) -> None:
    """Here flashinfer has none of the functions: the reason is one line, the import goes on."""
    stand_in(site, "sglang", "import flashinfer")
    stand_in(site, "flashinfer", "__version__ = '0.6.3'")
    dist(site, "sglang", "0.5.9")
    done = python("import sglang; print('up')", site)
    assert done.stdout == "up\n"
    assert re.fullmatch(r"hearth-fp4: not replaced in pid \d+: .+\n", done.stderr)


def test_the_entry_point_is_declared() -> None:
    from importlib import metadata

    entries = metadata.entry_points(group="sglang.srt.plugins", name="hearth")
    assert [entry.load() for entry in entries] == [plugin.install]


# --- real SGLang code ---


EngineRun = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def engine_run(run: Run, tmp_path: Path) -> EngineRun:
    """Run engine_real.py; its answer and what it wrote to standard error about FP4."""

    def call(version: str, way: str, *more: str) -> tuple[dict[str, Any], str]:
        site = tmp_path / "site"
        site.mkdir()
        if way == "hook":
            plugin.write_pth(site)
        (site / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(site)!r})\n")
        info = site / "hearth-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hearth\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nhearth = hearth.kernels.plugin:install\n"
        )
        path = f"{site}:{HERE.parents[1] / 'app'}"
        done = run(str(HERE / "engine_real.py"), str(unpacked(version)), way, *more, PYTHONPATH=path)
        assert done.returncode == 0, done.stderr[-4000:]
        said = [line for line in done.stderr.splitlines() if line.startswith(plugin.PREFIX)]
        return json.loads(done.stdout), "\n".join(said)

    return call


MODELOPT = "sglang.srt.layers.quantization.modelopt_quant"
DISPATCH = "sglang.srt.layers.moe.token_dispatcher"
SAID = r"hearth-fp4: replaced (\d) ops \((.+)\) in pid \d+ \((.+)\) for sglang (.+)"
FOUR = "block_scale_interleave, fp4_quantize, mxfp4_quantize, nvfp4_quantize"


@pytest.mark.wheels
@pytest.mark.parametrize("flashinfer_version", ["0.6.3"], indirect=True)
@pytest.mark.parametrize("version", ["0.5.9", "0.5.11"])
def test_real_engine_code_is_not_traceable_without(engine_run: EngineRun, version: str) -> None:
    answer, said = engine_run(version, "none")
    assert answer["traceable"] is False
    assert "flashinfer" in answer["modules"][MODELOPT]["fp4_quantize"]
    assert said == ""


@pytest.mark.wheels
@pytest.mark.parametrize("flashinfer_version", ["0.6.3"], indirect=True)
@pytest.mark.parametrize(
    ("version", "way", "process"),
    [
        ("0.5.9", "hook", "MainProcess"),
        ("0.5.9", "hook", "scheduler_TP0"),
        ("0.5.11", "plugin", "scheduler_TP0"),
        ("0.5.11", "hook", "scheduler_TP0"),
    ],
)
def test_real_engine_code_is_traceable_with(
    engine_run: EngineRun, version: str, way: str, process: str
) -> None:
    answer, said = engine_run(version, way, *(["child"] if process != "MainProcess" else []))
    assert answer["traceable"] is True
    where = {module: set(names.values()) for module, names in answer["modules"].items() if names}
    assert set(map(frozenset, where.values())) == {frozenset({"hearth.kernels.ops"})}
    assert where.keys() >= {MODELOPT, f"{DISPATCH}.standard", f"{DISPATCH}.flashinfer"}
    found = re.fullmatch(SAID, said)
    assert found, said
    assert found.groups() == ("4", FOUR, process, version)
