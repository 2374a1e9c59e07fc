"""The command as a whole: every verb answers `--help`, and none needs what only another one uses."""

import errno
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hearth import cli
from hearth.cli import VERBS, app
from hearth.errors import ExitCode

WITHOUT = "import sys; sys.modules.update(dict.fromkeys({blocked!r})); from hearth.cli import main; main()"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    done = CliRunner().invoke(app, [verb, "--help"], env={"TERM": "dumb", "COLUMNS": "100"})
    assert done.exit_code == 0
    assert f"{verb} " in done.stdout


def test_help_lists_the_verbs() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"TERM": "dumb", "COLUMNS": "100"}).stdout
    assert [verb for verb in VERBS if f" {verb} " not in shown] == []


def test_an_unknown_verb_is_wrong_use() -> None:
    assert CliRunner().invoke(app, ["sevre"]).exit_code == ExitCode.USAGE


@pytest.mark.parametrize("verb", ["serve", "trace", "bake", "warm", "kernels", "plan", "explain", "status"])
def test_what_runs_beside_the_engine_needs_no_docker_or_ansible(verb: str) -> None:
    code = WITHOUT.format(blocked=["docker", "ansible_runner", "huggingface_hub", "torch", "flashinfer"])
    command = [sys.executable, "-c", code, verb, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_is_full_anywhere_is_one_line(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise OSError(number, os.strerror(number), "/srv/x")

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ExitCode.DISK
    assert capsys.readouterr().err.startswith(f"hearth: /srv/x: {os.strerror(number)} (df -h")


def test_another_error_of_the_system_is_a_bug_and_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(OSError, match="broken"):
        cli.main()
