"""The role `monitoring` on a real systemd host, over SSH: bare, again, checked, secured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dockerd import DATA, own_engine
from tests.host.conftest import with_bases
from tests.host.machine import MONITORING, Machine
from tests.tools import ENGINE, installed

ROOT = Path(__file__).parents[2]
REMOVE = [{"import_role": {"name": "monitoring", "tasks_from": "remove"}}]
PLAY = [{"hosts": "all", "become": True, "gather_facts": True, "roles": [{"role": "monitoring"}]}]
BCRYPT_OF_SECRET = "$2b$04$mUHQCKpapfmrtn0EjxLXoePBD29PM2FQHKsG/85QC47GGQhC/yuxi"
Play = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A bare host, in the Engine that HEARTH_TEST_DOCKER names or in one of this module's own."""
    given = os.environ.get("HEARTH_TEST_DOCKER")
    if given:
        yield from _host(given, tmp_path_factory.mktemp("host"))
        return
    if os.geteuid() != 0:
        pytest.skip("no Docker Engine: set HEARTH_TEST_DOCKER, or run as root")
    installed(ENGINE)
    # Not the folder that the other tests use: their Engine may still run in this session.
    with own_engine(DATA.with_name(f"{DATA.name}-monitoring")) as engine:
        yield from _host(engine, tmp_path_factory.mktemp("host"))


def _host(engine: str, folder: Path) -> Iterator[Machine]:
    with_bases(engine)
    host = Machine(engine, folder)
    try:
        yield host.start()
    finally:
        host.remove()


@pytest.fixture(scope="module")
def play(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Runs the role with more variables; `check=True` only looks."""
    folder = tmp_path_factory.mktemp("play")
    inventory = {
        "ansible_host": machine.address,
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(machine.key),
    }
    inventory["ansible_ssh_common_args"] = " ".join(machine.ssh_words)
    (folder / "hosts.json").write_text(json.dumps({"all": {"hosts": {"gpu1": inventory}}}))
    (folder / "play.json").write_text(json.dumps(PLAY))
    (folder / "remove.json").write_text(
        json.dumps([{"hosts": "all", "become": True, "gather_facts": False, "tasks": REMOVE}])
    )
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible/ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    environment["ANSIBLE_ROLES_PATH"] = str(ROOT / "ansible/roles")

    def run(check: bool = False, name: str = "play", **variables: object) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / ".venv/bin/ansible-playbook"), "-i", str(folder / "hosts.json")]
        command += [str(folder / f"{name}.json"), "-e", json.dumps({"gpu": "none", **variables})]
        return subprocess.run(
            [*command, *(["--check"] if check else [])], env=environment, capture_output=True, text=True
        )

    return run


def changed(done: subprocess.CompletedProcess[str]) -> int:
    """How many tasks changed something; the run has to have gone well."""
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found = re.search(r"changed=(\d+)", done.stdout)
    assert found is not None
    return int(found[1])


def test_a_look_at_a_bare_host_changes_nothing(machine: Machine, play: Play) -> None:
    assert changed(play(check=True)) == 1
    assert machine.try_ssh("dpkg-query --show prometheus").returncode != 0
    assert changed(play(name="remove")) == 0


def test_a_bare_host_gets_it_all_and_a_second_run_changes_nothing(machine: Machine, play: Play) -> None:
    done = play()
    assert changed(done) > 10
    assert "then Dashboards, New, Import" in done.stdout
    assert set(machine.ssh(f"systemctl is-active {MONITORING}").split()) == {"active"}
    assert changed(play()) == 0
    assert changed(play(check=True)) == 0


def test_everything_listens_on_the_loopback(machine: Machine) -> None:
    listening = machine.ssh("ss -Hltn").splitlines()
    addresses = {line.split()[3] for line in listening if re.search(r":9\d\d\d$", line.split()[3])}
    assert addresses == {"127.0.0.1:9090", "127.0.0.1:9093", "127.0.0.1:9100"}


def test_rules_runbooks_and_host_metrics_are_there(machine: Machine) -> None:
    rules = [r for g in json.loads(machine.fetch("9090/api/v1/rules"))["data"]["groups"] for r in g["rules"]]
    assert len(rules) > 70
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    assert machine.fetch("9090/user/runbooks/Stuck.md").startswith("# Stuck\n")
    machine.ssh("systemctl start hearth-host-metrics.service")
    page = machine.fetch("9100/metrics")
    assert "hearth_host_gpus_on_bus 0" in page
    assert 'node_systemd_unit_state{name="hearth-host-metrics.timer",state="active"' in page


def test_units_are_sound(machine: Machine) -> None:
    units = "/etc/systemd/system/hearth-host-metrics.service /etc/systemd/system/hearth-host-metrics.timer"
    done = machine.try_ssh(f"systemd-analyze verify {units}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"monitoring_listen": "0.0.0.0"}, "monitoring_listen: 0.0.0.0 is every network"),
        ({"monitoring_listen": "192.0.2.7"}, "set monitoring_user"),
        ({"monitoring_listen": "::1"}, "monitoring_listen: ::1 is no IPv4 address"),
        ({"monitoring_receiver": "ops"}, "monitoring_receiver: ops is none of monitoring_receivers"),
        ({"monitoring_limits": {"gpus": 8}}, "monitoring_limits has to have exactly"),
        ({"monitoring_gpu_exporter": "dcgm"}, "name NVIDIA's image in monitoring_dcgm_image"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    play: Play, variables: dict[str, object], says: str
) -> None:
    done = play(**variables)
    assert done.returncode != 0
    assert says in done.stdout


def test_a_password_is_asked_for_and_alerts_go_to_the_receiver(machine: Machine, play: Play) -> None:
    secured = {
        "monitoring_user": "ops",
        "monitoring_password": "secret",
        "monitoring_password_hash": BCRYPT_OF_SECRET,
    }
    receiver = {"name": "ops", "webhook_configs": [{"url": "http://127.0.0.1:1/hook"}]}
    done = play(**secured, monitoring_receivers=[receiver], monitoring_receiver="ops")
    assert changed(done) > 0
    assert "secret" not in done.stdout.replace("[secret]", "")
    assert machine.fetch("9090/api/v1/rules").strip() == "HTTP 401"
    assert "groups" in machine.fetch("9090/api/v1/rules", "ops:secret")
    assert "receiver: ops" in machine.ssh("amtool config show --alertmanager.url=http://127.0.0.1:9093")


def test_a_removal_leaves_a_prometheus_that_neither_asks_nor_alarms(machine: Machine, play: Play) -> None:
    assert changed(play()) > 0  # without the password
    assert changed(play(name="remove")) > 0
    assert machine.try_ssh("systemctl cat hearth-host-metrics.timer").returncode != 0
    left = "prometheus prometheus-alertmanager prometheus-node-exporter"
    assert set(machine.ssh(f"systemctl is-active {left}").split()) == {"active"}
    assert "hearth_host_" not in machine.fetch("9100/metrics")
    ends = time.monotonic() + 60
    while kinds(machine) != {"recording"} and time.monotonic() < ends:
        time.sleep(1)
    assert kinds(machine) == {"recording"}
    assert json.loads(machine.fetch("9090/api/v1/alerts"))["data"]["alerts"] == []
    assert changed(play(name="remove")) == 0


def kinds(machine: Machine) -> set[str]:
    """Recording rules, alerts, or both: what Prometheus has now."""
    groups = json.loads(machine.fetch("9090/api/v1/rules"))["data"]["groups"]
    return {rule["type"] for group in groups for rule in group["rules"]}
