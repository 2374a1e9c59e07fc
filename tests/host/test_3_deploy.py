"""A bare host becomes an endpoint: killed half way, repeated, watched; then a second and a dry run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.error
from dataclasses import dataclass

import pytest

from hearth.errors import ExitCode
from tests.host.machine import Machine
from tests.host.operating import KEY, LIMIT, Operator


@dataclass
class Watched:
    """What was seen while the deploy ran: the unit's states and sentences in order, the second deploy."""

    code: int
    output: str
    states: list[tuple[str, str]]
    second: subprocess.CompletedProcess[str]


def start(operator: Operator) -> subprocess.Popen[str]:
    """`hearth deploy` in the background, in a session of its own."""
    words = operator.command("deploy", str(operator.inventory), "--config", str(operator.config))
    return subprocess.Popen(
        words,
        cwd=operator.root,
        env=operator.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def killed_half_way(operator: Operator, machine: Machine) -> None:
    """A deploy whose machine loses power: killed while it installs Hearth's dependencies."""
    running = start(operator)
    ends = time.monotonic() + LIMIT
    while machine.try_ssh("test -e /opt/hearth/venvs/*/bin/pip").returncode != 0:
        assert running.poll() is None, running.stdout.read() if running.stdout else ""
        assert time.monotonic() < ends
        time.sleep(2)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()


@pytest.fixture(scope="module")
def watched(operator: Operator, machine: Machine, image: str) -> Watched:
    """The deploy: after one that was killed, with a second one tried meanwhile."""
    killed_half_way(operator, machine)
    assert "hearth deploy" not in machine.ssh("cat /var/lib/hearth-deploy.lock"), (
        "the lock says who, not the command"
    )
    running = start(operator)
    states: list[tuple[str, str]] = []
    second = None
    while running.poll() is None:
        said = operator.unit("ActiveState", "StatusText")
        state = (said.get("ActiveState", ""), said.get("StatusText", ""))
        if state not in states[-1:]:
            states.append(state)
        # The killed one's lock is still there at first: whoever comes then takes it over.
        held = machine.ssh("cat /var/lib/hearth-deploy.lock 2>/dev/null; true")
        if second is None and f'"pid": {running.pid}' in held:
            second = operator.deploy()
        time.sleep(3)
    output = running.stdout.read() if running.stdout else ""
    assert second is not None
    return Watched(running.returncode, output, states, second)


def test_it_ends_well_after_the_killed_one(watched: Watched) -> None:
    assert watched.code == 0, watched.output
    assert "is taken over: its process" in watched.output
    assert "deploy ok in" in watched.output


def test_two_at_once(watched: Watched) -> None:
    said = watched.second.stdout + watched.second.stderr
    assert watched.second.returncode == ExitCode.RETRY, said
    assert "gpu1 is held by" in said
    assert "Traceback" not in said


def test_an_answer_streams_to_who_has_the_key(watched: Watched, operator: Operator) -> None:
    assert len(operator.ask()) > 3
    with pytest.raises(urllib.error.HTTPError, match="401"):
        operator.ask(key=None)


def test_the_key_is_in_no_argument_log_or_environment(watched: Watched, machine: Machine) -> None:
    for place in (
        "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ",
        "journalctl --no-pager",
        "docker inspect hearth",
        "cat /var/lib/hearth/releases/*/*",
    ):
        # What looks has the pattern in its own arguments: the pattern doesn't match itself.
        found = machine.ssh(f"{place} 2>/dev/null | tr '\\0' '\\n' | grep -c '[{KEY[0]}]{KEY[1:]}'; true")
        assert found.strip() == "0", place


def test_systemd_heard_of_the_start(watched: Watched, operator: Operator) -> None:
    """READY came late, with sentences before it; afterwards the watchdog is fed."""
    starting = [text for state, text in watched.states if state == "activating" and text]
    assert starting, watched.states
    assert watched.states[-1][0] == "active"
    first = operator.unit("WatchdogTimestampMonotonic", "WatchdogUSec", "NotifyAccess", "Type")
    assert (first["Type"], first["NotifyAccess"], first["WatchdogUSec"]) == ("notify", "main", "20s")
    time.sleep(15)
    assert (
        operator.unit("WatchdogTimestampMonotonic")["WatchdogTimestampMonotonic"]
        > first["WatchdogTimestampMonotonic"]
    )


def test_the_planted_fault_was_stepped_down(watched: Watched, operator: Operator) -> None:
    said = operator.status()
    assert said["plan"]["wanted"]["prefill"] == "breakable"
    assert said["plan"]["effective"]["prefill"] == "disabled"
    assert said["failures"][0]["kind"] == "graph_capture"


def test_a_second_run_changes_nothing(watched: Watched, operator: Operator) -> None:
    """And `make` is all that a checkout needs."""
    before = operator.unit("MainPID")
    done = operator.make("deploy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (operator.root / ".venv/bin/hearth").exists()
    changed = [task for task in operator.record()["tasks"] if task["status"] == "changed"]
    assert changed == []
    assert operator.unit("MainPID") == before


def test_a_dry_run_on_the_deployed_host(watched: Watched, operator: Operator) -> None:
    done = operator.deploy("--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu1: would change 0" in done.stdout
    config = operator.write_config("other.yaml", limits={"stall": 77})
    done = operator.deploy("--check", config=config)
    assert "gpu1: would change 1" in done.stdout
    assert "hearth: What a new release would change" in done.stdout


def test_the_record_of_the_run(watched: Watched, operator: Operator) -> None:
    said = operator.record()
    assert said["action"] == "deploy"
    assert said["hosts"] == ["gpu1"]
    assert os.path.getsize(said["log"]) > 1000  # noqa: PTH202
    folder = os.path.dirname(str(said["log"]))  # noqa: PTH120
    assert (
        not shutil.which("grep")
        or KEY not in subprocess.run(["grep", "-rl", KEY, folder], capture_output=True, text=True).stdout
    )


def test_what_the_test_machine_does_not_prove(watched: Watched, machine: Machine) -> None:
    """Limits that this machine can't grant were asked for, and taken out by the test host alone."""
    asked = machine.ssh("cat /run/runc-shim.log 2>/dev/null; true")
    assert not asked or "RLIMIT_MEMLOCK" in asked


def test_releases_and_status(watched: Watched, operator: Operator) -> None:
    said = operator.hearth("releases", str(operator.inventory))
    assert "current" in said.stdout, said.stderr
    looked = operator.hearth("host", "status", str(operator.inventory))
    assert "ActiveState=active" in looked.stdout, looked.stderr
    logs = operator.hearth("host", "logs", str(operator.inventory), "--lines", "2000")
    assert "Serving tiny" in logs.stdout
    doctor = operator.hearth("host", "doctor", str(operator.inventory), "--json")
    assert doctor.returncode in (ExitCode.OK, ExitCode.CHECK_FAILED), doctor.stderr
    assert '"checks"' in doctor.stdout
