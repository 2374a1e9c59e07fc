"""What dpkg and apt said, and what that means for driver, kernel and holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hearth.deploy.apt import (
    is_driver,
    kernel_packages,
    kernels,
    loose,
    missing,
    not_offered,
    reboot_problem,
    same_driver,
)

ROLES = Path(__file__).resolve().parents[2] / "ansible/roles"
SAID = """\
installed install dkms=3.0.10-8+deb12u1
installed hold nvidia-driver-cuda=590.48.01-1
installed install nvidia-kernel-open-dkms=590.48.01-1
config-files deinstall nvidia-persistenced=580.65.06-1
installed install linux-image-6.1.0-37-amd64=6.1.140-1
installed install linux-image-amd64=6.1.140-1
"""
POLICY = """\
nvidia-open:
  Installed: (none)
  Candidate: (none)
  Version table:
linux-image-amd64:
  Installed: 6.1.140-1
  Candidate: 6.1.170-3
  Version table:
     6.1.170-3 500
linux-headers-amd64:
  Installed: (none)
  Candidate: 6.1.170-3
  Version table:
"""
NOW, NEXT = "6.1.0-37-amd64", "6.1.0-39-amd64"


def facts(**said: str) -> dict[str, Any]:
    """What the host was asked about its kernels."""
    return {name: {"text": text, "code": 0, "problem": ""} for name, text in said.items()}


@pytest.mark.parametrize(
    ("wanted", "lacking"),
    [
        (["dkms"], []),
        (["nvidia-driver-cuda=590.48.01*", "nvidia-kernel-open-dkms=590.48.01-1"], []),
        (["nvidia-driver-cuda=595.45.04*"], ["nvidia-driver-cuda=595.45.04*"]),
        (["nvidia-driver-cuda=590.48.0"], ["nvidia-driver-cuda=590.48.0"]),
        (["nvidia-persistenced"], ["nvidia-persistenced"]),
        (["nvidia-persistenced=580.65.06*"], ["nvidia-persistenced=580.65.06*"]),
    ],
)
def test_an_installed_name_is_not_its_wanted_version(wanted: list[str], lacking: list[str]) -> None:
    assert missing(SAID, wanted) == lacking


def test_what_is_to_be_held() -> None:
    held = ["nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced", "docker.io"]
    assert loose(SAID, held) == ["nvidia-kernel-open-dkms"]


def test_what_apt_has_nothing_for() -> None:
    names = ["nvidia-open", "linux-image-amd64", "never-heard-of"]
    assert not_offered(POLICY, names) == ["nvidia-open", "never-heard-of"]
    assert not_offered("", names) == names


def test_the_loaded_driver_is_the_wanted_one() -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  Release Build  (a@b)\n"
    assert is_driver(text, "590.48.01")
    assert is_driver(text, "590")
    assert not is_driver(text, "590.48.0")
    assert not is_driver(text, "595.45.04")
    assert not is_driver("", "590.48.01")
    assert not same_driver("5900.1", "590")


@pytest.mark.parametrize(
    ("kernel", "said", "image", "headers"),
    [
        (NOW, SAID, ["linux-image-amd64"], ["linux-headers-amd64"]),
        ("6.1.0-37-cloud-amd64", "", ["linux-image-cloud-amd64"], ["linux-headers-cloud-amd64"]),
        (
            "6.8.0-60-generic",
            "installed install linux-image-generic-hwe-22.04=6.8.0-60.63~22.04.1\n",
            ["linux-image-generic-hwe-22.04"],
            ["linux-headers-generic-hwe-22.04"],
        ),
        (
            "6.8.0-60-generic",
            "installed install linux-image-virtual=6.8.0-60.63\n"
            "installed install linux-image-extra-virtual=6.8.0-60.63\n"
            "installed install linux-image-unsigned-6.8.0-60-generic=6.8.0-60.63\n",
            ["linux-image-virtual"],
            ["linux-headers-virtual"],
        ),
        ("6.8.0-1021-aws", "", ["linux-image-aws"], ["linux-headers-aws"]),
    ],
)
def test_the_packages_that_follow_new_kernels(
    kernel: str, said: str, image: list[str], headers: list[str]
) -> None:
    found = kernels(said, facts(running=kernel, booting=kernel))
    assert found == {"own": [f"linux-headers-{kernel}"], "image": image, "headers": headers}


def offer(*names: str) -> str:
    """What apt-cache policy says of packages that the archive has."""
    return "".join(f"{name}:\n  Installed: (none)\n  Candidate: 6.1.140-1\n" for name in names)


def test_headers_are_those_of_the_kernels_that_are_there() -> None:
    known = kernels(SAID, facts(running=NOW, booting=NEXT))
    both = [f"linux-headers-{NEXT}", f"linux-headers-{NOW}"]
    assert known["own"] == both
    assert kernel_packages(SAID, known, offer(*both)) == [*both, "linux-headers-amd64"]
    assert kernel_packages(SAID, known, offer(both[0])) == [both[0], "linux-headers-amd64"]
    installed = SAID + f"installed install linux-headers-{NEXT}=6.1.150-1\n"
    assert kernel_packages(installed, known, "") == [both[0], "linux-headers-amd64"]


def test_a_kernel_whose_headers_are_gone_gives_way_to_the_newest() -> None:
    known = kernels(SAID, facts(running=NOW, booting=NOW))
    found = kernel_packages(SAID, known, POLICY)
    assert found == ["linux-image-amd64=6.1.170-3", "linux-headers-amd64=6.1.170-3"]
    assert missing(SAID, found) == found, "the older linux-image-amd64 that is there is not it"


def test_a_reboot_that_would_not_help_is_told_before() -> None:
    asked = {"running": NOW, "booting": NEXT, "module": "595.45.04", "since": "1700", "booted": "1500"}
    assert reboot_problem(facts(**asked), "595.45.04") == ""
    assert reboot_problem(facts(**{**asked, "booting": ""}), "595.45.04") == ""
    said = reboot_problem(facts(**{**asked, "module": "590.48.01"}), "595.45.04")
    assert said.startswith(
        f"kernel {NEXT} boots next, and has no NVIDIA module 595.45.04 (only 590.48.01): `dkms"
    )
    lacks = facts(**asked) | {"module": {"text": "modinfo: ERROR", "code": 1, "problem": ""}}
    assert "(none)" in reboot_problem(lacks, "595.45.04")


def test_a_module_that_did_not_load_at_the_last_boot_won_t_at_the_next() -> None:
    asked = {"running": NOW, "booting": NOW, "module": "595.45.04", "since": "1400", "booted": "1500"}
    said = reboot_problem(facts(**asked), "595.45.04")
    assert said.startswith(f"kernel {NOW} had the NVIDIA module 595.45.04 already when it booted")
    assert "mokutil" in said
    assert reboot_problem(facts(**{**asked, "booting": NEXT}), "595.45.04") == "", "it never ran"


@given(st.text(), st.text())
def test_any_text_is_no_package_at_worst(said: str, policy: str) -> None:
    known = kernels(said, facts(running=said, booting=policy))
    assert isinstance(kernel_packages(said, known, policy), list)
    assert isinstance(reboot_problem(facts(running=said, module=policy, since=said), "590"), str)
    assert not_offered(policy, ["a"]) in ([], ["a"])


@pytest.mark.parametrize("role", ["nvidia_driver", "host_tuning"])
def test_a_deploy_does_not_reboot_the_machine_it_runs_on(role: str) -> None:
    rule = yaml.safe_load((ROLES / role / "vars/main.yml").read_text())[f"{role}_may_reboot"]
    environment = jinja2.Environment()
    environment.filters["bool"] = bool
    template = environment.from_string(rule)
    assert template.render(allow_reboot=True, ansible_connection="local") == "False"
    assert template.render(allow_reboot=True, ansible_connection="ssh") == "True"
    assert template.render(allow_reboot=True) == "True"
    assert template.render() == "False"


@pytest.mark.parametrize(
    ("distribution", "version", "name"),
    [("Debian", "12.11", "debian12"), ("Ubuntu", "22.04", "ubuntu2204"), ("Ubuntu", "24.04", "ubuntu2404")],
)
def test_nvidia_s_repository_is_that_of_the_distribution(distribution: str, version: str, name: str) -> None:
    said = {
        "distribution": distribution,
        "distribution_version": version,
        "distribution_major_version": version.partition(".")[0],
    }
    own = yaml.safe_load((ROLES / "nvidia_driver/vars/main.yml").read_text())
    platform = jinja2.Template(own["nvidia_driver_platform"]).render(ansible_facts=said)
    defaults = yaml.safe_load((ROLES / "nvidia_driver/defaults/main.yml").read_text())
    for variable, end in (
        ("repository", f"/{name}/x86_64/"),
        ("repository_key", f"/{name}/x86_64/3bf863cc.pub"),
    ):
        template = jinja2.Template(defaults[f"nvidia_driver_{variable}"])
        assert template.render(nvidia_driver_platform=platform).endswith(end)
    packages = jinja2.Template(defaults["nvidia_driver_packages"]).render(ansible_facts=said)
    assert ("nvidia-kernel-open-dkms" in packages) == (distribution == "Debian")
    assert ("nvidia-dkms-open" in packages) == (distribution == "Ubuntu")


@pytest.mark.parametrize(
    "role", ["nvidia_driver", "container_runtime", "packages", "host_tuning", "preflight"]
)
def test_every_variable_of_these_roles_is_specified(role: str) -> None:
    specified = yaml.safe_load((ROLES / role / "meta/argument_specs.yml").read_text())["argument_specs"][
        "main"
    ]
    defaults = yaml.safe_load((ROLES / role / "defaults/main.yml").read_text())
    assert set(defaults) <= set(specified["options"])
    for name, option in specified["options"].items():
        if "default" in option and name in defaults:
            assert option["default"] == defaults[name], name
