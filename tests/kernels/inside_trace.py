"""The trace gate on this environment's FlashInfer: what it finds, and what it makes of an engine."""

from importlib import metadata
from pathlib import Path

import flashinfer
import pytest
import torch

from hearth.errors import MissingError
from hearth.kernels import ops, plugin, trace_cases, trace_device
from hearth.kernels.trace import check, relative, trace_once

NEW = not flashinfer.__version__.startswith("0.6.3")
DEFINING = "flashinfer/quantization/fp4_quantization.py" if NEW else "flashinfer/fp4_quantization.py"


@pytest.fixture(scope="module")
def report():
    return check(everything=True)


def rows(report):
    return {row.op: row for row in report.ops}


def test_every_raw_function_stops_and_every_op_of_ours_passes(report):
    found = rows(report)
    for name in ops.OP_NAMES:
        assert not found[f"flashinfer.{name}"].traceable
        assert found[f"hearth.{name}"].traceable
    for layout in ("8x4", "linear", "mxfp4"):
        assert not found[f"flashinfer.fp4_quantize {layout}"].traceable
        assert found[f"hearth.fp4_quantize {layout}"].traceable
    assert ("torch.ops.flashinfer.fp4_quantize" in found) is NEW


def test_the_historical_failure_is_named(report):
    """The compiler's version is asked by a subprocess, and Popen makes a lock."""
    row = rows(report)["flashinfer.fp4_quantize"]
    assert row.frame.startswith("flashinfer/jit/cpp_ext.py:")
    assert "subprocess." in row.call
    assert row.inside.startswith("subprocess.py:")
    assert row.inside.endswith("threading.Lock()")
    assert "_thread.allocate_lock" in row.reason


@pytest.mark.parametrize("name", ops.OP_NAMES)
def test_the_obstacles_behind_it_are_found_one_by_one(report, name):
    row = rows(report)[f"flashinfer.{name}"]
    reasons = [obstacle.reason for obstacle in row.obstacles]
    order = ["_thread.allocate_lock", "posix.stat", "`__call__` of class `Function`", "SimpleNamespace"]
    places = [next(i for i, reason in enumerate(reasons) if part in reason) for part in order]
    assert places == sorted(places)
    last = row.obstacles[-1]
    assert last.frame.startswith(DEFINING)
    assert last.call.startswith("module.")
    assert "`__call__` of class `Function`" in last.reason


def test_the_known_attempts_fail_each_for_its_own_reason(report):
    attempts = {row.op: row for row in report.attempts}
    assert {name for name, row in attempts.items() if row.traceable} == {"hearth's op"}
    assert "_thread.allocate_lock" in attempts["AOT library alone"].reason
    assert "posix.stat" in attempts["patched version check"].reason
    assert "class `Function`" in attempts["module loaded beforehand"].reason
    assert "torch.compiler.disable" in attempts["torch.compiler.disable"].reason
    assert "data pointer" in attempts["torch.compiler.allow_in_graph"].reason


def test_paths_are_shown_from_site_packages(report):
    for row in (*report.ops, *report.attempts):
        for one in (row, *row.obstacles):
            assert not one.frame.startswith("/"), one
            assert not one.inside.startswith("/"), one


def test_document_has_the_agreed_shape(report):
    document = report.to_json()
    assert document["ok"] is True
    assert {"op", "traceable", "frame", "reason"} <= document["ops"][0].keys()


def test_nothing_of_the_pretence_stays(report):
    with pytest.raises(Exception, match=r"(?i)cuda|nvidia"):
        torch.cuda.get_device_properties(0)
    assert ops.raw_function("fp4_quantize") is flashinfer.fp4_quantize
    assert "FakeTensor" not in repr(torch.empty(1))


def test_a_traceable_function_is_traceable():
    with trace_device.pretend():
        x = torch.empty(4, device="cuda")
        assert trace_once(lambda: x * 2) is None
        found = trace_once(lambda: open("/nowhere"))  # noqa: PTH123, SIM115
    assert found is not None


@pytest.mark.parametrize(
    ("sglang", "pth", "entry", "traced"),
    [
        ("", False, False, "hearth"),
        ("0.5.9", False, False, "raw"),
        ("0.5.9", False, True, "raw"),
        ("0.5.9", True, False, "hearth"),
        ("0.5.11", False, False, "raw"),
        ("0.5.11", False, True, "hearth"),
        ("0.5.12", False, False, "engine"),
        ("0.5.23", True, True, "engine"),
    ],
)
def test_what_an_engine_traces(monkeypatch, tmp_path, sglang, pth, entry, traced):
    if pth:
        plugin.write_pth(tmp_path)
    monkeypatch.setattr(trace_cases.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(trace_cases.metadata, "entry_points", lambda **_: ["hearth"] if entry else [])
    assert trace_cases.engine_traces(sglang) == traced


def with_engine(monkeypatch, version):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "sglang" else real(name))


def test_an_old_engine_without_the_plugin_fails_the_gate(monkeypatch):
    with_engine(monkeypatch, "0.5.9")
    found = check()
    assert not found.ok
    required = {row.op for row in found.ops if row.required}
    assert required == {"flashinfer.fp4_quantize", "flashinfer.block_scale_interleave"}


def test_an_engine_whose_op_is_not_there_fails_the_gate(monkeypatch):
    with_engine(monkeypatch, "0.5.23")
    found = check()
    assert not found.ok
    row = rows(found)["torch.ops.sglang.flashinfer_fp4_quantize"]
    assert "can't be imported" in row.reason


def test_a_missing_package_is_one_line(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(MissingError, match="torch isn't installed"):
        check()


def test_relative():
    assert relative("/x/lib/python3.12/dist-packages/flashinfer/a.py") == "flashinfer/a.py"
    assert relative("/usr/lib/python3.12/subprocess.py") == "subprocess.py"
    assert Path(relative(__file__)).name == "inside_trace.py"
