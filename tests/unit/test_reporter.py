"""What is kept and told of a failure, and that no trouble with it stops a recovery."""

import asyncio
import json
import threading
import time

import pytest

from hearth import reporter as module
from hearth.aside import in_thread
from hearth.board import Board
from hearth.bundle import Snapshot, Story
from hearth.config import parse
from hearth.errors import ExitCode, MissingError, StateError
from hearth.failure import Axis, Failure, FailureKind, Phase
from hearth.ladder import GraphPlan
from hearth.policy import Action, Decision
from hearth.reporter import Reporter
from tests.unit.test_notify_webhook import receiver

KEY = "Zx9-planted-Key!q7"
TOKEN = "T0kenInThePath42"
WANTED, LOWER = GraphPlan("breakable", "full", 32), GraphPlan("disabled", "full", 32)
FAILURE = Failure(
    FailureKind.GRAPH_CAPTURE, Phase.CAPTURE_PREFILL, Axis.PREFILL, (f"api_key='{KEY}' {KEY}",), "hint", "sig"
)
STEP = Decision(Action.STEP_DOWN, LOWER, 0.0, ExitCode.OK, "step down")
RESTART = Decision(Action.RESTART, WANTED, 5.0, ExitCode.OK, "again")
STOP = Decision(Action.STOP, None, 0.0, ExitCode.GAVE_UP, "no step is left")
SEEN = (Snapshot(1795989406.5, {}, "k", ""), Story([("init", [f"--api-key {KEY}"])], {"init": 1.0}))


def make(tmp_path, notify="{}", secrets=(KEY,)):
    config = parse(
        "model: {path: /m, served_name: s}\nengine: {version: 0.5.23, python: /nonexistent/python}\n"
        f"paths: {{state: {tmp_path}/state}}\nnotify: {notify}\n",
        "f",
    )
    return Reporter(config, {str(n): value for n, value in enumerate(secrets)})


def board():
    return Board(wanted=WANTED, plan=WANTED)


def url_file(tmp_path, port):
    path = tmp_path / "url"
    path.write_text(f"http://127.0.0.1:{port}/{TOKEN}")
    return path


async def test_a_step_down_is_kept_and_told_and_no_secret_is_in_either(tmp_path, caplog):
    async with receiver() as (port, got):
        reporter = make(tmp_path, f"{{url_file: {url_file(tmp_path, port)}}}")
        with caplog.at_level("INFO", "hearth"):
            name = await reporter.report(board(), FAILURE, STEP, [], SEEN)
            await reporter.close(hurry=False)
    ((path, _, body),) = got
    assert path == f"/{TOKEN}"
    document = json.loads(body)
    assert document["event"] == "step_down"
    assert document["bundle"] == name
    assert document["failure"]["kind"] == "graph_capture"
    assert document["plan"] == {
        "wanted": WANTED.to_json(),
        "failed": WANTED.to_json(),
        "next": LOWER.to_json(),
    }
    assert document["exit_code"] is None
    assert document["text"].startswith("Stepped down to ")
    kept = tmp_path / "state/failures" / name
    texts = [file.read_text() for file in kept.iterdir()]
    assert len(texts) == 8
    for text in (*texts, body, caplog.text):
        assert KEY not in text
        assert TOKEN not in text


async def test_giving_up_and_serving_again_are_told_and_a_restart_is_not(tmp_path):
    async with receiver() as (port, got):
        reporter = make(tmp_path, f"{{url_file: {url_file(tmp_path, port)}}}")
        await reporter.report(board(), FAILURE, RESTART, [], SEEN)
        reporter.ready_again(board(), 12.34)
        await reporter.close(hurry=False)
        await reporter.report(board(), FAILURE, STOP, [], SEEN)
        await reporter.close(hurry=False)
    ready, end = (json.loads(body) for _, _, body in got)
    assert (ready["event"], ready["downtime_seconds"], ready["failure"]["kind"]) == (
        "ready_again",
        12.3,
        "graph_capture",
    )
    assert (end["event"], end["exit_code"], end["plan"]["next"]) == ("give_up", 70, None)
    assert set(ready) == set(end), "one shape for all"


async def test_events_that_nobody_wants_are_not_told(tmp_path):
    async with receiver() as (port, got):
        reporter = make(tmp_path, f"{{url: 'http://127.0.0.1:{port}/', events: [give_up]}}")
        await reporter.report(board(), FAILURE, STEP, [], SEEN)
        reporter.ready_again(board(), 1.0)
        await reporter.close(hurry=False)
    assert got == []


def test_the_documented_shape_is_the_one_that_is_sent(tmp_path):
    from tests.unit.test_config import ROOT

    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8").partition("## The webhook")[2]
    keys = {"schema", "event", *module._sender(make(tmp_path)._config)}
    keys |= set(module.ready_document(board(), None, 0.0))
    rows = [line for line in page.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in row.split("|")[1].replace("`", "").split(", ")}
    assert {name.strip() for name in documented} - {"step_down", "give_up", "ready_again"} == keys


async def test_a_disk_that_refuses_is_said_once_and_again_after_it_worked(tmp_path, caplog, monkeypatch):
    reporter = make(tmp_path)
    write = reporter._store.write

    def full(*_):
        raise StateError("/x: a failure bundle can't be written: No space left on device", "check free space")

    monkeypatch.setattr(reporter._store, "write", full)
    assert await reporter.report(board(), FAILURE, STEP, [], SEEN) == ""
    assert await reporter.report(board(), FAILURE, STEP, [], SEEN) == ""
    assert caplog.text.count("No space left on device (check free space); the recovery goes on without") == 1
    monkeypatch.setattr(reporter._store, "write", write)
    assert await reporter.report(board(), FAILURE, STEP, [], SEEN)
    monkeypatch.setattr(reporter._store, "write", full)
    assert await reporter.report(board(), FAILURE, STEP, [], SEEN) == ""
    assert caplog.text.count("No space left on device") == 2


async def test_a_disk_that_hangs_and_a_bug_do_not_stop_a_recovery(tmp_path, caplog, monkeypatch):
    reporter = make(tmp_path)
    release = threading.Event()
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.1)
    monkeypatch.setattr(reporter._store, "write", lambda *_: release.wait(60))
    assert await reporter.report(board(), FAILURE, STEP, [], SEEN) == ""
    release.set()
    assert "no failure bundle was written within 0.1 s" in caplog.text
    monkeypatch.setattr(module, "WRITE_SECONDS", 60)
    monkeypatch.setattr(module, "bundle_files", lambda *_: 1 / 0)
    assert await reporter.report(board(), FAILURE, STEP, [], SEEN) == ""
    assert "could not be made" in caplog.text


async def test_a_gpu_that_does_not_answer_does_not_hold_the_kill_up(tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(module, "gpu_snapshot", lambda: release.wait(60))
    monkeypatch.setattr(module, "kernel_text", lambda: 1 / 0)
    seen = await make(tmp_path).look(FAILURE, [])
    release.set()
    assert seen.gpu == {"gpus": [], "problem": "NVML: no answer within 0.1 s"}
    assert "ZeroDivisionError" in seen.kernel
    assert seen.stacks == "", "only a hang has stacks"
    assert abs(seen.at - time.time()) < 3600


def test_a_webhook_that_can_not_be_read_is_an_error_at_the_start(tmp_path):
    with pytest.raises(MissingError, match=r"notify\.url_file"):
        make(tmp_path, "{url_file: /nonexistent/url}")


async def test_in_thread_gives_the_value_the_error_or_up():
    assert await in_thread(lambda: 5, 60) == 5
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0, 60)
    release = threading.Event()
    with pytest.raises(TimeoutError):
        await in_thread(lambda: release.wait(60), 0.05)
    release.set()
    await asyncio.sleep(0)
