"""`hearth failures`: the list, one in full, and folders in a bad way."""

import json

import pytest
from typer.testing import CliRunner

from hearth.bundlestore import BundleStore
from hearth.cli import app
from hearth.errors import MissingError
from tests.unit.test_bundle import files

AT = 1795989406.5


@pytest.fixture
def folder(tmp_path):
    store = BundleStore(tmp_path / "state/failures", 50, 500_000_000)
    for n in range(3):
        store.write(AT + n, "graph_capture", files(line=f"boom {n}"))
    return store.folder


def run(*words):
    return CliRunner(env={"HEARTH_CONFIG": ""}).invoke(app, ["failures", *map(str, words)])


def test_the_list_has_the_newest_first_with_what_was_done(folder):
    lines = run("--path", folder).stdout.splitlines()
    assert [line.split()[0] for line in lines[::3]] == ["1", "2", "3"]
    assert "2026-11-29 21:56:46 UTC  graph_capture in capture_prefill" in lines[0]
    assert lines[1].strip() == "boom 2"
    assert lines[2].strip() == "done: step down from A to B"


def test_the_config_tells_the_folder(folder, tmp_path):
    config = tmp_path / "hearth.yaml"
    config.write_text(
        f"model: {{path: /m, served_name: s}}\nengine: {{version: 0.5.23}}\n"
        f"paths: {{state: {tmp_path}/state}}\n"
    )
    assert "boom 2" in run("-c", config).stdout


def test_json_has_the_documents(folder):
    document = json.loads(run("--path", folder, "--json").stdout)
    assert document["path"] == str(folder)
    assert [entry["number"] for entry in document["failures"]] == [1, 2, 3]
    assert {"name", "path", "readable", "kind", "phase", "evidence", "done", "next_plan"} <= set(
        document["failures"][0]
    )


@pytest.mark.parametrize("which", ["1", "name"])
def test_one_in_full(folder, which):
    names = sorted(path.name for path in folder.iterdir())
    shown = run("--path", folder, names[-1] if which == "name" else which)
    assert shown.exit_code == 0
    for text in (
        "boom 2",
        "a hint",
        "step down from A to B",
        "capture_prefill: 2.0",
        "served_name: s",
        "kernel line",
    ):
        assert text in shown.stdout, text
    document = json.loads(run("--path", folder, "--json", "1").stdout)
    assert document["failure"]["evidence"] == ["boom 2"]
    assert {"phases", "plan", "versions", "gpu", "config", "kernel", "stacks", "log"} <= set(document)
    assert document["stacks"] is None


def test_a_corrupt_one_is_unreadable_and_the_others_are_listed(folder):
    worst = sorted(folder.iterdir())[1]
    (worst / "failure.json").write_text("{")
    (worst / "gpu.json").write_text("[")
    shown = run("--path", folder)
    assert shown.exit_code == 0
    assert f"  2  {worst.name}  unreadable: failure.json: not what Hearth writes" in shown.stdout
    assert "boom 2" in shown.stdout
    assert "boom 0" in shown.stdout
    entry = json.loads(run("--path", folder, "--json").stdout)["failures"][1]
    assert entry["readable"] is False
    full = run("--path", folder, "2")
    assert full.exit_code == 0
    assert "unreadable" in full.stdout
    assert "boom 1" in full.stdout, "the log is there all the same"
    assert "(not there, or not readable)" in full.stdout


def test_an_empty_folder_says_so(tmp_path):
    shown = run("--path", tmp_path)
    assert (shown.exit_code, shown.stdout) == (0, f"No failure is kept in {tmp_path}.\n")
    assert json.loads(run("--path", tmp_path, "--json").stdout) == {"path": str(tmp_path), "failures": []}


def test_what_is_not_there_is_named(folder, tmp_path):
    for words, said in (
        (("--path", tmp_path / "no"), "no such folder"),
        (("--path", folder, "4"), "no failure 4 (there are: 1 to 3)"),
        (("--path", folder, "0"), "no failure 0"),
        (("--path", folder, "../x"), "no failure named '../x'"),
    ):
        shown = run(*words)
        assert isinstance(shown.exception, MissingError)
        assert said in str(shown.exception)


def test_control_characters_do_not_reach_the_terminal(folder):
    (sorted(folder.iterdir())[-1] / "log.txt").write_text("\x1b[2Jgone\x9b5m\ttab\n")
    shown = run("--path", folder, "1").stdout
    assert "?[2Jgone?5m\ttab" in shown
    assert "\x1b" not in shown


def test_a_long_log_is_cut_and_says_where_the_rest_is(folder):
    newest = sorted(folder.iterdir())[-1]
    (newest / "log.txt").write_text("".join(f"line {n}\n" for n in range(100)))
    shown = run("--path", folder, "1").stdout
    assert f"(the last 60 of 100 lines; all: {newest}/log.txt)" in shown
    assert "line 39\n" not in shown
    assert "line 40\n" in shown
