"""A playbook run over ansible-runner: its record on disk, its progress, its report, the hosts' locks."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hearth.deploy import gate, hostlock, remote, report
from hearth.deploy.inventory import Target, to_ansible
from hearth.deploy.progress import Progress
from hearth.deploy.view import View
from hearth.errors import ExitCode, HearthError, MissingError

STATE = Path(os.environ.get("XDG_STATE_HOME", "~/.local/state")).expanduser() / "hearth" / "runs"
_KEPT = 50


@dataclass(frozen=True)
class Job:
    """What to run: a playbook of ansible/, on which hosts, with which variables."""

    action: str
    playbook: str
    targets: tuple[Target, ...]
    variables: Mapping[str, Any]
    dry: bool = False
    tags: str = ""
    build: Callable[[], None] | None = None
    """What takes long on this machine, done once the hosts have passed the preflight. Raises HearthError."""


@dataclass(frozen=True)
class Record:
    """A run's folder."""

    id: str
    folder: Path


def new_record(root: Path = STATE) -> Record:
    """Make the folder of a new run, readable by its owner alone; old ones go."""
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"
    folder = root / name
    folder.mkdir(parents=True, mode=0o700)
    for old in sorted(root.iterdir())[:-_KEPT]:
        _forget(old)
    return Record(name, folder)


def enter(targets: Sequence[Target]) -> list[Target]:
    """The targets, each seen to let us in, before any is touched. Raises HearthError, a line for each."""
    entered: list[Target] = []
    problems: list[HearthError] = []
    for target in targets:
        try:
            entered.append(gate.enter(target))
        except HearthError as error:
            problems.append(error)
    if problems:
        first = problems[0]
        if len(problems) > 1:
            first.args = ("\n".join(str(each) for each in problems),)
            first.hint = ""
        raise first
    return entered


def perform(job: Job, record: Record, ansible: Path, root_why: str = "") -> tuple[ExitCode, str]:
    """Run a job while holding its hosts: exit code and report. Raises HearthError before one is changed."""
    me = hostlock.myself(root_why or job.action, record.id)
    holding = nullcontext() if job.dry else hostlock.held(list(job.targets), me, _say)
    with holding:
        if job.build is not None:
            code, text = _run(replace(job, tags="preflight"), record, ansible.resolve(), "preflight")
            if code is not ExitCode.OK:
                return code, text
            job.build()
        return _run(job, record, ansible.resolve(), "ansible")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _run(job: Job, record: Record, ansible: Path, ident: str) -> tuple[ExitCode, str]:
    """One run of the playbook, shown and written down."""
    progress = Progress(time.monotonic())
    named = {target.name: target for target in job.targets}
    with View(progress, look=lambda host: remote.service_says(named[host])) as view:
        status = _play(job, record, ansible, view, ident)
    outcome = report.Outcome(
        job.action,
        tuple(named),
        status,
        time.monotonic() - progress.started,
        job.dry,
        record.folder,
        record.folder / "artifacts" / ident / "stdout",
    )
    text = report.render(outcome, progress)
    _write_down(record, outcome, progress, text)
    return report.exit_code(outcome, progress), text


def _play(job: Job, record: Record, ansible: Path, view: View, ident: str) -> str:
    """ansible-runner's word for how it ended."""
    try:
        from ansible_runner.interface import run  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingError(
            "ansible-runner isn't installed", "make setup, or pip install 'hearth[deploy]'"
        ) from error
    hosts = record.folder / "hosts.json"
    hosts.write_text(json.dumps(to_ansible(job.targets), indent=1), encoding="utf-8")
    ended = run(
        private_data_dir=str(record.folder),
        project_dir=str(ansible),
        playbook=job.playbook,
        inventory=str(hosts),
        extravars=dict(job.variables),
        cmdline=" ".join(
            ["--diff", *(["--check"] if job.dry else []), *(["--tags", job.tags] if job.tags else [])]
        ),
        envvars=_environment(ansible),
        ident=ident,
        quiet=True,
        event_handler=view.event,
        settings={"idle_timeout": 0, "pexpect_timeout": 2},
    )
    return str(ended.status)


def _environment(ansible: Path) -> dict[str, str]:
    """Ansible's settings come from our file alone. PATH first has the folder of this Python's tools."""
    tools = str(Path(sys.executable).parent)
    return {
        "ANSIBLE_CONFIG": str(ansible / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def _write_down(record: Record, outcome: report.Outcome, progress: Progress, text: str) -> None:
    (record.folder / "report.txt").write_text(text, encoding="utf-8")
    said = asdict(outcome) | {
        "tasks": [asdict(each) for each in progress.done],
        "warnings": progress.warnings,
    }
    (record.folder / "run.json").write_text(json.dumps(said, indent=1, default=str), encoding="utf-8")


def _forget(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
