"""What runs in which order: the real ansible-runner with a playbook of two tasks on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from hearth.deploy import runner
from hearth.deploy.inventory import Target
from hearth.errors import CheckFailed, ExitCode

PLAYBOOK = """
- name: Two tasks
  hosts: all
  gather_facts: false
  tasks:
    - name: Look
      ansible.builtin.command: "test {look}"
      changed_when: false
      tags: [preflight]
    - name: Work
      ansible.builtin.command: touch {folder}/worked
"""
Perform = Callable[..., "tuple[ExitCode, str]"]


@pytest.fixture
def perform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Perform:
    """Performs a job with that build; the look succeeds where `look` is true for test(1)."""
    monkeypatch.setattr(runner.hostlock, "held", lambda *_: nullcontext())

    def run(build: Callable[[], None] | None, look: str = "-n x") -> tuple[ExitCode, str]:
        ansible = tmp_path / "ansible"
        ansible.mkdir()
        (ansible / "ansible.cfg").write_text("[defaults]\n")
        (ansible / "play.yml").write_text(PLAYBOOK.format(look=look, folder=tmp_path))
        variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        job = runner.Job(
            "deploy", "play.yml", (Target("here", "here", variables=variables),), {}, build=build
        )
        return runner.perform(job, runner.new_record(tmp_path / "runs"), ansible)

    return run


def test_an_image_is_built_between_the_look_and_the_work(perform: Perform, tmp_path: Path) -> None:
    seen: list[bool] = []
    code, text = perform(lambda: seen.append((tmp_path / "worked").exists()))
    assert code is ExitCode.OK, text
    assert seen == [False]
    assert (tmp_path / "worked").exists()


def test_nothing_is_built_for_a_host_that_fails_the_look(perform: Perform, tmp_path: Path) -> None:
    built: list[str] = []
    code, text = perform(lambda: built.append("image"), look="-z x")
    assert code is not ExitCode.OK
    assert "Look" in text
    assert not built
    assert not (tmp_path / "worked").exists()


def test_nothing_is_changed_where_the_build_fails(perform: Perform, tmp_path: Path) -> None:
    def build() -> None:
        raise CheckFailed("no image")

    with pytest.raises(CheckFailed):
        perform(build)
    assert not (tmp_path / "worked").exists()


def test_without_a_build_there_is_one_run(perform: Perform, tmp_path: Path) -> None:
    code, text = perform(None)
    assert code is ExitCode.OK, text
    (run,) = (tmp_path / "runs").iterdir()
    assert [path.name for path in (run / "artifacts").iterdir()] == ["ansible"]
