"""What the output of a host's tools means to the roles: right, empty and broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hearth.config import load
from hearth.deploy.draft import draft
from hearth.deploy.facts import (
    asked,
    gpu_count_problem,
    last_json,
    output,
    pci_gpus,
    problems,
    release_differs,
    scraped,
)
from hearth.deploy.release import ConfigRef, Draft, Release, sha256, with_digest
from hearth.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "sha256:" + "a" * 64


def listing(count: int) -> str:
    """What grep prints of /sys/bus/pci/devices with `count` cards, their sound devices and a network card."""
    lines = [
        "/sys/bus/pci/devices/0000:00:1f.0/vendor:0x8086",
        "/sys/bus/pci/devices/0000:00:1f.0/class:0x020000",
    ]
    for number in range(1, count + 1):
        place = f"/sys/bus/pci/devices/0000:{number:02x}:00"
        lines += [f"{place}.0/vendor:0x10de", f"{place}.0/class:0x030000"]
        lines += [f"{place}.1/vendor:0x10de", f"{place}.1/class:0x040300"]
    return "\n".join(lines)


def test_gpus_on_the_bus() -> None:
    assert len(pci_gpus(listing(8))) == 8
    assert gpu_count_problem(pci_gpus(listing(8)), 8) == ""
    said = gpu_count_problem(pci_gpus(listing(7)), 8)
    assert said.startswith("7 of 8 GPUs are on the PCI bus (there are 0000:01:00.0,")
    assert gpu_count_problem(pci_gpus(""), 8).startswith("0 of 8 GPUs are on the PCI bus: reseat")


@given(st.text())
def test_any_text_is_no_gpu_at_worst(text: str) -> None:
    assert isinstance(pci_gpus(text), list)
    assert isinstance(last_json(text), dict)
    assert isinstance(asked(text), dict)
    assert isinstance(
        problems({"nvidia_smi": text, "modinfo": text, "lspci": text}, {}, ["gpu", "driver", "pci"]), list
    )


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("version: 590", 0, {"text": "version: 590", "code": 0, "problem": ""}),
        ("sh: 1: nvidia-smi: not found", 127, {"text": "", "code": 127, "problem": "not installed"}),
        ("cat: /proc/x: No such file or directory", 1, {"text": "", "code": 1, "problem": "no such file"}),
        ("", 124, {"text": "", "code": 124, "problem": "no answer in 60 s"}),
        ("No devices were found", 6, {"text": "No devices were found", "code": 6, "problem": ""}),
    ],
)
def test_what_a_tool_said(text: str, code: int, said: dict[str, object]) -> None:
    assert output(text, code) == said
    assert asked(f"=== a\n{text}\n\n=== a ended with {code}\n")["a"]["problem"] == said["problem"]


def test_what_several_tools_said() -> None:
    said = "=== a\none\n\n=== b is not the end\n\n=== a ended with 0\n"
    said += "=== b\n\n=== b ended with 3\n=== c\ncut off"
    assert asked(said) == {
        "a": {"text": "one\n\n=== b is not the end\n", "code": 0, "problem": ""},
        "b": {"text": "", "code": 3, "problem": ""},
    }


def test_verdicts_of_a_host_without_a_driver() -> None:
    missing = {"text": "", "code": 127, "problem": "not installed"}
    found = problems(
        {"nvidia_smi": missing, "modinfo": missing, "driver_version": missing}, {}, ["driver", "gpu"]
    )
    assert any(line.startswith("driver.module: no NVIDIA kernel module") for line in found)
    assert any(line.startswith("gpu.driver: nvidia-smi: not installed") for line in found)
    assert problems({}, {"gpus": 0}, ["driver", "gpu"]) == []


def test_the_last_json_line() -> None:
    assert last_json('noise\n{"a": 1}\n{"b": 2}\nmore') == {"b": 2}
    assert last_json("[1]\n") == {}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    said = yaml.safe_load((ROOT / "hearth.example.yaml").read_text())
    said["ports"]["supervisor_host"] = "0.0.0.0"
    path = tmp_path / "hearth.yaml"
    path.write_text(yaml.safe_dump(said))
    return path


def test_a_draft_is_one_that_the_host_takes(config: Path) -> None:
    said = draft(load(config), {"gpu": "nvidia", "model_path": "/data/glm"}, "me@here")
    checked = Draft.model_validate(said | {"image": {"ref": "x:1"}})
    assert checked.container.gpus == "all"
    assert str(checked.container.binds[0].source) == "/data/glm"
    assert {port.container: port.address for port in checked.container.ports} == {
        30000: "0.0.0.0",
        9400: "127.0.0.1",
    }


def test_a_config_that_no_container_can_serve_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hearth.yaml"
    example = (ROOT / "hearth.example.yaml").read_text()
    path.write_text(example)
    assert draft(load(path), {}, "me@here"), "the example can be deployed as it is"
    path.write_text(example.replace("supervisor_host: 0.0.0.0", "supervisor_host: 127.0.0.1"))
    with pytest.raises(ConfigError, match=r"ports\.supervisor_host"):
        draft(load(path), {}, "me@here")


def test_whether_a_deploy_would_make_a_release(config: Path) -> None:
    text = config.read_text()
    said = draft(load(config), {}, "me@here")
    made = Draft.model_validate(said | {"image": {"ref": "x:1", "digest": DIGEST}})
    kept = with_digest(text, DIGEST, "x")
    current = Release(
        **made.model_dump(),
        id="20261129T215500Z-3fa91c",
        made_at="now",
        config=ConfigRef(sha256=sha256(kept)),
    ).to_json()
    assert not release_differs(current, said, "x:1", DIGEST, text)
    assert not release_differs(current, said | {"made_by": "you@there"}, "y:2", DIGEST, text)
    assert release_differs(current, said, "x:1", "sha256:" + "b" * 64, text)
    assert release_differs(current, said, "x:1", DIGEST, text + "\nfailures: {keep: 3}\n")
    assert release_differs("", said, "x:1", DIGEST, text)


def test_monitoring_scrapes_what_is_deployed(config: Path) -> None:
    text = config.read_text()
    said = draft(load(config), {}, "me@here")
    ports = load(config).ports
    assert scraped(said, text) == {
        "model": load(config).model.served_name,
        "hearth": f"127.0.0.1:{ports.supervisor}",
        "engine": f"127.0.0.1:{ports.engine}",
    }
    said["container"]["ports"] = [{"container": ports.engine, "host": 8000, "address": "192.0.2.7"}]
    assert scraped(said, text)["engine"] == "192.0.2.7:8000"
    assert "hearth" not in scraped(said, text)
    with pytest.raises(ConfigError):
        scraped(said, "nonsense: 1\n")
