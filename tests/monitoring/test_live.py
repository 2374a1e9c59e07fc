"""Every query of every rule and panel, asked of a Prometheus that saw an engine fail, step down and crash."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from monitoring.dashboards.boards import BOARDS
from monitoring.query import Series, fill_in
from monitoring.rules import FOLDER, metrics_in, rules

from monitoring import gallery
from tests.monitoring.story import HOST, Story

STANDINS = "standin-.*"
# What nobody can export on a machine without GPUs or systemd, with the reason. A query that reads one of
# these is answered by a stand-in that serves recorded or documented pages (tests/monitoring/standin.py).
NEEDS_STANDIN = {
    "gpu_utilization_Percentage": "nvitop-exporter needs a GPU",
    "gpu_memory_used_MiB": "nvitop-exporter needs a GPU",
    "gpu_memory_free_MiB": "nvitop-exporter needs a GPU",
    "gpu_power_usage_W": "nvitop-exporter needs a GPU",
    "gpu_temperature_C": "nvitop-exporter needs a GPU",
    "gpu_clock_sm_MHz": "nvitop-exporter needs a GPU",
    "DCGM_FI_DEV_GPU_UTIL": "DCGM exporter needs a GPU",
    "DCGM_FI_DEV_FB_USED": "DCGM exporter needs a GPU",
    "DCGM_FI_DEV_FB_FREE": "DCGM exporter needs a GPU",
    "DCGM_FI_DEV_POWER_USAGE": "DCGM exporter needs a GPU",
    "DCGM_FI_DEV_GPU_TEMP": "DCGM exporter needs a GPU",
    "DCGM_FI_DEV_SM_CLOCK": "DCGM exporter needs a GPU",
    "DCGM_FI_DEV_XID_ERRORS": "DCGM exporter needs a GPU",
    "hearth_host_gpu_recovery": "NVML needs a GPU",
    "hearth_host_gpu_slowdown": "NVML needs a GPU",
    "hearth_host_gpu_pcie_replays_total": "NVML needs a GPU",
    "hearth_host_gpu_pcie_width": "NVML needs a GPU",
    "hearth_host_gpu_pcie_width_max": "NVML needs a GPU",
    "hearth_gpu_fault": "Hearth exports it for each GPU",
    "node_systemd_unit_state": "needs systemd",
}
# Read live, and yet without an answer here: tokens per GPU need a GPU to divide by.
EMPTY_LIVE = {"hearth:generation_tokens_per_gpu:rate5m": "divides by the number of GPUs, which is 0"}
RULES = list(rules())


def needs_standin(expression: str) -> bool:
    """Whether an expression reads, itself or through recording rules, what only a stand-in has here."""
    names = metrics_in(expression)
    if names & (NEEDS_STANDIN.keys() | EMPTY_LIVE.keys()):
        return True
    read = [rule["expr"] for rule in RULES if rule.get("record") in names]
    return any(needs_standin(expr) for expr in read)


def panel_queries() -> Iterator[tuple[str, str]]:
    """(where it stands, expression) of each query, from the committed JSON."""
    for name in BOARDS:
        board = json.loads((FOLDER.parent / f"grafana/dashboards/{name}.json").read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                yield f"{name}: {panel['title']} {target['refId']}", target["expr"]


def answers(story: Story, expression: str) -> list[Series]:
    """The answer over the whole story, from the real parts, or from stand-ins where there is no other way."""
    host = STANDINS if needs_standin(expression) else HOST
    return story.source.over(fill_in(expression, host), story.begin, story.end)


def test_every_panel_query_returns_data(story: Story) -> None:
    asked = dict(panel_queries())
    assert len(asked) > 60
    assert [where for where, expression in asked.items() if not answers(story, expression)] == []


def test_every_recording_rule_returns_data(story: Story) -> None:
    missing = []
    for rule in RULES:
        if "record" not in rule or rule["record"] == "hearth:limit":
            continue
        labels = "".join(f', {key}="{value}"' for key, value in rule.get("labels", {}).items())
        host = STANDINS if needs_standin(rule["expr"]) or rule["record"] in EMPTY_LIVE else HOST
        selector = f'{rule["record"]}{{host=~"{host}"{labels}}}'
        if not story.source.over(selector, story.begin, story.end):
            missing.append(selector)
    assert missing == []


def test_either_gpu_exporter_fills_every_gpu_rule(story: Story) -> None:
    for rule in RULES:
        if "record" not in rule or "label_replace(gpu_" not in rule["expr"]:
            continue
        for host in ("standin-nvitop", "standin-dcgm"):
            assert story.source.over(f'{rule["record"]}{{host="{host}"}}', story.begin, story.end), rule


@pytest.mark.parametrize("host", ["standin-colon", "standin-underscore", "standin-0.5.21"])
def test_either_spelling_and_an_older_engine_fill_every_engine_rule(story: Story, host: str) -> None:
    for rule in RULES:
        if "record" in rule and "sglang" in rule["expr"]:
            assert story.source.over(f'{rule["record"]}{{host="{host}"}}', story.begin, story.end), rule


def test_failures_and_steps_down_are_annotations(story: Story) -> None:
    board = json.loads((FOLDER.parent / "grafana/dashboards/recovery.json").read_text())
    for event in board["annotations"]["list"]:
        assert answers(story, event["expr"]), event["name"]


def names(story: Story, match: str) -> set[str]:
    found = story.source.get("label/__name__/values", **{"match[]": match})
    assert isinstance(found, list)
    return set(found)


def test_no_query_names_a_metric_nobody_exports(story: Story) -> None:
    expressions = [rule["expr"] for rule in RULES] + [expression for _, expression in panel_queries()]
    used = {name for expression in expressions for name in metrics_in(expression)}
    real, standin = names(story, '{standin="",__name__=~".+"}'), names(story, '{standin="yes"}')
    spelled = {name.replace("sglang:", "sglang_") for name in real}
    for name in sorted(used - real):
        other_spelling = name.replace("sglang:", "sglang_") in spelled
        assert name in standin, f"nobody exports {name}"
        assert other_spelling or name in NEEDS_STANDIN, (
            f"{name}: exported by a stand-in alone, and not listed"
        )


def test_what_needs_a_standin_is_listed_rightly(story: Story) -> None:
    """An entry that a real exporter has after all, or that no query reads, has to go."""
    expressions = [rule["expr"] for rule in RULES] + [expression for _, expression in panel_queries()]
    used = {name for expression in expressions for name in metrics_in(expression)}
    assert NEEDS_STANDIN.keys() <= used
    assert NEEDS_STANDIN.keys() & names(story, f'{{host="{HOST}"}}') == set()


def test_the_engine_was_read_under_the_spelling_of_its_client(story: Story) -> None:
    spelled = {name[:7] for name in names(story, f'{{host="{HOST}",job="engine"}}') if name[:6] == "sglang"}
    prometheus = story.source.get("status/buildinfo")["version"]
    assert len(spelled) == 1
    if story.client == "0.22.1":
        assert spelled == {"sglang:"}
    elif prometheus.startswith("2."):
        assert spelled == {"sglang_"}


def test_degraded_and_crashloop_reached_the_receiver(story: Story) -> None:
    fired = {a["labels"]["alertname"]: a for a in story.webhook.alerts if a["labels"].get("host") == HOST}
    for name in ("Degraded", "CrashLoop", "HearthDown", "PlanNotInEffect"):
        alert = fired[name]
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert HOST in alert["annotations"]["summary"]
        assert "%" not in alert["annotations"]["description"]


def test_what_arrived_is_whole_sentences_and_its_runbook_can_be_read(story: Story) -> None:
    for alert in story.webhook.alerts:
        text = " ".join(alert["annotations"].values())
        assert "<no value>" not in text
        assert "error expanding" not in text
        address = alert["annotations"]["runbook_url"]
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert answer.read().decode().startswith(f"# {alert['labels']['alertname']}\n")


def test_a_quiet_alert_did_not_fire(story: Story) -> None:
    """What nothing in the story gives a reason for."""
    fired = {a["labels"]["alertname"] for a in story.webhook.alerts if a["labels"].get("host") == HOST}
    assert (
        fired & {"GaveUp", "Stuck", "CanaryFailing", "RuntimeCompile", "KVNearFull", "DriverMismatch"}
        == set()
    )


def test_rules_are_evaluated_without_errors(story: Story) -> None:
    for group in story.source.get("rules")["groups"]:
        for rule in group["rules"]:
            assert rule["health"] == "ok", rule.get("lastError")


def test_the_gallery_is_drawn(story: Story, tmp_path: Path) -> None:
    """With HEARTH_GALLERY=FOLDER the pictures are kept there."""
    folder = Path(os.environ.get("HEARTH_GALLERY", tmp_path))
    for name in BOARDS:
        host = f"{HOST}|standin-nvitop|standin-systemd|standin-gpu-fault" if name == "gpus" else HOST
        target = folder / f"{name}.png"
        gallery.draw(name, gallery.View(story.source, story.begin, story.end, host), target)
        assert target.stat().st_size > 50_000
