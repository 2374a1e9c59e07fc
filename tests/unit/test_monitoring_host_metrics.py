"""The role's host metrics: what they say with and without a GPU, and how they are put in place."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hearth.host import nvmlevents

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "ansible/roles/monitoring/files/hearth_host_metrics.py"
RECORDED = ROOT / "tests/monitoring/pages/hearth-host-h200.txt"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("hearth_host_metrics", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path):
    """A machine with one GPU of two functions, a module and a library."""
    for name, vendor, kind in (
        ("01", "0x10de", "0x030000"),
        ("02", "0x10de", "0x040300"),
        ("03", "0x8086", "0x030000"),
    ):
        device = tmp_path / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    module = tmp_path / "sys/module/nvidia"
    module.mkdir(parents=True)
    (module / "version").write_text("580.95.05\n")
    return tmp_path


def library(root, version):
    folder = root / "usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"libnvidia-ml.so.{version}").touch()
    (folder / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")


def values(samples):
    return {(name, tuple(sorted(labels.items()))): value for name, labels, value in samples}


@pytest.mark.parametrize(
    ("version", "refused", "expected"),
    [
        ("580.95.05", False, 0.0),
        ("580.105.08", False, 1.0),
        (None, False, 0.0),
        (None, True, 1.0),
    ],
)
def test_a_half_updated_driver_is_seen(script, root, version, refused, expected):
    if version:
        library(root, version)
    seen = values(script.host_samples(root, refused))
    assert seen["hearth_host_driver_mismatch", ()] == expected
    labels = (("library", version or "none"), ("module", "580.95.05"))
    assert seen["hearth_host_driver_info", labels] == 1


def test_only_gpus_count_on_the_bus(script, root):
    assert script.on_bus(root) == 1
    assert script.on_bus(root / "nowhere") == 0


def test_a_gpu_that_fell_off_does_not_hide_the_others(script, monkeypatch):
    def handle(index):
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def unknown(_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPcieReplayCounter", lambda index: index + 5)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrPcieLinkWidth", unknown)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxPcieLinkWidth", unknown)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda _: 0x44)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda index, fields: [Value(index)])
    seen = values(script.gpu_samples(3))
    assert seen["hearth_host_gpus_visible", ()] == 2
    assert seen["hearth_host_gpu_pcie_replays_total", (("gpu", "2"),)] == 7
    assert seen["hearth_host_gpu_recovery", (("gpu", "0"),)] == 0
    assert seen["hearth_host_gpu_recovery", (("gpu", "2"),)] == 1
    reasons = {labels[1][1] for (name, labels), on in seen.items() if name.endswith("slowdown") and on}
    assert reasons == {"power_cap", "hardware_thermal"}
    assert not [name for name, _ in seen if "width" in name]


class Value:
    """A field's value: GPU 2 needs a reboot (2)."""

    def __init__(self, action, error=pynvml.NVML_SUCCESS):
        self.nvmlReturn = error
        self.value = SimpleNamespace(uiVal=action)


def test_a_driver_that_says_nothing_about_recovery(script, monkeypatch):
    old = Value(1, pynvml.NVML_ERROR_NOT_SUPPORTED)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda handle, fields: [old])
    assert script._must_recover(0) is None
    monkeypatch.delattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
    assert script._must_recover(0) is None
    assert nvmlevents._NEEDS == script.RECOVERIES


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, True),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, False),
    ],
)
def test_without_nvml_no_gpu_is_visible(script, monkeypatch, error, refused):
    def init():
        raise pynvml.NVMLError(error)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    assert script.look() == ([("hearth_host_gpus_visible", {}, 0)], refused)


def test_the_page_can_be_read_and_is_put_in_place_whole(script, root, tmp_path):
    page = script.render([*script.host_samples(root, False), ("hearth_host_gpus_visible", {}, 2)])
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert families["hearth_host_gpus_visible"].samples[0].value == 2
    script.write(tmp_path, page)
    written = tmp_path / "hearth_host.prom"
    assert written.read_text() == page
    assert written.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.glob(".*.new")) == []


def test_a_page_of_a_real_gpu_host_has_every_metric(script):
    names = {line.split()[2] for line in RECORDED.read_text().splitlines() if line.startswith("# TYPE")}
    assert names == set(script.HELP) - {"hearth_host_gpu_recovery"}, "which came after the recording"


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["/nonexistent"], 1), (["-"], 0)])
def test_exit_codes(script, capsys, arguments, code):
    assert script.main(arguments) == code
    if code == 1:
        assert "/nonexistent: No such file or directory" in capsys.readouterr().err
