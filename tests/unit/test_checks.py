"""Verdicts on what real tools print: a healthy host, and one thing wrong at a time (tests/fixtures/host)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.host import checks
from hearth.host.checks import Output, Room, Wanted
from hearth.host.checks_base import GIB, version_key
from hearth.host.checks_driver import loaded_version
from hearth.host.checks_pci import iommu_mode
from hearth.host.smi import read, short_bus

HERE = Path(__file__).parents[1] / "fixtures" / "host"
DRIVERLESS = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)
NOBODY = "<processes>\n\t\t</processes>"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173\n"
LOST = "Unable to determine the device handle for GPU3: 0000:31:00.0: Unknown Error\n"
DETACHED = "Failed to initialize NVML: Unknown Error\n"
PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
    "GCC version:  gcc version 13.2.0 (Ubuntu 13.2.0-23ubuntu4)\n"
)
NVRM = "[ 100.5] NVRM: "
OFF_THE_BUS = (
    f"{NVRM}Xid (PCI:0000:31:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
)
RECOVERED = (
    f"{NVRM}Xid (PCI:0000:31:00): 154, "
    "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)\n"
)


def folder(name: str) -> dict[str, Output]:
    """A recorded host."""
    found = {file.stem: Output(file.read_text()) for file in (HERE / name).glob("*.txt")}
    problems = {f.stem: Output(problem=f.read_text().strip()) for f in (HERE / name).glob("*.problem")}
    return found | problems


def part(name: str) -> str:
    """One recorded output."""
    return (HERE / "parts" / f"{name}.txt").read_text()


RTX8 = folder("rtx8")


def swap(probe: str, old: str, new: str, times: int = 1) -> dict[str, Output]:
    """The healthy host with one text replaced in one output."""
    text = RTX8[probe].text
    assert old in text
    return {probe: Output(text.replace(old, new, times))}


def smi(old: str, new: str, times: int = 1) -> dict[str, Output]:
    return swap("nvidia_smi", old, new, times)


def without_card(number: int) -> dict[str, Output]:
    """nvidia-smi without one of the eight."""
    head, *cards = RTX8["nvidia_smi"].text.split("<gpu id=")
    last, mark, tail = cards[-1].partition("</gpu>")
    cards[-1] = f"{last}{mark}"
    kept = [card for index, card in enumerate(cards) if index != number]
    return {"nvidia_smi": Output(head + "".join(f"<gpu id={card}" for card in kept) + tail)}


def holder(name: str) -> str:
    return (
        f"<processes><process_info><pid>4711</pid><type>C</type><process_name>{name}</process_name>"
        "<used_memory>70000 MiB</used_memory></process_info></processes>"
    )


def said(text: str) -> dict[str, Output]:
    return {"nvidia_smi": Output(text, code=255)}


def verdicts(changes: Mapping[str, Output], wanted: Wanted = Wanted()) -> dict[str, checks.Check]:  # noqa: B008
    return {check.id: check for check in checks.judge({**RTX8, **changes}, wanted)}


def test_a_healthy_host_has_nothing_to_say() -> None:
    found = verdicts({})
    assert {check.status for check in found.values()} == {"ok"}
    assert found["gpu.count"].seen == "8 of 8 GPUs"
    assert found["gpu.power"].seen == "600 W"
    assert found["driver.mismatch"].seen == "580.159.04 everywhere (loaded module, libraries, module on disk)"


# one change, the check that must notice, its status, words of what is seen
CASES = [
    (without_card(3), "gpu.count", "fail", "7 of 8 GPUs: 0000:01:00.0"),
    (
        smi("RTX PRO 6000 Blackwell", "RTX PRO 4000 Blackwell"),
        "gpu.name",
        "fail",
        "GPU 0 (0000:01:00.0): NVIDIA RTX PRO 4000",
    ),
    (
        smi("<driver_version>580.159.04", "<driver_version>570.86.15"),
        "gpu.version",
        "fail",
        "driver 570.86.15",
    ),
    (
        smi("<driver_version>580.159.04", "<driver_version>595.71.05"),
        "gpu.version",
        "warn",
        "driver 595.71.05",
    ),
    (
        smi("<driver_version>580.159.04", "<driver_version>580.173.02"),
        "driver.mismatch",
        "fail",
        "libraries 580.173.02",
    ),
    (
        smi("recovery_action>None", "recovery_action>Reboot"),
        "gpu.recovery",
        "fail",
        "GPU 0 (0000:01:00.0): Reboot",
    ),
    (smi("<used>0 MiB", "<used>70000 MiB"), "gpu.memory", "warn", "70000 MiB by nobody that shows"),
    (smi(NOBODY, holder("/usr/bin/python3")), "gpu.memory", "warn", "by /usr/bin/python3 (pid 4711)"),
    (smi(NOBODY, holder("sglang::scheduler_TP0")), "gpu.memory", "ok", "held by the engine"),
    (smi("<dram_uncorrectable>0", "<dram_uncorrectable>2"), "gpu.ecc", "fail", "2 uncorrected"),
    (smi("row_pending>No", "row_pending>Yes"), "gpu.ecc", "fail", "GPU 0"),
    (smi("row_failure>No", "row_failure>Yes"), "gpu.ecc", "fail", "GPU 0"),
    (smi("<current_ecc>Enabled", "<current_ecc>Disabled"), "gpu.ecc", "warn", "off: GPU 0"),
    (smi("<current_mig>Disabled", "<current_mig>Enabled"), "gpu.mig", "fail", "on: GPU 0"),
    (smi("<persistence_mode>Enabled", "<persistence_mode>Disabled"), "gpu.persistence", "warn", "off: GPU 0"),
    (smi("<current_power_limit>600", "<current_power_limit>300"), "gpu.power", "warn", "300 W, 600 W wanted"),
    (smi("<current_link_width>16x", "<current_link_width>8x"), "gpu.pcie", "warn", "x8 of x16"),
    (smi("<max_link_gen>5", "<max_link_gen>4"), "gpu.pcie", "warn", "generation 4 only"),
    (smi("<performance_state>P8", "<performance_state>P0"), "gpu.pcie", "warn", "generation 1 while in P0"),
    (smi("<total>131072 MiB", "<total>256 MiB"), "gpu.bar1", "warn", "256 of 97887 MiB"),
    (smi("<state>N/A", "<state>In Progress"), "gpu.fabric", "fail", "In Progress"),
    (said(DRIVERLESS), "gpu.driver", "fail", "couldn't communicate"),
    (said(MISMATCH), "gpu.driver", "fail", "version mismatch"),
    (said(MISMATCH), "driver.mismatch", "fail", "libraries of another version"),
    (said(LOST), "gpu.driver", "fail", "GPU3: 0000:31:00.0"),
    (said(DETACHED), "gpu.driver", "fail", "Unknown Error"),
    (said(part("smi-no-devices")), "gpu.driver", "fail", "No devices were found"),
    ({"nvidia_smi": Output(LOST + RTX8["nvidia_smi"].text)}, "gpu.driver", "fail", "GPU3: 0000:31:00.0"),
    ({"nvidia_smi": Output(problem="no answer in 20 s")}, "gpu.driver", "fail", "no answer in 20 s"),
    ({"nvidia_smi": Output(problem="not installed")}, "gpu.driver", "fail", "not installed"),
    ({"driver_version": Output(PROPRIETARY)}, "driver.module", "fail", "535.183.01, loaded, proprietary"),
    (
        {"driver_version": Output(problem="no such file")},
        "driver.module",
        "fail",
        "580.159.04 (open) is installed",
    ),
    (swap("modules", "nvidia ", "nouveau "), "driver.nouveau", "fail", "nouveau is loaded"),
    ({"fabricmanager": Output("failed\n", 3)}, "driver.fabricmanager", "warn", "has failed"),
    ({"kernel_log": Output(OFF_THE_BUS)}, "kernel.xid", "fail", "Xid 79 on 0000:31:00"),
    ({"kernel_log": Output(OFF_THE_BUS + RECOVERED)}, "kernel.xid", "ok", "1x Xid 79"),
    ({"lspci": Output(part("lspci-seven"))}, "pci.gpus", "fail", "7 of 8 on the bus"),
    ({"lspci": Output(part("lspci-lost"))}, "pci.gpus", "fail", "no answer from 0000:21:00.0"),
    ({"lspci": Output(part("lspci-narrow"))}, "pci.link", "warn", "0000:11:00.0: x8 of x16"),
    ({"lspci": Output(part("lspci-acs"))}, "pci.acs", "warn", "redirects on 3 of 3 bridges"),
    ({"lspci": Output(part("lspci-nobody"))}, "pci.acs", "skip", ""),
    ({"iommu_types": Output("DMA-FQ\n" * 9)}, "host.iommu", "warn", "translated"),
    (
        {"iommu_types": Output("DMA\n" * 9), "lspci": Output(part("lspci-acs"))},
        "host.iommu",
        "fail",
        "translated, and",
    ),
    ({"iommu_types": Output(problem="no such file"), "cmdline": Output("quiet")}, "host.iommu", "ok", "off"),
    ({"docker": Output(problem="not installed")}, "runtime.docker", "fail", "not installed"),
    (
        {"docker": Output(part("docker-down"))},
        "runtime.docker",
        "fail",
        "Cannot connect to the Docker daemon",
    ),
    ({"docker": Output(part("docker-denied"), 1)}, "runtime.docker", "skip", ""),
    ({"docker": Output(part("docker-20.10"))}, "runtime.docker", "warn", "20.10.24"),
    ({"docker": Output(part("docker-20.10"))}, "runtime.toolkit", "fail", "unknown to Docker"),
    ({"docker": Output(part("docker-20.10"))}, "runtime.cdi", "warn", "Docker doesn't read them"),
    (
        {"docker": Output(part("docker-20.10")), "dev_char": Output("1:1 ../mem\n")},
        "runtime.dev_char",
        "ok",
        "cgroupfs",
    ),
    ({"nvidia_ctk": Output(problem="not installed")}, "runtime.toolkit", "fail", "not installed"),
    (swap("nvidia_ctk", "1.19.0", "1.19.1"), "runtime.toolkit", "warn", "1.19.1"),
    ({"cdi": Output('level=info msg="Found 0 CDI devices"\n')}, "runtime.cdi", "warn", "no device"),
    ({"dev_char": Output("1:1 ../mem\n")}, "runtime.dev_char", "fail", "no link"),
    (
        {"os_release": Output('ID=debian\nVERSION_ID="11"\nPRETTY_NAME="Debian 11"\n')},
        "host.os",
        "fail",
        "Debian 11",
    ),
    ({"os_release": Output('ID="rocky"\nVERSION_ID="9.4"\n')}, "host.os", "fail", "rocky 9.4"),
    ({"os_release": Output(problem="no such file")}, "host.os", "fail", "no such file"),
    ({"os_release": Output('ID=debian\nVERSION_ID="12"\n')}, "host.os", "ok", "debian 12"),
    (
        {"limits": Output("Max locked memory         65536                65536                bytes\n")},
        "host.memlock",
        "warn",
        "65536 bytes",
    ),
    (
        swap("disk", "810811392000            0  810811392000", "67108864 0 67108864"),
        "host.shm",
        "warn",
        "0.1 GiB",
    ),
    ({"thp": Output("always madvise [never]\n")}, "host.hugepages", "warn", "never"),
    (
        swap("meminfo", "HugePages_Total:       0", "HugePages_Total:   40000"),
        "host.hugepages",
        "warn",
        "78 GiB",
    ),
    (swap("governor", "performance", "powersave", 3), "host.governor", "warn", "3 CPUs: powersave"),
    (
        swap("disk", "3400755982336", "340075598233"),
        "host.disk",
        "fail",
        "/var/lib/hearth: 317 GiB free, 600 GiB needed",
    ),
    (swap("disk", " xfs ", " zfs "), "host.disk", "warn", "/var/lib/hearth (zfs)"),
]


@pytest.mark.parametrize(("changes", "name", "status", "words"), CASES)
def test_one_thing_wrong(changes: dict[str, Output], name: str, status: str, words: str) -> None:
    check = verdicts(changes)[name]
    assert check.status == status, check
    assert words in check.seen
    if status in ("warn", "fail"):
        assert check.why
        assert check.fix
        assert check.why != check.fix


def test_every_check_is_tried_both_ways() -> None:
    """No check that can't say anything but ok."""
    tried = {name for _, name, status, _ in CASES if status in ("warn", "fail")}
    assert set(verdicts({})) - tried == {"driver.secure_boot"}  # below: it takes several outputs


def test_secure_boot_refuses_a_module_without_signature() -> None:
    unloaded = {"driver_version": Output(problem="no such file")}
    boot = {**unloaded, "mokutil": Output("SecureBoot enabled\n")}
    assert verdicts(boot)["driver.secure_boot"].status == "fail"
    signed = Output(RTX8["modinfo"].text + "signer:         gpu1 Secure Boot Module Signature key\n")
    assert verdicts({**boot, "modinfo": signed})["driver.secure_boot"].status == "warn"
    no_efi = {**unloaded, "mokutil": Output(part("mokutil-no-efi"), 1)}
    assert verdicts(no_efi)["driver.secure_boot"].status == "ok"
    installed = {**unloaded, "modinfo": Output(part("modinfo-proprietary"))}
    assert "535.183.01 (proprietary) is installed" in verdicts(installed)["driver.module"].seen


def test_an_idle_card_may_slow_its_link() -> None:
    """The healthy fixture has every link at generation 1, in P8; lspci calls that downgraded."""
    assert "2.5GT/s (downgraded)" in RTX8["lspci"].text
    assert "<current_link_gen>1<" in RTX8["nvidia_smi"].text
    found = verdicts({})
    assert (found["gpu.pcie"].status, found["pci.link"].status) == ("ok", "ok")


def test_two_h200_as_recorded() -> None:
    wanted = Wanted(gpus=2, gpu_name="H200")
    found = {check.id: check for check in checks.judge(folder("h200-x2"), wanted)}
    bad = {name: check.status.value for name, check in found.items() if check.status in ("warn", "fail")}
    assert bad == {"host.disk": "fail"}
    assert found["runtime.docker"].why == "inside a container: ask the host"
    assert found["kernel.xid"].seen.startswith("none that needs a reset; 1x Xid 31 (illegal memory access")
    assert found["gpu.fabric"].seen == "NVSwitch fabric is up"
    assert found["driver.module"].seen == "580.159.04, loaded, open"
    assert found["gpu.power"].seen == "700 W"
    other = {check.id: check for check in checks.judge(folder("h200-x2"), Wanted())}
    assert other["gpu.count"].seen.startswith("2 of 8 GPUs")
    assert other["gpu.name"].status == "fail"


def test_a_wanted_power_limit() -> None:
    wanted = Wanted(power_limit=450)
    assert "600 W, 450 W wanted" in verdicts({}, wanted)["gpu.power"].seen
    capped = smi("<current_power_limit>600", "<current_power_limit>450", 8)
    assert verdicts(capped, wanted)["gpu.power"].status == "ok"


def test_paths_on_one_disk_need_their_sum() -> None:
    both = [
        Room("/var/lib/hearth/models", 3000 * GIB, "weights"),
        Room("/var/lib/hearth/x", 300 * GIB, "images"),
    ]
    seen = verdicts({}, replace(Wanted(), rooms=both))["host.disk"].seen
    assert seen == "/var/lib/hearth: 3167 GiB free, 3300 GiB needed for weights, images"


def test_without_gpus_only_the_rest_is_judged() -> None:
    found = verdicts({}, Wanted(gpus=0))
    judged = {name for name, check in found.items() if check.status != "skip"}
    assert judged == {
        "host.os",
        "host.memlock",
        "host.shm",
        "host.hugepages",
        "host.governor",
        "host.disk",
        "runtime.docker",
    }


def test_in_a_container_docker_is_the_hosts_affair() -> None:
    inside = {"container": Output(""), "docker": Output(problem="not installed")}
    assert verdicts(inside)["runtime.docker"].status == "skip"
    assert verdicts({**inside, "docker": RTX8["docker"]})["runtime.docker"].status == "ok"


@pytest.mark.parametrize(
    ("cmdline", "types", "mode"),
    [
        ("quiet", "identity\nidentity\n", "passthrough"),
        ("iommu=pt", "DMA-FQ\nidentity\n", "translated"),
        ("quiet iommu=pt", "", "passthrough"),
        ("amd_iommu=off", "", "off"),
        ("intel_iommu=on", "", "translated"),
        ("intel_iommu=on iommu=pt", "", "passthrough"),
        ("quiet", "", "unknown"),
    ],
)
def test_iommu(cmdline: str, types: str, mode: str) -> None:
    assert iommu_mode(cmdline, types) == mode


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (RTX8["driver_version"].text, ("580.159.04", True)),
        (PROPRIETARY, ("535.183.01", False)),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.84  Release Build\n",
            ("595.84", True),
        ),
        ("GCC version:  gcc version 11.4.0\n", None),
        ("", None),
    ],
)
def test_the_loaded_module(text: str, version: tuple[str, bool] | None) -> None:
    assert loaded_version(text) == version


def test_versions_compare_by_number() -> None:
    assert version_key("580.65.06") < version_key("580.159.04") < version_key("590.48.01")


def test_bus_addresses() -> None:
    assert short_bus("00000000:C1:00.0") == "0000:c1:00.0"
    assert short_bus("rubbish") == "rubbish"
    assert [gpu.label for gpu in read(RTX8["nvidia_smi"].text).gpus][:2] == [
        "GPU 0 (0000:01:00.0)",
        "GPU 1 (0000:11:00.0)",
    ]


def test_damaged_xml_is_a_finding() -> None:
    half = RTX8["nvidia_smi"].text[:4000]
    assert verdicts(said(half))["gpu.driver"].status == "fail"
    assert verdicts(said(half + "</nvidia_smi_log>"))["gpu.driver"].seen == "nvidia-smi: its XML is damaged"


def test_the_document() -> None:
    found = checks.judge({**RTX8, **without_card(0)}, Wanted())
    document = checks.report(found)
    assert document["ok"] is False
    assert set(document["checks"][0]) == {"id", "status", "seen", "why", "fix"}
    assert checks.report(c for c in found if c.status != "fail")["ok"] is True
