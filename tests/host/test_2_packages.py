"""Driver, toolkit, kernel headers and kernel arguments, on a host with apt and a signed repository.

The packages there have NVIDIA's names and versions and nothing in them; the host has no GPU and no GRUB:
`modinfo` and `update-grub` are scripts, and what a loaded module says of itself is a file.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.host.machine import Machine
from tests.host.roles import changed, play, put, ssh, tells
from tests.tools import installed

OLD, NEW = "590.48.01", "595.45.04"
DRIVER = ("nvidia-kernel-open-dkms", "nvidia-driver-cuda", "nvidia-persistenced")
LOADED, MODULE, CONTENT = "/tmp/loaded", "/tmp/module", "/srv/content"
MODINFO = f"""#!/bin/sh
[ -s {MODULE} ] || exit 1
case "$*" in *"-F version"*) cat {MODULE} ;; *-n*) echo {MODULE} ;; esac
"""
GRUB = """#!/bin/sh
GRUB_CMDLINE_LINUX=quiet
for file in /etc/default/grub.d/*.cfg; do [ -e "$file" ] && . "$file"; done
echo "linux /vmlinuz $GRUB_CMDLINE_LINUX" >/boot/grub/grub.cfg
"""


def build(folder: Path, name: str, version: str, depends: str = "") -> None:
    """An empty package."""
    root = folder / "tree"
    (root / "DEBIAN").mkdir(parents=True, exist_ok=True)
    lines = [
        f"Package: {name}",
        f"Version: {version}",
        "Architecture: amd64",
        "Maintainer: Test <test@test.invalid>",
    ]
    lines += [f"Depends: {depends}"] if depends else []
    (root / "DEBIAN/control").write_text("\n".join([*lines, "Description: empty", ""]))
    words = [
        "dpkg-deb",
        "--build",
        "--root-owner-group",
        str(root),
        str(folder / f"{name}_{version}_amd64.deb"),
    ]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def index(folder: Path, key: Path) -> None:
    """Packages, Release and its signature, of the packages in the folder."""
    entries = []
    for deb in sorted(folder.glob("*.deb")):
        control = subprocess.run(
            ["dpkg-deb", "--field", deb], check=True, capture_output=True, text=True
        ).stdout
        hashed = sha256(deb.read_bytes()).hexdigest()
        entries.append(f"{control}Filename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {hashed}\n")
    packages = "\n".join(entries).encode()
    (folder / "Packages").write_bytes(packages)
    line = f" {sha256(packages).hexdigest()} {len(packages)} Packages"
    (folder / "Release").write_text(f"Origin: test\nDate: Mon, 01 Jan 2024 00:00:00 UTC\nSHA256:\n{line}\n")
    gpg(key, "--clearsign", "--output", str(folder / "InRelease"), str(folder / "Release"))


def gpg(home: Path, *words: str) -> str:
    """What gpg says, with a keyring of its own."""
    command = [
        "gpg",
        "--homedir",
        str(home),
        "--batch",
        "--yes",
        "--pinentry-mode",
        "loopback",
        "--passphrase",
        "",
    ]
    return subprocess.run([*command, *words], check=True, capture_output=True, text=True).stdout


class Archive:
    """A signed repository, sent to the host whenever it changes."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine, self.folder, self.home = machine, folder / "archive", folder / "gpg"
        self.folder.mkdir()
        self.home.mkdir(mode=0o700)
        gpg(self.home, "--quick-generate-key", "Test <test@test.invalid>", "rsa3072", "sign", "never")
        self.fingerprint = (
            gpg(self.home, "--list-keys", "--with-colons").split("fpr:::::::::")[1].split(":")[0]
        )
        (self.folder / "key.asc").write_text(gpg(self.home, "--armor", "--export"))

    def add(self, name: str, version: str, depends: str = "") -> None:
        build(self.folder, name, version, depends)

    def send(self) -> None:
        """Sign it and put it under CONTENT."""
        index(self.folder, self.home)
        sent = subprocess.run(
            ["tar", "-C", str(self.folder), "--exclude=tree", "-c", "."], check=True, capture_output=True
        )
        unpack = f"rm -rf {CONTENT}; mkdir -p {CONTENT} && tar -C {CONTENT} -x --no-same-owner"
        ssh(self.machine, f"{unpack} && chmod -R a+rX {CONTENT}", sent.stdout)


@pytest.fixture(scope="module")
def host(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A bare host for these tests alone; of Debian's archive it has what Ansible's apt module needs."""
    machine = Machine(engine, tmp_path_factory.mktemp("packages"))
    try:
        machine.start()
        machine.ssh("apt-get update -qq && apt-get install -qq -y python3-apt ca-certificates >/dev/null")
        machine.ssh("rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*")
        machine.ssh("mkdir -p /usr/local/bin /usr/local/sbin /boot/grub /etc/default/grub.d")
        put(machine, "/usr/local/bin/modinfo", MODINFO)
        put(machine, "/usr/local/sbin/update-grub", GRUB)
        machine.ssh("chmod +x /usr/local/bin/modinfo /usr/local/sbin/update-grub")
        yield machine
    finally:
        machine.remove()


@pytest.fixture(scope="module")
def archive(host: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archive]:
    """NVIDIA's packages in two versions, and the headers of the host's kernel."""
    installed({"gpg": "gpg", "gpg-agent": "gpg-agent", "dpkg-deb": "dpkg"})
    made = Archive(host, tmp_path_factory.mktemp("apt"))
    for version in (OLD, NEW):
        made.add("libcuda1", f"{version}-1")
        made.add("nvidia-kernel-open-dkms", f"{version}-1")
        made.add("nvidia-persistenced", f"{version}-1")
        made.add("nvidia-driver-cuda", f"{version}-1", f"libcuda1 (= {version}-1)")
    kernel, follow = host.ssh("uname -r").strip(), flavour(host)
    made.add(f"linux-headers-{kernel}", "1")
    for name in ("image", "headers"):
        made.add(f"linux-{name}-{follow}", "1")
    for version in ("1.19.0-1", "1.20.0-1"):
        made.add("nvidia-container-toolkit", version)
    made.send()
    yield made
    subprocess.run(["gpgconf", "--homedir", str(made.home), "--kill", "all"], check=True)


def flavour(host: Machine) -> str:
    """The end of the names of the packages that follow the host's kernel."""
    return host.ssh(r"uname -r | sed -E 's/^[0-9][^-]*-([0-9][^-]*-)?//'").strip()


def driver(
    host: Machine, archive: Archive, folder: Path, **variables: Any
) -> subprocess.CompletedProcess[str]:
    """What the role does before a reboot."""
    said = {
        "nvidia_driver_loaded": LOADED,
        "nvidia_driver_repository": f"file:{CONTENT}/",
        "nvidia_driver_repository_key": f"file://{CONTENT}/key.asc",
        "nvidia_driver_repository_key_fingerprint": archive.fingerprint,
        **variables,
    }
    return play(host, folder, "nvidia_driver/preflight", "nvidia_driver/install", **said)


def versions(host: Machine, *names: str) -> set[str]:
    """Which versions of packages are installed."""
    said = host.ssh(
        f"dpkg-query -W -f '${{db:Status-Status}} ${{Version}}\\n' {' '.join(names)} 2>/dev/null; true"
    )
    return {line.split()[1] for line in said.splitlines() if line.startswith("installed ")}


def load(host: Machine, version: str, built: str = "") -> None:
    """The module that the running kernel has loaded, and the one on its disk."""
    text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (test)"
    host.ssh(f"echo '{text}' >{LOADED}; echo {built or version} >{MODULE}")


def test_a_dry_run_tells_what_would_come(host: Machine, archive: Archive, tmp_path: Path) -> None:
    done = driver(host, archive, tmp_path, dry=True)
    assert changed(done) == 5, "key and list of the repository, pin, unattended upgrades, packages"
    assert f"nvidia-driver-cuda={OLD}*" in done.stdout
    assert host.ssh("find /etc/apt -name '*hearth*'") == ""


def test_a_driver_that_cannot_be_had_is_told_with_the_variables(
    host: Machine, archive: Archive, tmp_path: Path
) -> None:
    host.ssh("apt-get update -qq")
    done = driver(host, archive, tmp_path, nvidia_driver_repository="")
    tells(
        done,
        "apt knows no nvidia-kernel-open-dkms",
        "set nvidia_driver_repository and nvidia_driver_repository_key",
    )


def test_a_key_that_is_not_the_one(host: Machine, archive: Archive, tmp_path: Path) -> None:
    """Nothing of a repository is taken that another key signed."""
    tells(driver(host, archive, tmp_path, nvidia_driver_repository_key_fingerprint=40 * "A"), "not signed")
    assert versions(host, *DRIVER) == set()
    host.ssh("rm /etc/apt/sources.list.d/hearth-nvidia.list")
    done = driver(
        host,
        archive,
        tmp_path,
        nvidia_driver_repository_key_fingerprint="",
        nvidia_driver_repository_key_checksum="",
    )
    tells(done, "set nvidia_driver_repository_key, and nvidia_driver_repository_key_fingerprint or")


def test_a_driver_on_a_bare_host(host: Machine, archive: Archive, tmp_path: Path) -> None:
    host.ssh("apt-get update -qq")  # apt's lists are fresh, and don't have the new repository
    host.ssh(f"echo {OLD} >{MODULE}")
    tells(driver(host, archive, tmp_path), f"the driver {OLD} is installed and needs a reboot")
    assert versions(host, *DRIVER, "libcuda1") == {f"{OLD}-1"}, "not the newest"
    assert set(host.ssh("apt-mark showhold").split()) == set(DRIVER)
    assert versions(host, "linux-headers-$(uname -r)") == {"1"}
    tells(driver(host, archive, tmp_path), "needs a reboot")
    load(host, OLD)
    assert changed(driver(host, archive, tmp_path)) == 0


def test_a_driver_that_is_right_is_held(host: Machine, archive: Archive, tmp_path: Path) -> None:
    host.ssh("apt-mark unhold nvidia-driver-cuda")
    assert changed(driver(host, archive, tmp_path)) == 1
    assert "nvidia-driver-cuda" in host.ssh("apt-mark showhold").split()


def test_another_version_is_installed_up_and_down(host: Machine, archive: Archive, tmp_path: Path) -> None:
    for before, after in ((OLD, NEW), (NEW, OLD)):
        load(host, before, built=after)
        done = driver(host, archive, tmp_path, nvidia_driver_version=after)
        tells(done, f"the driver {after} is installed and needs a reboot")
        assert versions(host, *DRIVER, "libcuda1") == {f"{after}-1"}
        assert set(host.ssh("apt-mark showhold").split()) == set(DRIVER)


def test_a_reboot_on_the_machine_itself_is_not_tried(host: Machine, archive: Archive, tmp_path: Path) -> None:
    """The deploy would end with its own host; the handler is asked with what decides."""
    load(host, NEW, built=OLD)
    tells(
        driver(host, archive, tmp_path, nvidia_driver_may_reboot=False, allow_reboot=True), "needs a reboot"
    )


def test_no_reboot_for_a_kernel_without_the_module(host: Machine, archive: Archive, tmp_path: Path) -> None:
    load(host, NEW)
    tells(driver(host, archive, tmp_path, allow_reboot=True), f"has no NVIDIA module {OLD} (only {NEW})")


def test_a_kernel_whose_headers_are_gone_gives_way(host: Machine, archive: Archive, tmp_path: Path) -> None:
    host.ssh(f"touch /boot/vmlinuz-99.1.0-9-{flavour(host)}")
    load(host, NEW)
    try:
        tells(driver(host, archive, tmp_path), "boots next")
        assert versions(host, f"linux-image-{flavour(host)}", f"linux-headers-{flavour(host)}") == {"1"}
        archive.add(f"linux-image-{flavour(host)}", "2")
        archive.add(f"linux-headers-{flavour(host)}", "2")
        archive.send()
        tells(driver(host, archive, tmp_path), "boots next")
        assert versions(host, f"linux-image-{flavour(host)}", f"linux-headers-{flavour(host)}") == {"2"}
    finally:
        host.ssh("rm /boot/vmlinuz-*")


def test_a_driver_put_there_by_hand_stays(host: Machine, archive: Archive, tmp_path: Path) -> None:
    host.ssh(f"apt-get remove -qq -y --allow-change-held-packages {' '.join(DRIVER)} libcuda1")
    load(host, OLD)
    driver(host, archive, tmp_path)
    assert changed(driver(host, archive, tmp_path)) == 0
    assert versions(host, *DRIVER) == set()


def test_a_repository_that_the_host_has_already(host: Machine, archive: Archive, tmp_path: Path) -> None:
    """Twice the same one with two keys, and apt takes nothing any more."""
    host.ssh("mv /etc/apt/sources.list.d/hearth-nvidia.list /etc/apt/sources.list.d/their.list")
    host.ssh("sed -i 's,hearth-nvidia.asc[^ ]*],their.asc],' /etc/apt/sources.list.d/their.list")
    host.ssh("mv /etc/apt/keyrings/hearth-nvidia.asc /etc/apt/keyrings/their.asc")
    host.ssh(f"rm {LOADED}")
    tells(driver(host, archive, tmp_path), "needs a reboot")
    assert versions(host, *DRIVER) == {f"{OLD}-1"}
    assert host.try_ssh("ls /etc/apt/sources.list.d/hearth-nvidia.list").returncode != 0
    host.ssh("apt-get update -qq")


def test_a_toolkit_that_cannot_be_had(host: Machine, archive: Archive, tmp_path: Path) -> None:
    done = play(host, tmp_path, "container_runtime/preflight", container_runtime_toolkit_repository="")
    tells(
        done, "apt knows no nvidia-container-toolkit-base,", "container_runtime_toolkit_repository is empty"
    )


def test_a_pinned_package_goes_back_too(host: Machine, archive: Archive, tmp_path: Path) -> None:
    name = "nvidia-container-toolkit"
    for version in ("1.20.0-1", "1.19.0-1"):
        wanted = {"packages_wanted": [f"{name}={version}"], "packages_held": [name]}
        assert changed(play(host, tmp_path, "packages/main", **wanted)) in (1, 2)
        assert versions(host, name) == {version}
        assert changed(play(host, tmp_path, "packages/main", **wanted)) == 0


def test_what_came_to_the_archive_just_now(host: Machine, archive: Archive, tmp_path: Path) -> None:
    """Apt's lists being fresh is no reason to install from what they knew."""
    archive.add("came-just-now", "1")
    archive.send()
    assert changed(play(host, tmp_path, "packages/main", packages_wanted=["came-just-now"])) == 1


def arguments(host: Machine, folder: Path, *wanted: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Set kernel arguments."""
    said = {"host_tuning_kernel": True, "host_tuning_kernel_arguments": list(wanted), **more}
    return play(host, folder, "host_tuning/preflight", "host_tuning/arguments", **said)


def menu(host: Machine) -> str:
    return host.ssh("cat /boot/grub/grub.cfg").strip()


def test_kernel_arguments_are_told_until_the_kernel_has_them(host: Machine, tmp_path: Path) -> None:
    for _ in range(2):
        tells(
            arguments(host, tmp_path, "iommu=test"), "kernel arguments iommu=test are set and need a reboot"
        )
        assert menu(host) == "linux /vmlinuz quiet iommu=test"


def test_a_boot_menu_that_a_killed_run_left_as_it_was(host: Machine, tmp_path: Path) -> None:
    host.ssh("echo 'linux /vmlinuz quiet' >/boot/grub/grub.cfg")
    tells(arguments(host, tmp_path, "iommu=test"), "need a reboot")
    assert menu(host) == "linux /vmlinuz quiet iommu=test"


def test_kernel_arguments_that_are_withdrawn(host: Machine, tmp_path: Path) -> None:
    assert changed(arguments(host, tmp_path)) == 2
    assert menu(host) == "linux /vmlinuz quiet"
    assert changed(arguments(host, tmp_path)) == 0


def test_arguments_that_the_kernel_has(host: Machine, tmp_path: Path) -> None:
    running = host.ssh("cat /proc/cmdline").split()[-1]
    assert changed(arguments(host, tmp_path, running)) == 3, "the file, the look at the menu, the menu"
    assert changed(arguments(host, tmp_path, running)) == 0
    done = play(
        host,
        tmp_path,
        "host_tuning/verify",
        gpu="none",
        host_tuning_kernel=True,
        host_tuning_kernel_arguments=["no=such"],
    )
    tells(done, "the kernel runs without no=such")


def test_room_for_the_weights_until_they_are_there(host: Machine, tmp_path: Path) -> None:
    said = {"model_from": "fetch", "model_path": "/weights/glm", "image_ref": "no-such"}
    host.ssh("mkdir /weights && mount -t tmpfs -o size=16m full /weights && mkdir /weights/glm")
    try:
        done = play(host, tmp_path, "preflight/room", **said)
        tells(done, "0 GB free under /weights/glm, 644 GB are needed (weights 644)")
        host.ssh("touch /weights/glm/hearth-weights.json")
        assert "/weights" not in play(host, tmp_path, "preflight/room", **said).stdout
    finally:
        host.ssh("umount /weights")


def test_room_as_the_inventory_says(host: Machine, tmp_path: Path) -> None:
    assert changed(play(host, tmp_path, "preflight/room", preflight_disk_gb=1)) == 0
    done = play(host, tmp_path, "preflight/room", preflight_disk_gb=10**6)
    tells(done, "GB free under /var/lib, 1000000 GB are needed", "or set preflight_disk_gb")
