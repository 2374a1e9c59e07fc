"""tools/cpu_engine.py with a real pip and tiny packages; the fault plugin's switches.

The real engine is driven by tests/engine; here a stand-in wheel takes the place of the 118 packages.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
EMPTY = {"torchvision/__init__.py": "", "transformers.py": "", "sglang.py": ""}


def load(path: Path):
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load(REPO / "tools" / "cpu_engine.py")
faults = load(REPO / "tests" / "faults" / "hearth_faults.py")


def wheel(folder: Path, name: str, files: dict[str, str]) -> str:
    """Write a wheel NAME 1.0 with these files; its line in a lock."""
    info = f"{name}-1.0.dist-info"
    meta = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in (files | meta | {f"{info}/RECORD": ""}).items():
            archive.writestr(file, text)
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def torch_files(cuda: str) -> dict[str, str]:
    """A torch that imports, of a CPU (`None`) or CUDA build."""
    fake = "__version__ = '1'\nclass ops:\n    load_library = staticmethod(lambda path: None)\n"
    return {
        "torch/__init__.py": fake,
        "torch/version.py": f"from typing import Optional\ncuda: Optional[str] = {cuda}\n",
    }


class Tree:
    """A copy of the tool beside locks of tiny wheels, and an environment in which pip sees only those."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wheels, self.images = folder, folder / "wheels", folder / "images"
        (folder / "tools").mkdir()
        self.wheels.mkdir()
        self.images.mkdir()
        shutil.copy(REPO / "tools" / "cpu_engine.py", folder / "tools")
        shutil.copytree(REPO / "tools" / "cpu_shims", folder / "tools" / "cpu_shims")
        self.lock("None")
        (self.images / "cpu-cuda-libs.lock").write_text(wheel(self.wheels, "cudalibs", {"cudalibs.py": ""}))
        (self.images / "cpu-torch.lock").write_text("torch==2.13.0+cpu --hash=sha256:" + "0" * 64 + "\n")
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
        self.env = kept | {"HEARTH_CACHE": str(folder / "cache"), "PIP_NO_INDEX": "1"}
        self.env |= {"PIP_FIND_LINKS": str(self.wheels), "PIP_CONFIG_FILE": os.devnull}

    def lock(self, cuda: str) -> None:
        """Write the engine's lock."""
        line = wheel(self.wheels, "engine", EMPTY | torch_files(cuda))
        (self.images / "cpu.lock").write_text(line)

    def start(self) -> subprocess.Popen:
        """Run the tool."""
        command = [sys.executable, self.folder / "tools" / "cpu_engine.py"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.env, stdout=pipe, stderr=pipe, text=True)

    def run(self) -> tuple[int, str, str]:
        """Run it to its end: exit code, standard output, standard error."""
        process = self.start()
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def has(python: str, module: str) -> bool:
    """Whether an environment can import a module."""
    return (
        subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0
    )


def test_sets_up_once_then_finds_it(tree: Tree) -> None:
    tree.lock("'13.0'")  # a CUDA build of torch brings its libraries
    code, out, err = tree.run()
    assert code == 0, err
    python = out.splitlines()[-1]
    assert has(python, "sgl_kernel, cudalibs")
    made = Path(python).lstat().st_ino
    assert tree.run() == (0, out, "cpu engine: SGLang 0.5.23 is ready\n")
    assert Path(python).lstat().st_ino == made


def test_two_at_once_make_one(tree: Tree) -> None:
    first, second = tree.start(), tree.start()
    results = [process.communicate(timeout=120) for process in (first, second)]
    assert first.returncode == second.returncode == 0, results
    assert results[0][0] == results[1][0]
    errors = results[0][1] + results[1][1]
    assert errors.count("setting up SGLang") == 1
    assert "waiting for it" in errors
    assert not has(results[0][0].splitlines()[-1], "cudalibs")  # a CPU build needs none


def test_an_interrupted_set_up_is_made_anew(tree: Tree) -> None:
    for how, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 75)):
        process = tree.start()
        assert "setting up" in process.stderr.readline()
        process.send_signal(how)
        process.communicate(timeout=60)
        assert process.returncode == code
    code, out, err = tree.run()
    assert code == 0, err
    assert has(out.splitlines()[-1], "sglang")


@pytest.fixture(scope="module")
def empty_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with pip and nothing else."""
    engine = tmp_path_factory.mktemp("engine") / "empty"
    tool.run([sys.executable, "-m", "venv", str(engine)], engine.with_suffix(".log"))
    return engine


@pytest.fixture
def offline_pip(tree: Tree, monkeypatch) -> Tree:
    """Let pip, run from here, see the tree's wheels only."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in tree.env.items():
        monkeypatch.setenv(name, value)
    return tree


def refused(engine: Path, tree: Tree) -> "tool.SetupError":
    """What comes of installing the tree's lock."""
    with pytest.raises(tool.SetupError) as caught:
        tool.pip_install(engine, tree.images / "cpu.lock", tree.folder / "log")
    return caught.value


def test_a_changed_package_is_refused(empty_engine: Path, offline_pip: Tree) -> None:
    wheel(offline_pip.wheels, "engine", EMPTY | torch_files("None") | {"evil.py": ""})
    error = refused(empty_engine, offline_pip)
    assert error.code == 3
    assert "a package differs from its lock" in str(error)
    assert "Expected sha256" in error.output


@pytest.mark.parametrize("retries", ["0", "1"])
def test_no_network_is_named(empty_engine: Path, offline_pip: Tree, monkeypatch, retries: str) -> None:
    for name, value in {
        "INDEX_URL": "http://127.0.0.1:9/simple",
        "RETRIES": retries,
        "NO_INDEX": "0",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    shutil.rmtree(offline_pip.wheels)
    error = refused(empty_engine, offline_pip)
    assert error.code == 69
    assert "no package index answers" in str(error)


def test_a_package_the_index_lacks_is_named(empty_engine: Path, offline_pip: Tree) -> None:
    (offline_pip.images / "cpu.lock").write_text("engine==2.0 --hash=sha256:" + "0" * 64)
    error = refused(empty_engine, offline_pip)
    assert error.code == 79
    assert "lacks a package for this Python" in str(error)


def test_what_does_not_import_is_not_called_ready(empty_engine: Path, tmp_path: Path) -> None:
    with pytest.raises(tool.SetupError, match="the set-up failed") as caught:
        tool.check_imports(empty_engine, tmp_path / "log")
    assert "No module named 'torch'" in caught.value.output


def test_a_cache_that_cannot_be_written_is_named(tree: Tree) -> None:
    (tree.folder / "cache").write_text("a file")
    code, _, err = tree.run()
    assert code == 73
    assert "set HEARTH_CACHE" in err


def test_a_full_disk_is_named_before_anything_is_made(tmp_path: Path, monkeypatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(tool.shutil, "disk_usage", lambda path: usage(5 * 2**30))
    with pytest.raises(tool.SetupError, match=r"5\.0 GiB free, 6 GiB needed") as caught:
        tool.build("0.5.23", tmp_path / "engine")
    assert caught.value.code == 73
    assert list(tmp_path.iterdir()) == []


def test_an_old_python_and_a_missing_venv_are_named(monkeypatch) -> None:
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(tool.SetupError, match="apt-get install python3-venv"):
        tool.check_python()
    monkeypatch.setattr(tool.sys, "version_info", (3, 9, 0))
    with pytest.raises(tool.SetupError, match=r"3\.11 or newer"):
        tool.check_python()


@pytest.mark.parametrize("changed", ["lock", "shims"])
def test_the_folder_changes_with_what_is_in_it(tmp_path: Path, monkeypatch, changed: str) -> None:
    before = tool.engine_dir("0.5.23")
    shims = shutil.copytree(tool.SHIMS, tmp_path / "shims")
    lock = Path(shutil.copy(tool.LOCKS["0.5.23"], tmp_path))
    monkeypatch.setattr(tool, "SHIMS", shims)
    monkeypatch.setitem(tool.LOCKS, "0.5.23", lock)
    assert tool.engine_dir("0.5.23") == before
    edited = lock if changed == "lock" else shims / "sgl_kernel.py"
    edited.write_text(edited.read_text() + "#\n")
    assert tool.engine_dir("0.5.23") != before


def test_exit_codes_are_those_of_hearth() -> None:
    from hearth.errors import ExitCode

    for name in ("CHECK_FAILED", "UNREACHABLE", "DISK", "RETRY", "MISSING"):
        assert getattr(tool, name) == ExitCode[name]


@pytest.mark.parametrize("path", [*tool.LOCKS.values(), tool.CUDA_LIBS, tool.CPU_TORCH])
def test_locks_pin_and_hash_every_package_and_name_no_index(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    entries = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert entries
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("none", ("none", 1, False)),
        ("capture_prefill", ("capture_prefill", 1, False)),
        ("decode_crash:30", ("decode_crash", 30, False)),
        ("decode_nan", ("decode_nan", 1, False)),
        ("once:decode_hang:5", ("decode_hang", 5, True)),
    ],
)
def test_faults_are_parsed(text: str, meaning, monkeypatch) -> None:
    monkeypatch.setenv("HEARTH_FAULT_MARKER", "there")
    assert faults.parse(text) == meaning


@pytest.mark.parametrize(
    "text",
    ["nonsense", "decode_crash", "decode_crash:x", "capture_oom:3", "none:1", "once:capture_oom", "once:"],
)
def test_a_wrong_fault_stops_the_engine_with_a_line(text: str, monkeypatch) -> None:
    monkeypatch.delenv("HEARTH_FAULT_MARKER", raising=False)
    with pytest.raises(SystemExit, match=f"HEARTH_FAULT={text}: "):
        faults.parse(text)


def test_once_happens_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HEARTH_FAULT_MARKER", str(tmp_path / "marker"))
    assert [faults.first_time(True), faults.first_time(True)] == [True, False]
    assert faults.first_time(False)


Asked = namedtuple("Asked", "cuda_graph_backend_prefill cuda_graph_backend_decode cuda_graph_max_bs_decode")
Runner = namedtuple("Runner", "server_args")


@pytest.mark.parametrize(
    ("name", "asked", "happens"),
    [
        ("capture_prefill", ("breakable", "full", None), True),
        ("capture_prefill", ("tc_piecewise", None, None), True),
        ("capture_prefill", ("disabled", "full", None), False),
        ("capture_prefill", (None, None, None), False),
        ("capture_decode", ("disabled", "full", None), True),
        ("capture_decode", ("disabled", "breakable", None), False),
        ("capture_oom", ("disabled", "full", 16), True),
        ("capture_oom", ("disabled", "full", None), True),
        ("capture_oom", ("disabled", "full", 8), False),
        ("capture_oom", ("disabled", "disabled", 16), False),
    ],
)
def test_capture_faults_depend_on_the_plan(name: str, asked, happens: bool, monkeypatch) -> None:
    acted = []
    monkeypatch.setitem(faults.CAPTURE, name, (faults.CAPTURE[name][0], acted.append))
    hook = faults.capture_hook(name, once=False)
    assert hook(lambda runner: "captured", Runner(Asked(*asked))) == "captured"
    assert bool(acted) == happens


def test_the_plugin_is_found_by_its_folder_alone() -> None:
    code = (
        "import json; from importlib.metadata import entry_points as e;"
        "print(json.dumps([p.value for p in e(group='sglang.srt.plugins')]))"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO / "tests" / "faults")}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "hearth_faults:install" in json.loads(run.stdout)


@pytest.mark.engine
def test_the_tiny_model_is_the_same_each_time(tmp_path: Path) -> None:
    command = [sys.executable, REPO / "tools" / "cpu_engine.py", "--print-python"]
    python = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        subprocess.run([python, REPO / "tools" / "tiny_model.py", folder], capture_output=True, check=True)
    made = [{p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in f.iterdir()} for f in folders]
    assert made[0] == made[1]
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= made[0].keys()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]  # nothing half made is left
