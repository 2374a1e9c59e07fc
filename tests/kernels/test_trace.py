"""The trace gate, in environments with a real torch and FlashInfer and no GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import typer
from typer.testing import CliRunner

from hearth.cli.trace import trace
from hearth.errors import ExitCode, MissingError
from tests.kernels.conftest import unpacked

HERE = Path(__file__).parent
Run = Callable[..., CompletedProcess[str]]
HEARTH = "import sys, typer; from hearth.cli.trace import trace; from hearth.errors import HearthError\n"
MAIN = HEARTH + (
    "app = typer.Typer(); app.command()(trace)\n"
    "try: app(standalone_mode=False)\n"
    "except HearthError as error: sys.stderr.write(f'hearth: {error}\\n'); sys.exit(error.code)\n"
)


def test_gate(passes: Callable[[str, int], None]) -> None:
    passes("inside_trace.py", 23)


def test_command_prints_the_document(run: Run, flashinfer_version: str) -> None:
    done = run("-c", MAIN, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout)
    assert document["ok"] is True
    assert document["versions"]["flashinfer-python"].startswith(flashinfer_version)


def test_command_tells_a_person(run: Run) -> None:
    done = run("-c", MAIN)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "yes        yes                  hearth.fp4_quantize\n" in done.stdout
    assert "    stops at: flashinfer/jit/cpp_ext.py:" in done.stdout
    assert "site-packages" not in done.stdout


def test_command_fails_for_an_old_engine_without_the_plugin(run: Run) -> None:
    fake = "from importlib import metadata as m; v = m.version\n"
    fake += "m.version = lambda name: '0.5.9' if name == 'sglang' else v(name)\n"
    done = run("-c", fake + MAIN, "--json")
    assert done.returncode == 3, done.stderr[-2000:]
    assert json.loads(done.stdout)["ok"] is False
    assert "stops in flashinfer.fp4_quantize" in done.stderr.splitlines()[-1]


@pytest.mark.wheels
@pytest.mark.parametrize("flashinfer_version", ["0.7.2"], indirect=True)
def test_real_new_engine_passes_with_its_own_op(run: Run) -> None:
    """SGLang 0.5.12 is the first that wraps fp4_quantize."""
    paths = [str(unpacked("0.5.12")), str(HERE), str(HERE.parents[1] / "app")]
    code = (
        "import json, flashinfer, engine_shims; engine_shims.install()\n"
        "from hearth.kernels.trace import check; print(json.dumps(check().to_json()))"
    )
    done = run("-c", code, PYTHONPATH=":".join(paths))
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout)
    assert document["ok"] is True
    needed = [row["op"] for row in document["ops"] if row["required"]]
    assert needed == ["torch.ops.sglang.flashinfer_fp4_quantize"]


def test_without_torch_it_is_one_line() -> None:
    app = typer.Typer()
    app.command()(trace)
    result = CliRunner().invoke(app, [])
    assert isinstance(result.exception, MissingError)
    assert result.exception.code is ExitCode.MISSING
    assert "torch isn't installed" in str(result.exception)
