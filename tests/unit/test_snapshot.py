"""What the machine says around a failure, also where it says nothing."""

import json
import sys

import pynvml
import pytest

from hearth import snapshot
from hearth.snapshot import gpu_snapshot, kernel_part, kernel_text, versions


def test_the_last_kernel_lines_come_after_earlier_telling_ones():
    noise = [f"veth{n} entered disabled state" for n in range(500)]
    lines = ["NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", *noise]
    text = kernel_part(lines)
    assert text.splitlines()[1] == lines[0]
    assert "veth499 " in text
    assert "veth299 " not in text
    assert "earlier" not in kernel_part(noise)
    assert kernel_part([]) == "== the last lines\n"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo one; echo two", "two"),
        (
            "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1",
            "Operation not permitted",
        ),
    ],
)
def test_dmesg_or_why_not(tmp_path, monkeypatch, script, said):
    (tmp_path / "dmesg").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "dmesg").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert said in kernel_text()


def test_no_dmesg_and_one_that_hangs_are_reasons(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no dmesg here" in kernel_text()
    monkeypatch.setattr(snapshot, "_PROGRAM_SECONDS", 0.1)
    (tmp_path / "dmesg").write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    (tmp_path / "dmesg").chmod(0o755)
    assert "timed out" in kernel_text()


def test_versions_come_from_the_engines_interpreter():
    found = versions(sys.executable)
    assert found["engine_environment"]["hearth"] == found["hearth"]
    assert found["engine_environment"]["python"].startswith("3.")
    assert "can't be asked" in versions("/nonexistent/python")["engine_environment"]["problem"]


def test_without_a_driver_gpu_json_says_so(monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert gpu_snapshot() == {"gpus": [], "problem": "NVML: NVML Shared Library Not Found"}


def test_a_fact_that_is_refused_does_not_hide_the_others(monkeypatch):
    """A stand-in for NVML: two cards, one fallen off the bus, the other without power readings."""

    def refuse(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def handle(index):
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return object()

    for name in dir(pynvml):
        if name.startswith(("nvmlDevice", "nvmlSystem")):
            monkeypatch.setattr(pynvml, name, refuse)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _: b"A card")
    found = json.loads(json.dumps(gpu_snapshot()))
    assert found["gpus"][0]["name"] == "A card"
    assert found["gpus"][0]["power_watts"] == "(Not Supported)"
    assert found["gpus"][1] == {"index": 1, "problem": "NVML: GPU is lost"}


def test_this_machine_has_an_answer():
    assert "gpus" in gpu_snapshot()
