"""What the output of a host's tools means, for Ansible's filters. Pure: text in, verdicts out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hearth.config import parse as parse_config
from hearth.deploy.release import Draft, Release, parse, sha256, with_digest
from hearth.errors import HearthError
from hearth.host.checks import Status, Wanted, facts_from_json, judge
from hearth.host.spec import ContainerSpec

_NVIDIA, _DISPLAY = "0x10de", "0x03"


def pci_gpus(listing: str) -> list[str]:
    """Addresses of NVIDIA's display devices in `grep -H . /sys/bus/pci/devices/*/{vendor,class}`."""
    said: dict[str, dict[str, str]] = {}
    for line in listing.splitlines():
        found = re.fullmatch(r".*/([^/]+)/(vendor|class):(\S+)", line.strip())
        if found:
            said.setdefault(found[1], {})[found[2]] = found[3].lower()
    return sorted(
        address
        for address, value in said.items()
        if value.get("vendor") == _NVIDIA and value.get("class", "").startswith(_DISPLAY)
    )


def gpu_count_problem(found: list[str], wanted: int) -> str:
    """One line when too few GPUs are on the bus; empty otherwise."""
    if len(found) >= wanted:
        return ""
    there = f" (there are {', '.join(found)})" if found else ""
    return (
        f"{len(found)} of {wanted} GPUs are on the PCI bus{there}: reseat the missing one, look at its power "
        "cable and riser; or set preflight_gpu_count (gpu: none for a host without GPUs)"
    )


def problems(
    facts: Mapping[str, Any], wanted: Mapping[str, Any], ids: list[str], status: str = "fail"
) -> list[str]:
    """One line for each check of `ids` (a check, or the part before the dot) that ended as `status`.

    `facts` are outputs by probe name, `wanted` the fields of `Wanted` that differ from its defaults.
    """
    known = {field.name for field in fields(Wanted)}
    aims = Wanted(**{key: value for key, value in wanted.items() if key in known})
    return [
        f"{check.id}: {check.seen}: {check.why}: {check.fix}"
        for check in judge(facts_from_json(facts), aims)
        if check.status is Status(status) and (check.id in ids or check.id.partition(".")[0] in ids)
    ]


def last_json(text: str) -> dict[str, Any]:
    """The last line that is a JSON object; empty where there is none."""
    for line in reversed(text.splitlines()):
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(said, dict):
            return said
    return {}


def asked(said: str) -> dict[str, dict[str, Any]]:
    """What several tools said, each between `=== NAME` and `=== NAME ended with CODE`, as facts by name."""
    found = re.finditer(r"^=== (\w+)\n(.*?)\n?^=== \1 ended with (\d+)$", said, re.M | re.S)
    return {each[1]: output(each[2], int(each[3])) for each in found}


def output(text: str, code: int) -> dict[str, Any]:
    """One tool's output as a fact: text, exit status, and why there is nothing."""
    problem = ""
    if code == 127 or (code != 0 and re.search(r": (command )?not found\s*$", text)):
        problem = "not installed"
    elif code != 0 and "No such file or directory" in text:
        problem = "no such file"
    elif code == 124:
        problem = "no answer in 60 s"
    return {"text": "" if problem else text, "code": code, "problem": problem}


def release_differs(current: str, draft: Mapping[str, Any], ref: str, digest: str, config: str) -> bool:
    """Whether a deploy of this draft, image and config would make a new release (for the dry run)."""
    try:
        kept = parse(current, "release.json", Release)
        whole = dict(draft) | {"image": {"ref": ref, "digest": digest}}
        new = parse(json.dumps(whole), "draft", Draft)
        said = with_digest(config, digest, "hearth.yaml") if digest else config
    except HearthError:
        return True
    same = Release(
        **new.model_dump(),
        id=kept.id,
        made_at=kept.made_at,
        config=kept.config.model_copy(update={"sha256": sha256(said)}),
    )
    return same.content != kept.content


def scraped(draft: Mapping[str, Any], config: str) -> dict[str, str]:
    """What to scrape on the host of a release with this draft and config.

    `model` is its served name; `hearth` and `engine` are HOST:PORT as reached on that host, each left out
    when it isn't published. Raises ConfigError.
    """
    container = parse(json.dumps(draft.get("container", {})), "container", ContainerSpec)
    settings = parse_config(config, "hearth.yaml")
    answers = {"hearth": settings.ports.supervisor, "engine": settings.ports.engine}
    published = {name: container.published(port) for name, port in answers.items()}
    reached = {name: port.reach for name, port in published.items() if port}
    return {"model": settings.model.served_name, **reached}
