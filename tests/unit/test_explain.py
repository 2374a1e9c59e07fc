"""`hearth explain`: what it reads, what it prints, what it says about a file it can't use."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from hearth.cli.explain import explain
from hearth.engine.asked import asked_arguments, asked_graphs, asked_version
from hearth.errors import ExitCode, HearthError

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
INDEX: list[dict[str, Any]] = yaml.safe_load((LOGS / "INDEX.yaml").read_text(encoding="utf-8"))
APP = typer.Typer()
APP.command()(explain)


def run(*words: str, data: bytes | None = None) -> str:
    """The printed text; the command must succeed."""
    result = CliRunner().invoke(APP, list(words), input=data, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: str, data: bytes | None = None) -> HearthError:
    """The one-line error the command raises."""
    with pytest.raises(HearthError) as caught:
        CliRunner().invoke(APP, list(words), input=data, catch_exceptions=False)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    return caught.value


def document(name: str, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(str(LOGS / name), "--json", *words))
    assert set(found) == {"failure", "next_plan"}
    return found


@pytest.mark.parametrize("row", INDEX, ids=[row["name"] for row in INDEX])
def test_json_of_every_fixture(row: dict[str, Any]) -> None:
    words = [] if row["exit_status"] is None else ["--exit-status", str(row["exit_status"])]
    found = document(row["name"], *words)
    if row["kind"] is None:
        assert found == {"failure": None, "next_plan": None}
        return
    assert list(found["failure"]) == ["kind", "phase", "axis", "evidence", "hint", "source"]
    assert found["failure"]["kind"] == row["kind"]
    if row["kind"] in ("config", "unsupported", "disk", "gpu_fault", "gpu_detached", "host_mismatch"):
        assert found["next_plan"] is None


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("graph_capture-dynamo-0.5.9.log", ("disabled", "full", 32)),
        ("graph_capture-dynamo-piecewise-0.5.11.log", ("disabled", "full", 32)),
        ("graph_capture-breakable-illegal-access-0.5.23.log", ("disabled", "full", 32)),
        ("graph_capture-decode-0.5.23.log", ("breakable", "disabled", 32)),
        ("oom-capture-decode-0.5.23.log", ("breakable", "full", 16)),
        ("oom-capture-old-0.5.9.log", ("tc_piecewise", "full", 16)),
        ("hang-capture-decode-0.5.23.log", ("breakable", "disabled", 32)),
        ("engine_killed-scheduler-sigkill-0.5.17.log", ("disabled", "full", 64)),
        ("gpu-graph_capture-decode-breakable-0.5.17.log", ("tc_piecewise", "disabled", 64)),
        ("gpu-graph_capture-raw-fp4-0.5.17.log", ("breakable", "full", 64)),
    ],
)
def test_next_plan_is_read_from_the_log(name: str, plan: tuple[str, str, int]) -> None:
    assert tuple(document(name)["next_plan"].values()) == plan


def test_next_plan_of_a_given_version_and_plan() -> None:
    words = ("--engine-version", "0.5.21", "--graphs", "tc_piecewise,full,8")
    found = document("oom-capture-hidden-0.5.17.log", *words)
    assert found["next_plan"] == {"prefill": "tc_piecewise", "decode": "full", "decode_max_bs": 4}
    assert refused(str(LOGS / INDEX[0]["name"]), "--engine-version", "9.9.9", "--graphs", "eager").code == (
        ExitCode.CONFIG
    )


def test_text_for_people() -> None:
    text = run(str(LOGS / "graph_capture-dynamo-piecewise-0.5.11.log"))
    for word in ("graph_capture", "capture_prefill", "prefill", "hearth trace", "tc_piecewise,full,32 -> "):
        assert word in text
    assert run(str(LOGS / "healthy-breakable-0.5.17.log")).startswith("healthy")
    unknown = run(str(LOGS / "unknown-exception-serving-0.5.23.log"))
    assert "look at" in unknown
    assert "IndexError: list index out of range" in unknown


def test_standard_input_gzip_and_docker(tmp_path: Path) -> None:
    data = (LOGS / "oom-load-0.5.23.log").read_bytes()
    records = [json.dumps({"log": line + "\n", "stream": "stderr"}) for line in data.decode().split("\n")]
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(data))
    (tmp_path / "docker.log").write_text("\n".join(records))
    for found in (
        run("-", "--json", data=data),
        run(str(tmp_path / "a.log.gz"), "--json"),
        run(str(tmp_path / "docker.log"), "--json"),
    ):
        assert json.loads(found)["failure"]["kind"] == "oom"


def test_a_record_cut_in_two_by_docker_is_put_together(tmp_path: Path) -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory."
    parts = ["Scheduler hit an exception:\n", text[:20], text[20:] + "\n"]
    path = tmp_path / "d.log"
    path.write_text("\n".join(json.dumps({"log": part, "stream": "stderr"}) for part in parts))
    assert json.loads(run(str(path), "--json"))["failure"]["kind"] == "oom"


def test_files_that_are_no_log(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"\n \n")
    (tmp_path / "binary").write_bytes(b"\x7fELF" + bytes(range(256)) * 40)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 100_000)[:60])
    assert refused(str(tmp_path / "none.log")).code is ExitCode.MISSING
    for name, says in (("empty", "empty"), ("binary", "not a text"), ("cut.gz", "gzip"), (".", "directory")):
        error = refused(str(tmp_path / name))
        assert error.code is ExitCode.CONFIG
        assert says in str(error)


def test_invalid_utf8_and_nul_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "odd.log"
    path.write_bytes(b"\xff\xfe\x00 noise\r\nScheduler hit an exception:\r\nCUDA out of memory\x00\r\n" * 3)
    assert json.loads(run(str(path), "--json"))["failure"]["kind"] == "oom"


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(
        "server_args={'api_key': 'topsecret1'}\nLoad weight begin\nadmin_api_key='topsecret2' x\n"
    )
    assert "topsecret" not in run(str(path))
    assert "topsecret" not in run(str(path), "--json")


ARGV = (
    "$ python -m sglang.launch_server --cuda-graph-backend-prefill tc_piecewise --cuda-graph-max-bs-decode=8"
)
OLD = (
    "server_args=ServerArgs(disable_cuda_graph=False, disable_piecewise_cuda_graph=True, "
    "enforce_piecewise_cuda_graph=False, cuda_graph_max_bs=16)"
)
NEW = (
    "server_args={'cuda_graph_backend_decode': None, 'cuda_graph_backend_prefill': None, "
    "'cuda_graph_config': {'decode': {'backend': 'full', 'max_bs': 4}, "
    "'prefill': {'backend': 'breakable', 'max_bs': 9}}}"
)


@pytest.mark.parametrize(
    ("line", "version", "plan"),
    [
        (ARGV, None, ("tc_piecewise,full", 8)),
        (
            "server_args=ServerArgs(disable_cuda_graph=True, enable_piecewise_cuda_graph=False)",
            "0.5.9",
            ("disabled,disabled", None),
        ),
        (OLD, "0.5.10", ("disabled,full", 16)),
        (NEW, "0.5.23", ("breakable,full", 4)),
        ("image lmsysorg/sglang:v0.5.6.post2 pulled", "0.5.6.post2", None),
        ("nothing", None, None),
    ],
)
def test_what_a_log_tells_of_the_asked_plan(line: str, version: str | None, plan: Any) -> None:
    arguments = asked_arguments([line])
    assert asked_version([line], arguments) == version
    assert asked_graphs(arguments) == plan
