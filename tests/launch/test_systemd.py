"""hearth.service on a real systemd host with Docker Engine inside; the container's supervisor is a stand-in.

The host is the one of tests/host. Hearth runs there from this checkout, mounted, with the host's own Python.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from tests.host.conftest import with_bases
from tests.host.machine import Machine

from .conftest import CONFIG, HERE, NAME, ROOT, Engine, wait

LONG = 180.0
UNIT = ROOT / "ansible/roles/hearth/templates/hearth.service.j2"
PROGRAM = """#!/bin/sh
export PYTHONPATH=/opt/hearth/app:/opt/hearth/site
exec /usr/bin/python3 -m hearth "$@"
"""
# systemd hands credentials over by a mount that has to reach its own namespace. On a machine it makes the
# root shared for that by itself; in a container it leaves the root as Docker made it: private.
SHARED = """[Unit]
DefaultDependencies=no
Before=sysinit.target
[Service]
Type=oneshot
ExecStart=/bin/mount --make-rshared /
[Install]
WantedBy=sysinit.target
"""
SECRET = "correct-horse-battery"


class Host:
    """A machine with Docker, Hearth's unit, and releases of the stand-in."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def run(self, command: str) -> str:
        return self.machine.ssh(command)

    def put(self, path: str, text: str, mode: str = "644") -> None:
        folder = shlex.quote(str(Path(path).parent))
        words = ["ssh", *self.machine.ssh_words, "-i", str(self.machine.key), f"root@{self.machine.address}"]
        command = f"mkdir -p {folder} && cat > {shlex.quote(path)} && chmod {mode} {shlex.quote(path)}"
        subprocess.run([*words, command], input=text, text=True, check=True)

    def tell(self, name: str, text: str | None) -> None:
        path = f"/var/lib/hearth/state/{name}"
        if text is None:
            self.run(f"rm -f {path}")
        else:
            self.put(path, text)

    def hearth(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.machine.try_ssh(f"/opt/hearth/bin/hearth {shlex.join(words)}")

    def show(self, name: str) -> str:
        return self.run(f"systemctl show --value --property={name} hearth").strip()

    def until(self, name: str, value: str) -> None:
        wait(lambda: self.show(name) == value, f"{name}={value}\n{self.journal()[-3000:]}", LONG)

    def journal(self) -> str:
        return self.run("journalctl --no-pager --output=cat --identifier=hearth --unit=hearth | tail -n 60")

    def container(self) -> str:
        return self.run("docker ps --quiet --no-trunc --filter label=io.hearth.unit=hearth").strip()

    def add(self, word: str, **draft: Any) -> str:
        binds = [
            {"source": "/var/lib/hearth/state", "target": "/var/lib/hearth", "read_only": False},
            {"source": "/opt/standin", "target": "/standin"},
        ]
        ports = [{"container": 9400, "host": 9400}, {"container": 30000, "host": 30000, "address": "0.0.0.0"}]
        said = {
            "image": {"ref": f"{NAME}:standin"},
            "container": {
                "gpus": "none",
                "shm": "64m",
                "binds": binds,
                "ports": ports,
                "env": {"WORD": word},
            },
            "smoke": {"stream": {"min_chunks": 2}, "long_prompt": {"words": 50}, "timeout": 30},
            "ready_within": 120,
            **draft,
        }
        config = {**CONFIG, "secrets": {"api_key_file": "/run/secrets/api_key"}}
        self.put("/var/lib/hearth/staging/release.json", json.dumps(said))
        self.put("/var/lib/hearth/staging/hearth.yaml", yaml.safe_dump(config))
        done = self.hearth("release", "add", "/var/lib/hearth/staging", "--json")
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["id"])

    def activate(self, release: str) -> dict[str, Any]:
        done = self.hearth("release", "activate", release, "--json")
        assert done.stdout, done.stderr + self.journal()
        said: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if said["ok"] else 3)
        return said

    def serves(self) -> None:
        """A proven release runs; whatever the last test told the stand-in is forgotten."""
        for name in ("answer", "exit", "drain", "progress"):
            self.tell(name, None)
        self.tell("ready", "1")
        self.run("systemctl reset-failed hearth || true; systemctl start hearth")
        self.until("ActiveState", "active")


@pytest.fixture(scope="module")
def host(engine: Engine, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The host, set up by hand as the roles do it: Docker, folders, a secret, the unit."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip(
            "the test host's Python is 3.11, and runs this environment's packages: use that version here"
        )
    with_bases(engine.address)
    site = sysconfig.get_path("purelib")
    mounts = ("--volume", f"{ROOT}/app:/opt/hearth/app:ro", "--volume", f"{site}:/opt/hearth/site:ro")
    machine = Machine(engine.address, tmp_path_factory.mktemp("systemd"), options=mounts)
    made = Host(machine)
    try:
        machine.start()
        _set_up(made, engine)
        yield made
        print(made.journal())
    finally:
        machine.remove()


def _set_up(host: Host, engine: Engine) -> None:
    host.put("/etc/docker/daemon.json", json.dumps({"live-restore": True}))
    host.run(
        "apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "
        "docker.io >/dev/null"
    )
    saved = subprocess.Popen(
        ["docker", "--host", engine.address, "save", f"{NAME}:standin"], stdout=subprocess.PIPE
    )
    words = ["ssh", *host.machine.ssh_words, "-i", str(host.machine.key), f"root@{host.machine.address}"]
    subprocess.run([*words, "docker load --quiet"], stdin=saved.stdout, check=True, stdout=subprocess.DEVNULL)
    assert saved.wait() == 0
    host.put("/etc/systemd/system/shared-root.service", SHARED)
    host.run("systemctl enable --now shared-root 2>&1")
    host.put("/opt/hearth/bin/hearth", PROGRAM, "755")
    host.put("/opt/standin/supervisor.py", (HERE / "supervisor.py").read_text())
    host.put("/etc/hearth/secrets/api_key", SECRET, "600")
    host.run("chmod 700 /etc/hearth/secrets; install -d -o 10001 -m 750 /var/lib/hearth/state")
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
    unit = environment.from_string(UNIT.read_text())
    host.put(
        "/etc/systemd/system/hearth.service",
        unit.render(
            hearth_secrets={"api_key": ""}, hearth_watchdog_seconds=20, hearth_start_seconds=60
        ).replace("RestartSec=10", "RestartSec=2"),
    )
    host.run("systemctl daemon-reload && systemctl enable hearth 2>&1")


def test_systemd_has_nothing_against_the_unit(host: Host) -> None:
    done = host.machine.try_ssh("systemd-analyze verify /etc/systemd/system/hearth.service")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_start_waits_for_ready_and_says_what_goes_on(host: Host) -> None:
    first = host.add("first")
    host.run(f"ln -sfn {first} /var/lib/hearth/releases/current")
    host.tell("progress", "Loading shards 3/20")
    host.run("systemctl start --no-block hearth")
    host.until("StatusText", "Starting a stand-in. Phase load: Loading shards 3/20.")
    assert host.show("ActiveState") == "activating"
    host.tell("ready", "1")
    host.until("ActiveState", "active")
    host.until("StatusText", "Serving a stand-in.")
    assert host.show("NRestarts") == "0"


def test_secrets_come_as_a_file_and_nowhere_else(host: Host) -> None:
    host.serves()
    assert f"uid 10001, secret of {len(SECRET)} characters" in host.journal()
    assert SECRET not in host.run(f"docker inspect {host.container()}")
    assert SECRET not in host.run(
        "systemctl show hearth; cat /proc/$(systemctl show --value -p MainPID hearth)/environ"
    )
    assert SECRET not in host.run("journalctl --no-pager")
    assert host.run("stat --file-system --format=%T /run/hearth").strip() == "tmpfs"


def test_the_first_activation_of_what_runs_unproven_restarts_and_proves_it(host: Host) -> None:
    host.serves()
    (current,) = json.loads(host.hearth("release", "list", "--json").stdout)["releases"]
    assert (current["state"], current["proven"]) == ("current", False)
    report = host.activate(current["id"])
    assert report["ok"] is True
    assert [check["name"] for check in report["checks"]] == ["prompt 1", "stream", "long prompt"]
    again = host.activate(current["id"])
    assert (again["ok"], again["changed"]) == (True, False)


def test_daemon_reload_loses_nothing(host: Host) -> None:
    host.serves()
    before = (host.container(), host.show("InvocationID"))
    host.run("systemctl daemon-reload")
    assert (host.container(), host.show("InvocationID"), host.show("ActiveState")) == (*before, "active")


def test_stop_is_graceful(host: Host) -> None:
    host.serves()
    host.tell("drain", "2")
    host.run("systemctl stop hearth")
    assert host.show("ActiveState") == "inactive"
    assert "standin: bye" in host.journal()
    assert host.run("docker ps --all --quiet").strip() == ""


def test_a_killed_launcher_leaves_no_container_and_comes_back(host: Host) -> None:
    host.serves()
    before = host.container()
    host.run("kill -9 $(systemctl show --value -p MainPID hearth)")
    wait(lambda: host.container() not in ("", before), "a new container", LONG)
    host.until("ActiveState", "active")
    assert len(host.run("docker ps --all --quiet").split()) == 1


def test_docker_kill_is_restarted(host: Host) -> None:
    host.serves()
    before = host.container()
    host.run(f"docker kill {before}")
    wait(lambda: host.container() not in ("", before), "a new container", LONG)
    host.until("ActiveState", "active")
    assert "killed from outside Hearth" in host.journal()


def test_a_frozen_supervisor_is_restarted_by_the_watchdog(host: Host) -> None:
    host.serves()
    before = host.container()
    host.run("pkill -STOP -f /standin/supervisor.py")
    wait(lambda: host.container() not in ("", before), "a new container", LONG)
    host.until("ActiveState", "active")
    assert "watchdog" in host.run("journalctl --no-pager --unit=hearth")


def test_a_start_that_does_not_advance_is_given_up_and_tried_again(host: Host) -> None:
    host.run("systemctl stop hearth")
    host.tell("ready", None)
    host.run("systemctl reset-failed hearth || true; systemctl start --no-block hearth")
    wait(lambda: host.container(), "a container", LONG)
    host.run("pkill -STOP -f /standin/supervisor.py")
    wait(lambda: host.show("NRestarts") not in ("", "0"), "systemd starts it again", 2 * LONG)
    host.run("pkill -CONT -f /standin/supervisor.py || true")


def test_docker_restarts_under_it(host: Host) -> None:
    host.serves()
    before = (host.container(), host.show("InvocationID"))
    host.run("systemctl restart docker")
    wait(lambda: host.container() == before[0], "the same container", LONG)
    assert (host.show("InvocationID"), host.show("ActiveState")) == (before[1], "active")
    host.run("systemctl stop hearth")
    assert "standin: bye" in host.journal()


def test_a_bad_config_is_not_restart_looped(host: Host) -> None:
    host.serves()
    host.run("systemctl stop hearth")
    host.run("cp -a /var/lib/hearth/releases/current/release.json /root/kept")
    host.run("echo '{' > /var/lib/hearth/releases/current/release.json")
    assert host.machine.try_ssh("systemctl start hearth").returncode != 0
    seen = [host.show(name) for name in ("ActiveState", "NRestarts", "ExecMainStatus")]
    assert seen == ["failed", "0", "78"]
    assert "release.json: not JSON" in host.journal()
    host.run("cp -a /root/kept $(readlink -f /var/lib/hearth/releases/current)/release.json")


def test_a_release_that_answers_wrong_goes_back_by_itself(host: Host) -> None:
    host.serves()
    old = json.loads(host.hearth("release", "list", "--json").stdout)["current"]
    smoke = {"prompts": [{"prompt": "The capital of Italy is", "expect": "Milan"}], "long_prompt": None}
    report = host.activate(host.add("wrong", smoke=smoke))
    assert (report["ok"], report["rolled_back"], report["rolled_back_to"]) == (False, True, old)
    assert "expected 'Milan'" in report["reason"]
    assert report["downtime_s"] > 0
    listed = json.loads(host.hearth("release", "list", "--json").stdout)
    assert listed["current"] == old
    assert host.show("ActiveState") == "active"


def test_a_release_that_cannot_start_goes_back_by_itself(host: Host) -> None:
    host.serves()
    old = json.loads(host.hearth("release", "list", "--json").stdout)["current"]
    container = {
        "gpus": "all",
        "binds": [],
        "ports": [{"container": 9400, "host": 9400}, {"container": 30000, "host": 30000}],
    }
    report = host.activate(host.add("no gpu", container=container))
    assert (report["ok"], report["rolled_back"], report["rolled_back_to"]) == (False, True, old)
    assert "MISSING" in report["reason"]
    assert host.show("ActiveState") == "active"


def test_a_release_whose_engine_gives_up_goes_back_and_names_the_cause(host: Host) -> None:
    host.serves()
    old = json.loads(host.hearth("release", "list", "--json").stdout)["current"]
    cause = "Stopped for good: graph_capture in capture_decode."
    host.tell("last", json.dumps({"state": "gave_up", "sentence": cause}))
    host.tell("exit-at-start", "70")
    report = host.activate(host.add("gives up"))
    host.tell("last", None)
    assert (report["ok"], report["rolled_back"], report["rolled_back_to"]) == (False, True, old)
    assert report["reason"].startswith(cause)
    assert "GAVE_UP" in report["reason"]
    assert host.show("ActiveState") == "active"


def test_a_good_release_a_rollback_and_a_prune(host: Host) -> None:
    host.serves()
    old = json.loads(host.hearth("release", "list", "--json").stdout)["current"]
    new = host.add("new")
    report = host.activate(new)
    assert report["ok"] is True
    assert report["downtime_s"] > 0
    back = json.loads(host.hearth("release", "rollback", "--json").stdout)
    assert (back["ok"], back["id"]) == (True, old)
    listed = json.loads(host.hearth("release", "list", "--json").stdout)
    assert (listed["current"], listed["previous"]) == (old, new)
    pruned = json.loads(host.hearth("release", "prune", "--keep", "1", "--json").stdout)
    assert set(pruned["kept"]) >= {old, new}
    assert len(pruned["removed"]) == 3
    tags = host.run("docker image ls --format '{{.Tag}}' hearth-release").split()
    assert sorted(tags) == sorted(pruned["kept"])


def test_a_reboot_brings_it_back(host: Host) -> None:
    host.serves()
    host.machine.restart()
    host.until("ActiveState", "active")
    assert json.loads(host.hearth("release", "smoke", "--json").stdout)["ok"] is True
