"""`hearth launch` with a real Docker Engine: what it tells systemd, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from hearth.errors import ExitCode

from .conftest import CONFIG, NAME, Engine, Site, wait

END = 60.0


def test_ready_comes_late_and_the_status_says_why(site: Site) -> None:
    started = site.launch()
    wait(lambda: site.systemd.count("STATUS=Starting a stand-in. Phase load."), "STATUS while starting")
    site.tell("progress", "Loading shards 3/20")
    wait(
        lambda: site.systemd.count("STATUS=Starting a stand-in. Phase load: Loading shards 3/20"), "progress"
    )
    assert site.systemd.count("READY=1") == 0
    assert site.systemd.count("EXTEND_TIMEOUT_USEC=") > 0
    site.ready()
    wait(lambda: site.systemd.count("STATUS=Serving a stand-in."), "STATUS while serving")
    assert site.systemd.count("WATCHDOG=1") > 0
    started.send_signal(signal.SIGTERM)
    assert started.wait(END) == ExitCode.OK
    assert site.systemd.count("STOPPING=1") > 0
    assert (site.state / "signals").read_text() == "SIGTERM\n"
    assert "standin: bye" in site.log
    assert site.container() is None


def test_how_the_container_runs(site: Site) -> None:
    site.launch()
    site.ready()
    seen = site.container()
    assert seen is not None
    host = seen["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["RestartPolicy"]["Name"] in ("", "no")
    assert host["Init"] is False  # tini is the image's own
    assert host["PortBindings"]["9400/tcp"][0]["HostIp"] == "127.0.0.1"
    inside = site.engine.docker("exec", site.name, "cat", "/proc/1/status", "/proc/1/comm").stdout
    assert "CapEff:\t0000000000000000" in inside
    assert "NoNewPrivs:\t1" in inside
    assert inside.splitlines()[-1] == "tini"
    assert site.engine.docker("exec", site.name, "touch", "/x", check=False).returncode != 0


def test_secrets_reach_one_user_and_nothing_else(site: Site) -> None:
    secret = "correct-horse-battery"
    (site.secrets / "api_key").write_text(secret)
    said = {**CONFIG, "secrets": {"api_key_file": "/run/secrets/api_key"}}
    site.launch(release=site.add(config=said)["id"])
    site.ready()
    wait(lambda: f"uid 10001, secret of {len(secret)} characters" in site.log, "the container's first line")
    (folder,) = site.runtime.iterdir()
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, 10001)
    assert (folder / "api_key").stat().st_mode & 0o777 == 0o400
    assert secret not in str(site.container())
    assert secret not in site.log
    other = site.engine.docker(
        "exec", "--user", "1234", site.name, "cat", "/run/secrets/api_key", check=False
    )
    assert other.returncode != 0


def test_a_missing_credential_is_named(site: Site) -> None:
    said = {**CONFIG, "secrets": {"api_key_file": "/run/secrets/api_key"}}
    started = site.launch(release=site.add(config=said)["id"])
    assert started.wait(END) == ExitCode.MISSING
    assert "LoadCredential=api_key:/etc/hearth/secrets/api_key" in site.log
    assert site.container() is None


@pytest.mark.parametrize(
    ("told", "code", "word"),
    [
        (70, ExitCode.GAVE_UP, "GAVE_UP"),
        (71, ExitCode.HOST_ACTION, "host needs a person"),
        (78, ExitCode.CONFIG, "configuration"),
        (81, ExitCode.OOM, "GPU memory"),
        (0, ExitCode.RETRY, "stopped from outside"),
        (42, ExitCode.BUG, "exit code 42, which Hearth doesn't use"),
        (-signal.SIGSEGV, ExitCode.BUG, "died of SIGSEGV"),
    ],
)
def test_the_exit_code_is_the_supervisors(site: Site, told: int, code: ExitCode, word: str) -> None:
    started = site.launch()
    site.ready()
    site.tell("exit", told)
    assert started.wait(END) == code
    assert word in site.log or word == code.name
    assert site.container() is None


def test_the_supervisors_own_cause_comes_first(site: Site) -> None:
    started = site.launch()
    site.ready()
    site.tell("last", json.dumps({"state": "gave_up", "sentence": "Stopped for good: graph_capture."}))
    site.tell("exit", 70)
    assert started.wait(END) == ExitCode.GAVE_UP
    said = "Stopped for good: graph_capture. The container ended with exit code 70"
    assert said in site.log
    assert site.systemd.count(f"STATUS={said}") == 1


def test_a_last_status_of_an_earlier_start_is_not_believed(site: Site) -> None:
    site.tell("last-status.json", json.dumps({"state": "gave_up", "sentence": "Of yesterday."}))
    os.utime(site.state / "last-status.json", (1, 1))
    started = site.launch()
    site.ready()
    site.tell("exit", 70)
    assert started.wait(END) == ExitCode.GAVE_UP
    assert "yesterday" not in site.log


def test_docker_kill_is_named_and_restarted(site: Site) -> None:
    started = site.launch()
    site.ready()
    site.engine.docker("kill", site.name)
    assert started.wait(END) == ExitCode.RETRY
    assert "killed from outside Hearth" in site.log


def test_a_container_that_lost_its_gpus_is_made_again_until_it_is_too_often(site: Site) -> None:
    started = site.launch()
    site.ready()
    ids = set()
    for _ in range(3):
        before = site.container()
        assert before is not None
        ids.add(before["Id"])
        site.tell("exit", 76)
        wait(lambda before=before: (new := site.container()) and new["Id"] != before["Id"], "a new container")
    assert started.poll() is None
    assert len(ids) == 3
    wait(
        lambda: "uid 10001" in site.engine.docker("logs", site.name, check=False).stdout, "the fourth starts"
    )
    site.tell("exit", 76)
    assert started.wait(END) == ExitCode.HOST_ACTION
    assert site.systemd.count("READY=1") == 1


def test_a_removed_container_is_made_again(site: Site) -> None:
    started = site.launch()
    site.ready()
    before = site.container()
    assert before is not None
    site.engine.docker("rm", "--force", site.name)
    wait(lambda: (new := site.container()) and new["Id"] != before["Id"], "a new container")
    assert started.poll() is None


def test_a_second_signal_kills(site: Site) -> None:
    site.tell("drain", 50)
    started = site.launch()
    site.ready()
    started.send_signal(signal.SIGTERM)
    wait(lambda: "draining" in site.log, "the first signal arrives")
    begun = time.monotonic()
    started.send_signal(signal.SIGTERM)
    assert started.wait(END) == ExitCode.OK
    assert time.monotonic() - begun < 40
    assert "standin: bye" not in site.log


def test_a_drain_that_takes_too_long_is_killed(site: Site) -> None:
    site.tell("drain", 500)
    said = {**CONFIG, "limits": {"drain": 1, "kill": 1}}
    started = site.launch(release=site.add(config=said)["id"])
    site.ready()
    started.send_signal(signal.SIGTERM)
    assert started.wait(END) == ExitCode.OK
    assert "it took too long" in site.log


def test_a_leftover_is_removed_and_a_stranger_is_not(site: Site) -> None:
    first = site.launch()
    site.ready()
    old = site.container()
    assert old is not None
    first.kill()
    first.wait()
    second = site.launch()
    wait(lambda: (new := site.container()) and new["Id"] != old["Id"], "the leftover is replaced")
    assert "that an earlier start left" in site.log
    second.send_signal(signal.SIGTERM)
    assert second.wait(END) == ExitCode.OK
    site.engine.docker(
        "run", "--detach", "--name", site.name, "--entrypoint", "sleep", f"{NAME}:standin", "99"
    )
    third = site.launch()
    assert third.wait(END) == ExitCode.CONFIG
    assert "isn't Hearth's" in site.log
    assert site.container() is not None


def test_a_frozen_supervisor_gets_no_watchdog(site: Site) -> None:
    site.launch()
    site.ready()
    site.engine.docker("pause", site.name)
    time.sleep(8)
    before = site.systemd.count("WATCHDOG=1")
    time.sleep(8)
    assert site.systemd.count("WATCHDOG=1") == before
    site.engine.docker("unpause", site.name)
    wait(lambda: site.systemd.count("WATCHDOG=1") > before, "the watchdog is fed again")


def test_a_restart_of_docker_with_live_restore_is_survived(site: Site, engine: Engine) -> None:
    started = site.launch()
    site.ready()
    before = site.container()
    assert before is not None
    engine.stop()
    fed = site.systemd.count("WATCHDOG=1")
    wait(lambda: site.systemd.count("WATCHDOG=1") > fed + 1, "the watchdog is fed while Docker is down")
    engine.start()
    after = site.container()
    assert after is not None
    assert after["Id"] == before["Id"]
    assert after["State"]["StartedAt"] == before["State"]["StartedAt"]
    assert started.poll() is None
    started.send_signal(signal.SIGTERM)
    assert started.wait(END) == ExitCode.OK
    assert "standin: bye" in site.log


def test_a_restart_of_docker_without_live_restore_ends_in_a_restart(site: Site, engine: Engine) -> None:
    engine.stop()
    engine.start(live_restore=False)
    try:
        started = site.launch()
        site.ready()
        engine.stop()
        engine.start(live_restore=False)
        assert started.wait(END) == ExitCode.RETRY
    finally:
        engine.stop()
        engine.start()


def test_docker_that_comes_up_late_is_waited_for(site: Site, engine: Engine) -> None:
    release = site.add()["id"]
    engine.stop()
    try:
        started = site.launch(release=release)
        wait(lambda: site.systemd.count("STATUS=Waiting for Docker Engine"), "it says that it waits")
    finally:
        engine.start()
    site.ready()
    started.send_signal(signal.SIGTERM)
    assert started.wait(END) == ExitCode.OK


def test_no_docker_is_one_line(site: Site) -> None:
    release = site.add()["id"]
    site.address = "unix:///nonexistent/docker.sock"
    started = site.launch("--docker-wait", "0", release=release)
    assert started.wait(END) == ExitCode.UNREACHABLE
    assert "Docker Engine doesn't answer" in site.log
    assert "Traceback" not in site.log


def test_a_taken_port_is_named(site: Site) -> None:
    site.engine.docker(
        "run", "--detach", "--name", f"{site.name}-other", "--publish", f"127.0.0.1:{site.supervisor}:1",
        "--entrypoint", "sleep", f"{NAME}:standin", "99",
    )  # fmt: skip
    try:
        started = site.launch()
        assert started.wait(END) == ExitCode.PORT_IN_USE
        assert "Traceback" not in site.log
        assert site.container() is None
    finally:
        site.engine.docker("rm", "--force", f"{site.name}-other")


def test_an_image_that_went_away_is_missing(site: Site) -> None:
    release = site.add()["id"]
    path = site.releases / release / "release.json"
    said = path.read_text()
    digest = said[said.index("sha256:") :][:71]
    path.write_text(said.replace(digest, "sha256:" + "0" * 64))
    started = site.launch(release=release)
    assert started.wait(END) == ExitCode.MISSING
    assert "deploy again" in site.log
    assert "Traceback" not in site.log


def test_a_missing_folder_is_missing(site: Site) -> None:
    release = site.add()["id"]
    site.state.rename(site.folder / "elsewhere")
    started = site.launch(release=release)
    assert started.wait(END) == ExitCode.MISSING
    assert str(site.state) in site.log
    assert not site.state.exists()
