"""A bundle's files: what they say, and that nothing secret is in them."""

import json

import yaml

from hearth.bundle import Plans, Report, Snapshot, Story, bundle_files, utc
from hearth.config import parse
from hearth.engine.redact import Redactor
from hearth.errors import ExitCode
from hearth.failure import Axis, Failure, FailureKind, Phase
from hearth.ladder import GraphPlan
from hearth.policy import Action, Decision, Event

KEY = "Zx9-planted-Key!q7"
WANTED, LOWER = GraphPlan("breakable", "full", 32), GraphPlan("disabled", "full", 32)
STEP = Decision(Action.STEP_DOWN, LOWER, 0.0, ExitCode.OK, "step down from A to B")
CONFIG = f"""
model: {{path: /m, served_name: s}}
engine:
  version: 0.5.23
  args: {{hf-overrides: '{{"api_key": "{KEY}"}}'}}
  env: {{PROXY: "http://user:{KEY}@proxy:3128", PLAIN: "{KEY}"}}
notify: {{url: "https://hooks.example/services/{KEY}"}}
"""


def report(decision=STEP, line="boom", **more):
    failure = Failure(
        FailureKind.GRAPH_CAPTURE, Phase.CAPTURE_PREFILL, Axis.PREFILL, (line,), "a hint", "sig"
    )
    story = Story(
        sections=[("init", ["one", line]), ("capture_prefill", ["two"])],
        seconds={"init": 1.23456, "capture_prefill": 2.0},
        phase=Phase.CAPTURE_PREFILL,
        silent=0.5,
        argv=("python3", "-m", "sglang", "--json", '{"a": 1}'),
    )
    facts = {
        "plans": Plans(WANTED, WANTED, LOWER, ("prefill: asked for breakable, runs disabled",)),
        "snapshot": Snapshot(1795989406.5, {"gpus": []}, "kernel line\n", ""),
        "events": (Event(0.0, failure, WANTED, True),),
        "versions": {"hearth": "1"},
        "config": parse(CONFIG, "f").model_dump(mode="json"),
    }
    return Report(failure=failure, decision=decision, story=story, **{**facts, **more})


def files(*args, secrets=(), **more):
    return bundle_files(report(*args, **more), Redactor(secrets))


def test_failure_json_says_what_happened_and_what_was_done():
    document = json.loads(files()["failure.json"])
    assert document == {
        "schema": 1,
        "at": 1795989406.5,
        "time": "2026-11-29T21:56:46.500Z",
        "kind": "graph_capture",
        "phase": "capture_prefill",
        "axis": "prefill",
        "evidence": ["boom"],
        "hint": "a hint",
        "source": "sig",
        "sentence": "graph_capture in capture_prefill: boom",
        "action": "step_down",
        "done": "step down from A to B",
        "plan": {"prefill": "breakable", "decode": "full", "decode_max_bs": 32},
        "next_plan": {"prefill": "disabled", "decode": "full", "decode_max_bs": 32},
        "wait_seconds": 0.0,
        "exit_code": None,
        "exit_meaning": None,
        "restarts_before": 0,
    }
    assert Failure.from_json(document).kind is FailureKind.GRAPH_CAPTURE


def test_a_stop_has_its_exit_code():
    document = json.loads(
        files(Decision(Action.STOP, None, 0.0, ExitCode.GAVE_UP, "no step"))["failure.json"]
    )
    assert (document["next_plan"], document["exit_code"]) == (None, 70)
    assert document["exit_meaning"] == ExitCode.GAVE_UP.meaning


def test_the_other_files():
    found = files()
    assert found["log.txt"] == "== init, 1.2 s\none\nboom\n\n== capture_prefill, 2.0 s\ntwo\n"
    assert json.loads(found["phases.json"])["seconds"] == {"init": 1.235, "capture_prefill": 2.0}
    plan = json.loads(found["plan.json"])
    assert (plan["wanted"]["name"], plan["effective"]["name"], plan["next"]["name"]) == (
        "piecewise",
        "standard",
        "standard",
    )
    assert plan["history"][0]["stepped_down"] is True
    assert plan["command"] == "python3 -m sglang --json '{\"a\": 1}'"
    assert yaml.safe_load(found["config.yaml"])["failures"] == {"keep": 50, "max_mb": 500}
    assert found["kernel.txt"] == "kernel line\n"


def test_there_is_a_stacks_file_only_where_stacks_were_asked_for():
    assert "stacks.txt" not in files()
    seen = Snapshot(0.0, {}, "", "no stack: no py-spy\n")
    assert files(snapshot=seen)["stacks.txt"] == "no stack: no py-spy\n"


def test_an_engine_that_never_ran_has_a_log_that_says_so():
    empty = bundle_files(Report(**{**vars(report()), "story": Story()}), Redactor([]))
    assert "was not started" in empty["log.txt"]


def test_a_key_planted_in_log_environment_config_and_address_is_in_no_file():
    seen = Snapshot(0.0, {"gpus": [{"name": KEY}]}, f"kernel: {KEY}\n", f"Process 1: x --api-key {KEY}\n")
    line = f"server_args=ServerArgs(api_key='{KEY}') Authorization: Bearer {KEY}"
    found = files(line=line, snapshot=seen, versions={"model": KEY}, secrets=[KEY])
    assert len(found) == 9
    for name, text in found.items():
        assert KEY not in text, name


def test_a_key_that_nobody_configured_goes_where_it_looks_like_one():
    found = files(line=f"api_key='{KEY}'", secrets=[])
    assert KEY not in found["failure.json"]
    assert KEY not in found["log.txt"]
    config = yaml.safe_load(found["config.yaml"])
    assert config["notify"]["url"] == "https://hooks.example/***"
    assert KEY not in config["engine"]["env"]["PROXY"]
    assert KEY not in config["engine"]["args"]["hf-overrides"]


def test_utc_has_milliseconds():
    assert utc(0.0499) == "1970-01-01T00:00:00.049Z"
