"""Rules, alerts, their tests and runbooks belong together: names, severities, limits."""

import functools
import re
import string
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from monitoring.rules import FOLDER, files, metrics_in, rules, seconds, shortened

from hearth.engine.probe import CanaryResult
from hearth.failure import FailureKind, Phase
from hearth.host import xid
from hearth.pulse import numerics
from tests.monitoring.standin import PAGES

RUNBOOKS = FOLDER.parent / "runbooks"
RULES = list(rules())
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDS = [rule for rule in RULES if "record" in rule]
NAMES = sorted({rule["alert"] for rule in ALERTS})
WANTED = [
    "HearthDown",
    "EngineNotReady",
    "Stuck",
    "CrashLoop",
    "GaveUp",
    "Degraded",
    "PlanNotInEffect",
    "CanaryFailing",
    "RuntimeCompile",
    "ThroughputLow",
    "QueueGrowing",
    "LatencyBudgetBurn",
    "KVNearFull",
    "GPUFault",
    "GPUMissing",
    "GPUThrottled",
    "PCIeReplay",
    "DiskLow",
    "DriverMismatch",
    "ScrapeMissing",
    "WatchdogNotTurning",
]


@functools.cache
def promtool_tests(kind):
    paths = sorted((FOLDER / "tests").glob(f"{kind}_*.yml"))
    return [test for path in paths for test in yaml.safe_load(path.read_text())["tests"]]


def test_every_alert_that_was_asked_for_is_there_and_no_other():
    assert sorted(WANTED) == NAMES


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_a_person_needs(rule):
    assert rule["labels"]["severity"] in ("critical", "warning")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert notes["summary"].endswith((".", "}}."))
    assert notes["runbook_url"] == f"{{{{ externalURL }}}}/user/runbooks/{rule['alert']}.md"


def test_alerts_and_runbooks_are_one_to_one():
    assert sorted(path.stem for path in RUNBOOKS.iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_runbook_tells_what_it_means_where_to_look_and_what_to_do(name):
    lines = (RUNBOOKS / f"{name}.md").read_text().splitlines()
    assert lines[0] == f"# {name}"
    headings = [line for line in lines if line.startswith("## ")]
    assert headings == ["## What it means", "## Look here", "## Do this"]
    assert any(line.startswith("- ") for line in lines)
    assert any(line.startswith("1. ") for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_runbook_sends_to_exists(name):
    """Other alerts and limits that it names, and the files below monitoring/."""
    text = (RUNBOOKS / f"{name}.md").read_text()
    for other in re.findall(r"\bsee ([A-Z]\w+)", text):
        assert other in NAMES
    for path in re.findall(r"`((?:rules|targets)/[\w.]+)`", text):
        assert (FOLDER / path).exists()


@pytest.mark.parametrize("name", NAMES)
def test_promtool_sees_each_alert_fire_not_fire_and_resolve(name):
    mine = [test for test in promtool_tests("alerts") if test["name"].split()[0] == name]
    seen = set()
    for test in mine:
        fired = False
        for check in test["promql_expr_test"]:
            assert f'alertname="{name}", alertstate="firing"' in check["expr"]
            fires = bool(check["exp_samples"])
            seen.add("fires" if fires else "resolves" if fired else "is quiet")
            fired = fired or fires
    assert seen == {"fires", "is quiet", "resolves"}


@pytest.mark.parametrize("record", sorted({rule["record"] for rule in RECORDS}))
def test_promtool_checks_a_value_of_each_recording_rule(record):
    checks = [check for test in promtool_tests("rules") for check in test["promql_expr_test"]]
    exact = re.compile(rf"(?<![\w:]){re.escape(record)}(?![\w:])")
    assert any(exact.search(check["expr"]) and check["exp_samples"] for check in checks)


def test_records_have_the_prefix_and_keep_host_and_model_apart():
    for rule in RECORDS:
        assert rule["record"].startswith("hearth:")
        groupings = re.findall(r"\b(?:sum|max|min|avg|count) (\w+)? ?\(([^)]*)\)", rule["expr"])
        assert all(word == "by" and "host" in labels for word, labels in groupings), rule["record"]


def test_limits_that_are_compared_with_exist_and_the_others_have_gone():
    known = {rule["labels"]["limit"] for rule in RECORDS if rule["record"] == "hearth:limit"}
    used = {name for rule in ALERTS for name in re.findall(r'limit="(\w+)"', rule["expr"])}
    assert used == known


def test_recorded_names_that_are_read_are_recorded():
    recorded = {rule["record"] for rule in RECORDS}
    for rule in RULES:
        read = {name for name in metrics_in(rule["expr"]) if name.startswith("hearth:")}
        assert read <= recorded, rule


def test_dcgm_counts_the_xids_that_hearth_counts_as_fatal():
    (rule,) = (rule for rule in RECORDS if rule["record"] == "hearth:gpu_xid")
    counted = [int(number) for number in re.findall(r"DCGM_FI_DEV_XID_ERRORS == (\d+)", rule["expr"])]
    assert counted == sorted(number for number, known in xid.table().items() if known.fatal is not False)


def test_failures_are_read_by_kinds_that_exist_and_a_wrong_canary_by_its_own():
    read = [
        kind
        for rule in RULES
        for kind in re.findall(r'(?:failures|restarts)_total{kind="(\w+)"', rule["expr"])
    ]
    assert set(read) <= {kind.value for kind in FailureKind}
    assert numerics(CanaryResult("wrong", 0.1, ""), Phase.SERVING).kind.value in read


@pytest.mark.parametrize("path", sorted(PAGES.glob("engine-*.txt")), ids=lambda path: path.stem)
def test_every_recorded_page_of_an_engine_has_what_the_rules_read(path):
    there = set(re.findall(r"^\w+:?\w*", path.read_text(), re.MULTILINE))
    for rule in RECORDS:
        read = {
            name.replace("sglang:", "sglang_")
            for name in metrics_in(rule["expr"])
            if name.startswith("sglang")
        }
        assert read <= {name.replace("sglang:", "sglang_") for name in there}, rule["record"]


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("up == 0", {"up"}),
        ('sum by (host) (rate(sglang:x{a="b"}[5m]) or rate(sglang_x[5m]))', {"sglang:x", "sglang_x"}),
        ('a_b{x=~"c|d"} / on (host) group_left () (max by (host) (e) > 0)', {"a_b", "e"}),
        ('label_replace(gpu, "gpu", "$1", "index", "(.*)") * 1048576', {"gpu"}),
        ("time() - x unless y offset 1m", {"x", "y"}),
        ('x{host=~"$host"} > bool 0', {"x"}),
    ],
)
def test_metrics_are_found_in_expressions(expression, names):
    assert metrics_in(expression) == names


@given(st.text(alphabet=string.printable, max_size=200))
def test_any_text_can_be_searched(text):
    assert all(re.fullmatch(r"[a-zA-Z_:][\w:]*", name) for name in metrics_in(text))


def test_durations():
    assert [seconds(text) for text in ("90s", "5m", "1h", "1d")] == [90, 300, 3600, 86400]
    with pytest.raises(ValueError, match="no duration: soon"):
        seconds("soon")


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_shortened_rules_are_the_same_but_for_time_and_limits(path: Path):
    text = path.read_text()
    short = yaml.safe_load(shortened(text, 12, 60, {"queue": 1}))
    pairs = zip(yaml.safe_load(text)["groups"], short["groups"], strict=True)
    for before, after in ((b, a) for x, y in pairs for b, a in zip(x["rules"], y["rules"], strict=True)):
        assert before.keys() == after.keys()
        if before.get("labels", {}).get("limit") != "queue":
            bare = re.compile(r"\[\w+\]")
            assert bare.sub("[]", before["expr"]) == bare.sub("[]", after["expr"])
        assert ("for" in before) == ("for" in after)


def test_the_mixin_has_every_file():
    """Its text: jsonnet isn't among the tools."""
    mixin = (FOLDER.parent / "mixin.libsonnet").read_text()
    named = set(re.findall(r"import(?:str)? '([^']+)'", mixin))
    dashboards = (FOLDER.parent / "grafana/dashboards").glob("*.json")
    assert named == {str(path.relative_to(FOLDER.parent)) for path in [*files(), *dashboards]}
