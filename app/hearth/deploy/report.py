"""The report at the end of a run: what failed first, what changed, how long, what to do next. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hearth.deploy.progress import Done, Progress
from hearth.errors import ExitCode


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    action: str
    hosts: tuple[str, ...]
    status: str
    """ansible-runner's word: successful, failed, canceled, timeout, error."""
    seconds: float
    dry: bool
    folder: Path
    log: Path


def exit_code(outcome: Outcome, progress: Progress) -> ExitCode:
    """The exit code of `hearth deploy`."""
    if outcome.status == "successful":
        return ExitCode.OK
    if outcome.status == "canceled":
        return ExitCode.RETRY
    failed = progress.failed()
    if failed and all(each.status == "unreachable" for each in failed):
        return ExitCode.UNREACHABLE
    return ExitCode.CHECK_FAILED if failed else ExitCode.BUG


def render(outcome: Outcome, progress: Progress) -> str:
    """The whole report as plain text."""
    parts = [_head(outcome, progress), *(_host(host, outcome, progress) for host in outcome.hosts)]
    parts += [_slow(progress), _next(outcome, progress)]
    return "\n".join(part for part in parts if part) + "\n"


def first_failure(progress: Progress) -> str:
    """`host: message (role: task)` of what stopped the run."""
    failed = progress.failed()
    if not failed:
        return progress.warnings[-1] if progress.warnings else "Ansible itself failed"
    first = failed[0]
    return f"{first.host}: {first.message} [{first.place}]"


def _head(outcome: Outcome, progress: Progress) -> str:
    took = duration(outcome.seconds)
    if outcome.status == "successful":
        return f"{outcome.action} ok in {took}{', nothing was changed (dry run)' if outcome.dry else ''}"
    if outcome.status == "canceled":
        return f"{outcome.action} was interrupted after {took}; run it again to go on\nlog: {outcome.log}"
    return f"{outcome.action} FAILED after {took}\n{first_failure(progress)}\nlog: {outcome.log}"


def _host(host: str, outcome: Outcome, progress: Progress) -> str:
    changed = progress.changed(host)
    verb = "would change" if outcome.dry else "changed"
    lines = [f"{host}: {verb} {len(changed)}"]
    lines += [f"  {each.place}" for each in changed[:40]]
    lines += [f"  and {len(changed) - 40} more"] if len(changed) > 40 else []
    return "\n".join([*lines, *_release(host, progress.done)])


def _release(host: str, done: Sequence[Done]) -> list[str]:
    for each in reversed(done):
        if each.host == host and "downtime_s" in each.facts and each.facts.get("ok"):
            down, ready = each.facts.get("downtime_s"), each.facts.get("ready_s")
            said = [f"  release {each.facts.get('id')} serves"]
            said += [f"READY after {ready:.0f} s"] if isinstance(ready, (int, float)) else []
            said += [f"downtime {down:.1f} s"] if isinstance(down, (int, float)) else []
            return [", ".join(said)]
    return []


def _slow(progress: Progress) -> str:
    slow = [f"  {duration(each.seconds):>8}  {each.host}  {each.place}" for each in progress.slowest()]
    return "\n".join(["slowest tasks:", *slow]) if slow else ""


def _next(outcome: Outcome, progress: Progress) -> str:
    hosts = " ".join(outcome.hosts)
    if outcome.status != "successful":
        return f"record: {outcome.folder}"
    if outcome.dry:
        return f"next: hearth deploy {hosts}\nrecord: {outcome.folder}"
    told = {"deploy": f"next: hearth host status {hosts}; back: hearth rollback {hosts}"}
    return "\n".join(part for part in (told.get(outcome.action, ""), f"record: {outcome.folder}") if part)


def duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `1 h 12 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
