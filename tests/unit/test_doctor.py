"""`hearth doctor`: asks with a time limit, judges this host or recorded facts, tells by exit code."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hearth.cli import app
from hearth.config import parse
from hearth.errors import CheckFailed, ConfigError, MissingError
from hearth.host import collect, deep
from hearth.host.checks_base import GIB, Output, Wanted
from hearth.host.doctor import cards, gather, wanted_for
from hearth.host.probes import COMMANDS, FILES

HEALTHY = Path(__file__).parents[1] / "fixtures" / "host" / "rtx8"


def recorded(tmp_path: Path, **changes: object) -> str:
    facts: dict[str, object] = {file.stem: file.read_text() for file in HEALTHY.glob("*.txt")}
    facts |= {f.stem: {"problem": f.read_text().strip()} for f in HEALTHY.glob("*.problem")}
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(facts | changes))
    return str(path)


def test_recorded_facts(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--facts", recorded(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert document["ok"] is True
    assert {check["status"] for check in document["checks"]} == {"ok"}


def test_a_failed_check_is_told_by_table_sentence_and_exit_code(tmp_path: Path) -> None:
    facts = recorded(tmp_path, dev_char="1:1 ../mem\n")
    done = CliRunner().invoke(app, ["doctor", "--facts", facts])
    assert isinstance(done.exception, CheckFailed)
    assert str(done.exception).startswith("1 check failed: runtime.dev_char (`nvidia-ctk system")
    assert "fail  runtime.dev_char     no link to NVIDIA's devices" in done.output
    assert "why: any `systemctl daemon-reload`" in done.output


def test_what_is_skipped_says_why(tmp_path: Path) -> None:
    facts = recorded(tmp_path, lspci={"problem": "not installed"})
    done = CliRunner().invoke(app, ["doctor", "--facts", facts])
    assert "skip  pci.gpus, pci.link, pci.acs: lspci: not installed (apt install pciutils)" in done.output


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (
            ["--gpu", "many"],
            ConfigError,
            "--gpu many: neither none nor a number (write --gpu none, or --gpu 8)",
        ),
        (["--facts", "/nonexistent.json"], MissingError, "/nonexistent.json: no such file"),
        (["--config", "/nonexistent.yaml"], MissingError, "/nonexistent.yaml"),
    ],
)
def test_wrong_use(words: list[str], error: type[Exception], said: str) -> None:
    done = CliRunner().invoke(app, ["doctor", *words])
    assert isinstance(done.exception, error)
    assert said in str(done.exception)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "null"])
def test_facts_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "facts.json"
    path.write_bytes(text.encode("latin-1"))
    done = CliRunner().invoke(app, ["doctor", "--facts", str(path)])
    assert isinstance(done.exception, ConfigError)


def test_this_machine() -> None:
    """Whatever this machine is: every question is asked, nothing raises, the document is whole."""
    facts, _ = gather(Wanted(), limit=30)
    assert set(facts) == {*COMMANDS, *FILES, "disk"}
    assert facts["limits"].there
    done = subprocess.run(
        [sys.executable, "-m", "hearth", "doctor", "--gpu", "none", "--json"], capture_output=True, text=True
    )
    document = json.loads(done.stdout)
    assert done.returncode == (0 if document["ok"] else 3), done.stderr
    assert len(document["checks"]) > 20


def test_without_gpus_no_gpu_tool_is_run() -> None:
    facts, _ = gather(Wanted(gpus=0, rooms=()), limit=30)
    assert not {"nvidia_smi", "lspci", "modinfo", "kernel_log"} & set(facts)


def test_a_tool_that_hangs_is_left(tmp_path: Path) -> None:
    begin = time.monotonic()
    answer = collect.ask(("sh", "-c", "echo half; sleep 600"), limit=0.5)
    assert (answer.text, answer.problem) == ("half\n", "no answer in 0.5 s")
    assert time.monotonic() - begin < 60


def test_why_there_is_no_answer(tmp_path: Path) -> None:
    plain = tmp_path / "tool"
    plain.write_text("#!/bin/sh\n")
    assert collect.ask(("no-such-tool",)).problem == "not installed"
    assert collect.ask((str(plain),)).problem == "not allowed"
    assert collect.ask(("sh", "-c", "echo out; echo err >&2; exit 3")) == Output("out\nerr\n", 3)
    assert collect.read(str(tmp_path / "none*")).problem == "no such file"
    assert collect.read(str(tmp_path / "to*")).text == "#!/bin/sh\n"
    assert collect.nearest(str(tmp_path / "a" / "b")) == str(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o000)
    assert collect.read(str(secret)).problem == "not allowed"


@pytest.mark.parametrize(
    ("args", "count"),
    [
        ({}, 1),
        ({"tp": 8}, 8),
        ({"--tensor-parallel-size": "4", "pp_size": 2}, 8),
        ({"tp": 2, "dp": 4}, 8),
        ({"tp": 8, "dp": 8, "enable-dp-attention": True}, 8),
        ({"tp": 16, "nnodes": 2}, 8),
        ({"tp": "many"}, 1),
    ],
)
def test_cards_of_an_engine(args: dict[str, object], count: int) -> None:
    assert cards(args) == count


def test_what_is_wanted(tmp_path: Path) -> None:
    text = f"model: {{path: {tmp_path}, served_name: m}}\nengine: {{version: 0.5.23, args: {{tp: 4}}}}\n"
    wanted = wanted_for(parse(text, "test"))
    assert (wanted.gpus, wanted.rooms[0].path) == (4, str(tmp_path))
    assert wanted_for(parse(text + "profile: cpu\n", "test")).gpus == 0
    assert wanted_for(None, 2, "H200").gpu_name == "H200"
    assert wanted_for(None).gpus == 8


def test_weights_that_are_there_need_no_room(tmp_path: Path) -> None:
    text = f"model: {{path: {tmp_path}, served_name: m}}\nengine: {{version: 0.5.23}}\n"
    wanted = wanted_for(parse(text, "test"))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"x" * 1024)
    assert gather(wanted, 30)[1].rooms[0].free == 600 * GIB - 1024
    (tmp_path / "hearth-weights.json").touch()
    assert gather(wanted, 30)[1].rooms[0].free == 0


TORCH = '{"stage": "torch", "version": "2.11.0", "gpus": 8}\n'
START = '{"stage": "start", "ranks": 8, "unreachable": []}\n'
FIRST = '{"stage": "first", "wrong": 0}\n'
DONE = '{"stage": "done", "wrong": 0, "busbw": 38.5, "bytes": 268435456}\n'


@pytest.mark.parametrize(
    ("output", "status", "words"),
    [
        (Output(TORCH + START + FIRST + DONE), "ok", "8 GPUs, 38.5 GB/s bus bandwidth at 256 MiB, every sum"),
        (
            Output(TORCH + START, problem="no answer in 120 s"),
            "fail",
            "the first all-reduce over 8 GPUs: no answer",
        ),
        (Output(TORCH + START + FIRST, problem="no answer in 120 s"), "fail", "the large all-reduce over 8"),
        (Output(TORCH + START + DONE.replace('"wrong": 0', '"wrong": 7')), "fail", "7 wrong elements"),
        (Output(TORCH + START + DONE.replace("38.5", "1.2")), "warn", "1.2 GB/s"),
        (Output(TORCH + START.replace("[]", '["0->1"]') + DONE), "warn", "0->1"),
        (Output(TORCH + START + "torch.distributed.DistBackendError: NCCL error\n", 1), "fail", "NCCL error"),
        (Output(TORCH.replace("8}", "1}")), "skip", ""),
        (Output('{"stage": "torch", "missing": "No module named torch"}\n'), "skip", ""),
        (Output(problem="not installed"), "skip", ""),
        (Output("Traceback ...\nSyntaxError: no\n", 1), "skip", ""),
    ],
)
def test_verdict_on_the_cards_together(output: Output, status: str, words: str) -> None:
    check = deep.judge(output)
    assert check.status == status, check
    assert words in check.seen


@settings(deadline=None)
@given(st.lists(st.one_of(st.sampled_from([TORCH, START, FIRST, DONE, '{"stage": 3}\n', "[]\n"]), st.text())))
def test_no_output_of_the_script_raises(parts: list[str]) -> None:
    assert deep.judge(Output("".join(parts))).id == "deep.allreduce"


def test_cards_in_use_are_left_alone(tmp_path: Path) -> None:
    smi = (HEALTHY / "nvidia_smi.txt").read_text().replace("<used>0 MiB", "<used>70000 MiB", 1)
    facts = recorded(tmp_path, nvidia_smi=smi)
    done = CliRunner().invoke(app, ["doctor", "--facts", facts, "--deep", "--json"])
    last = json.loads(done.output)["checks"][-1]
    assert (last["id"], last["status"]) == ("deep.allreduce", "skip")
    assert "in use" in last["why"]
    none = CliRunner().invoke(app, ["doctor", "--facts", facts, "--deep", "--gpu", "none", "--json"])
    assert json.loads(none.output)["checks"][-1]["why"] == "gpu: none"


def test_an_interpreter_without_torch_is_skipped_with_the_reason() -> None:
    check = deep.check(sys.executable)
    assert check.status == "skip"
    assert "no torch" in check.why or "torch sees" in check.why
