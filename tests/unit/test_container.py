"""How a container runs, as the SDK's arguments; what Docker's refusals mean; how `docker inspect` is read."""

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import requests
from docker.errors import APIError, DockerException, InvalidArgument, NotFound
from pydantic import ValidationError

from hearth.errors import ExitCode
from hearth.host.container import (
    Running,
    Wanted,
    Wiring,
    _only_file,
    arguments,
    gpu_requests,
    has_cdi,
    own_init,
    state_of,
)
from hearth.host.dockerd import EngineAway, EngineError, asking, meanings, refusal
from hearth.host.launch_plan import Gone
from hearth.host.spec import Bind, ContainerSpec, Published

SPEC = ContainerSpec(
    binds=[Bind(source="/srv/state", target="/var/lib/hearth", read_only=False)],
    ports=[
        Published(container=30000, host=30000, address="0.0.0.0"),
        Published(container=9400, host=9400),
        Published(container=9400, host=9401),
    ],
    env={"A": "b"},
)
WANTED = Wanted("hearth", "20261129T000000Z-abcdef", "sha256:1", SPEC, Path("/r/hearth.yaml"), Path("/run/s"))


@pytest.fixture
def made():
    return arguments(WANTED, Wiring(cdi=False, own_init=True))


def test_the_restrictions_stand_whatever_the_release_says(made):
    assert made["read_only"] is True
    assert made["cap_drop"] == ["ALL"]
    assert made["security_opt"] == ["no-new-privileges:true"]
    assert made["user"] == "10001:10001"
    assert made["restart_policy"] == {"Name": "no"}
    assert not {"privileged", "cap_add", "network_mode", "pid_mode", "ipc_mode", "volumes"} & made.keys()


def test_the_container_has_its_hosts_name(made):
    assert made["hostname"] == "hearth"
    known = arguments(replace(WANTED, host="gpu1"), Wiring(cdi=False, own_init=True))
    assert known["hostname"] == "gpu1"
    assert known["name"] == "hearth"


def test_mounts_are_of_what_must_exist(made):
    seen = [(m["Target"], m["Source"], m["ReadOnly"], m["Type"]) for m in made["mounts"]]
    assert seen == [
        ("/etc/hearth/hearth.yaml", "/r/hearth.yaml", True, "bind"),
        ("/run/secrets", "/run/s", True, "bind"),
        ("/var/lib/hearth", "/srv/state", False, "bind"),
    ]


def test_ports_limits_and_log(made):
    assert made["ports"] == {
        "30000/tcp": [("0.0.0.0", 30000)],
        "9400/tcp": [("127.0.0.1", 9400), ("127.0.0.1", 9401)],
    }
    assert {u["Name"]: (u["Soft"], u["Hard"]) for u in made["ulimits"]} == {
        "memlock": (-1, -1),
        "nofile": (1 << 20, 1 << 20),
        "stack": (64 << 20, 64 << 20),
    }
    assert made["shm_size"] == "32g"
    assert made["log_config"]["Config"] == {"max-size": "10m", "max-file": "2"}
    assert "uid=10001" in made["tmpfs"]["/run/hearth"]


@pytest.mark.parametrize(
    ("entry", "own"), [(["/usr/bin/tini", "--"], True), (["hearth"], False), (None, False)]
)
def test_docker_brings_an_init_where_the_image_has_none(entry, own):
    assert own_init({"Entrypoint": entry}) is own
    assert arguments(WANTED, Wiring(cdi=False, own_init=own))["init"] is not own


def test_gpus():
    assert gpu_requests("none", cdi=True) == []
    (legacy,) = gpu_requests("all", cdi=False)
    assert (legacy["Count"], legacy["Capabilities"]) == (-1, [["gpu"]])
    (cdi,) = gpu_requests("all", cdi=True)
    assert (cdi["Driver"], cdi["DeviceIDs"]) == ("cdi", ["nvidia.com/gpu=all"])


def test_cdi_is_seen_in_what_the_engine_lists_and_in_its_folders(tmp_path):
    assert has_cdi({"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]})
    assert not has_cdi({"CDISpecDirs": [str(tmp_path), "/nonexistent"]})
    (tmp_path / "other.yaml").write_text("kind: vendor.com/net")
    assert not has_cdi({"CDISpecDirs": [str(tmp_path)]})
    (tmp_path / "nvidia.yaml").write_text("cdiVersion: 0.6.0\nkind: nvidia.com/gpu\n")
    assert has_cdi({"CDISpecDirs": [str(tmp_path)]})
    assert not has_cdi({})


@pytest.mark.parametrize("row", meanings(), ids=lambda row: row.say)
def test_every_wording_of_docker_is_recognised_by_its_own_row(row):
    error = refusal(row.example)
    assert (error.code, error.hint) == (row.code, row.fix)
    assert row.say in str(error)
    assert "\n" not in str(error)


def test_an_unknown_refusal_is_tried_again():
    assert refusal("something new").code is ExitCode.RETRY


@pytest.mark.parametrize(
    ("raised", "code", "kind"),
    [
        (DockerException("Error while fetching server API version: ('Connection aborted.', "
                         "PermissionError(13, 'Permission denied'))"), ExitCode.PERMISSION, EngineError),
        (DockerException("('Connection aborted.', FileNotFoundError(2, 'No such file or directory'))"),
         ExitCode.UNREACHABLE, EngineAway),
        (requests.ConnectionError("Connection refused"), ExitCode.UNREACHABLE, EngineAway),
        (requests.ReadTimeout("Read timed out"), ExitCode.UNREACHABLE, EngineAway),
        (APIError("x", explanation="Bind for 127.0.0.1:9400 failed: port is already allocated"),
         ExitCode.PORT_IN_USE, EngineError),
    ],
)  # fmt: skip
def test_the_sdks_errors_become_ours(raised, code, kind):
    with pytest.raises(kind) as caught, asking():
        raise raised
    assert caught.value.code is code


@pytest.mark.parametrize("raised", [NotFound("gone"), InvalidArgument("a mistake of ours")])
def test_what_is_no_refusal_passes_through(raised):
    with pytest.raises(type(raised)), asking():
        raise raised


@pytest.mark.parametrize(
    ("state", "seen"),
    [
        ({"Status": "running"}, Running("172.17.0.2")),
        ({"Status": "created"}, Running("172.17.0.2")),
        ({"Status": "paused"}, Running("172.17.0.2")),
        ({"Status": "exited", "ExitCode": 76, "OOMKilled": False}, Gone(76)),
        ({"Status": "exited", "ExitCode": 137, "OOMKilled": True}, Gone(137, oom=True)),
        ({"Status": "dead", "ExitCode": 0}, Gone(0)),
        ({"Status": "removing", "ExitCode": 137}, Gone(None)),
    ],
)
def test_inspect_is_read(state, seen):
    networks = {"bridge": {"IPAddress": "172.17.0.2"}}
    assert state_of({"State": state, "NetworkSettings": {"Networks": networks}}) == seen


def test_the_one_file_of_an_archive_is_read():
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as made:
        member = tarfile.TarInfo("last-status.json")
        member.size, member.mtime = 2, 5
        made.addfile(member, io.BytesIO(b"{}"))
    assert _only_file(archive.getvalue()) == (b"{}", 5.0)


def test_a_container_without_a_network_has_no_address():
    assert state_of({"State": {"Status": "running"}}) == Running("")


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus": "some"},
        {"privileged": True},
        {"shm": "much"},
        {"binds": [{"source": "relative", "target": "/x"}]},
        {"binds": [{"source": "/a/../b", "target": "/x"}]},
        {"binds": [{"source": "/a", "target": "/run/secrets"}]},
        {"binds": [{"source": "/a", "target": "/x"}, {"source": "/b", "target": "/x"}]},
        {"ports": [{"container": 1, "host": 2}, {"container": 3, "host": 2}]},
        {"env": {"HF_TOKEN": "x"}},
        {"ports": [{"container": 0, "host": 2}]},
    ],
)
def test_what_a_release_may_not_say(wrong):
    with pytest.raises(ValidationError):
        ContainerSpec.model_validate(wrong)


@pytest.mark.parametrize(
    ("address", "reach"),
    [("0.0.0.0", "127.0.0.1:1"), ("10.0.0.5", "10.0.0.5:1"), ("::", "[::1]:1"), ("127.0.0.1", "127.0.0.1:1")],
)
def test_where_a_published_port_is_reached_from_this_host(address, reach):
    assert Published(container=1, host=1, address=address).reach == reach
