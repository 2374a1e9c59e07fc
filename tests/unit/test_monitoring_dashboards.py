"""Dashboards: the committed JSON is what the code makes, and a person can import it."""

import json
import re

import pytest
import yaml
from monitoring.dashboards.__main__ import FOLDER, main, stale
from monitoring.dashboards.boards import BOARDS, UID, panels
from monitoring.rules import metrics_in, rules

PROVISIONING = FOLDER.parent / "provisioning"
RULES = list(rules())
RECORDED = {rule["record"] for rule in RULES if "record" in rule}


def document(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def test_committed_dashboards_are_what_the_code_makes():
    assert stale() == []
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(BOARDS)
    assert main(["--check"]) == 0


def test_a_stale_dashboard_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("monitoring.dashboards.__main__.FOLDER", tmp_path)
    assert main(["--check"]) == 3
    assert "serving, recovery, gpus" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0


@pytest.mark.parametrize("name", BOARDS)
def test_every_query_goes_to_the_chosen_data_source_hosts_and_models(name):
    board = document(name)
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            if "hearth:limit" not in target["expr"]:
                assert 'host=~"$host"' in target["expr"]
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert set(variables) == {"datasource", "host", "model"}
    assert variables["datasource"]["current"]["value"] == UID


@pytest.mark.parametrize("name", BOARDS)
def test_panels_have_a_title_of_their_own_and_a_sentence(name):
    shown = list(panels(name))
    assert len({(panel.title, panel.kind) for panel in shown}) == len(shown)
    assert all(panel.text.endswith(".") and panel.queries for panel in shown)


@pytest.mark.parametrize("name", BOARDS)
def test_recorded_names_exist(name):
    for panel in panels(name):
        for query in panel.queries:
            assert {n for n in metrics_in(query.expr) if n.startswith("hearth:")} <= RECORDED


def test_every_recording_rule_is_shown_or_alerted_on():
    read = {n for rule in RULES if "alert" in rule for n in metrics_in(rule["expr"])}
    read |= {n for rule in RULES if "record" in rule for n in metrics_in(rule["expr"])}
    read |= {n for name in BOARDS for p in panels(name) for q in p.queries for n in metrics_in(q.expr)}
    assert read >= RECORDED


@pytest.mark.parametrize("name", BOARDS)
def test_failures_are_annotations(name):
    events = {event["name"]: event for event in document(name)["annotations"]["list"]}
    assert set(events) == {"Failures", "Steps down"}
    assert all(event["enable"] and event["titleFormat"] for event in events.values())


def test_provisioning_defines_the_data_source_and_no_password():
    sources = yaml.safe_load((PROVISIONING / "datasources/hearth.yml").read_text())["datasources"]
    assert [source["uid"] for source in sources] == [UID]
    provider = yaml.safe_load((PROVISIONING / "dashboards/hearth.yml").read_text())["providers"][0]
    assert provider["allowUiUpdates"] is False
    for path in PROVISIONING.rglob("*.yml"):
        assert not re.search("password", path.read_text(), re.IGNORECASE)
