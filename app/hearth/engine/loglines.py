"""Plain engine lines out of whatever carried them: docker's json-file, journald, compose, terminals. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_ISO = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
# journalctl (short, short-iso): time, host, then `name[pid]:` or `kernel:`.
_JOURNAL = re.compile(
    rf"(?:{_MONTH}\s+\d+ \d\d:\d\d:\d\d(?:\.\d+)?|{_ISO}) \S+ (?:kernel|[\w@./-]+\[\d+\]): "
)
_STAMP = re.compile(rf"{_ISO} ")  # docker logs --timestamps, kubectl logs --timestamps
_COMPOSE = re.compile(r"[\w.-]+\s+\| ")  # docker compose logs
_POD = re.compile(r"\[pod/[^\]]+\] ")  # kubectl logs --prefix
_RAY = re.compile(r"\([\w-]+ pid=\d+(?:, ip=[\d.]+)?\) ")
# The logger's own prefix, glued to the end of a line that had no terminator (a progress bar).
_GLUED = re.compile(r"(?<!^)(?=\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]\[]{0,40}\] )")
_CARRIERS = (_JOURNAL, _STAMP, _COMPOSE, _POD, _RAY)


def plain_lines(lines: Iterable[str]) -> list[str]:
    """The engine's own lines: carriers' prefixes and colours taken off, split on line feeds and returns.

    Empty lines stay, so that a reader can see where a message ends.
    """
    return [part for line in _unjson(lines) for part in _split(line)]


def _split(line: str) -> Iterator[str]:
    """A physical line as the logical ones: progress bars redraw themselves after a carriage return."""
    line = line.rstrip("\r\n")
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    parts = re.split(r"[\r\n]", line) if "\r" in line or "\n" in line else (line,)
    for part in parts:
        part = _strip(part)
        if part.find("[20", 1) > 0:
            yield from (piece for piece in _GLUED.split(part) if piece)
        else:
            yield part


def _strip(line: str) -> str:
    """Take off what stands before the engine's own text; carriers may be stacked (journald over compose)."""
    for _ in range(3):
        for carrier in _CARRIERS:
            found = carrier.match(line)
            if found:
                line = line[found.end() :]
                break
        else:
            return line
    return line


def _unjson(lines: Iterable[str]) -> Iterator[str]:
    """docker's json-file records to text; a record without a line feed at its end goes on in the next."""
    held = ""
    for line in lines:
        text = _record(line) if line.startswith('{"') else None
        if text is None:
            if held:
                yield held
                held = ""
            yield line
        elif text.endswith("\n"):
            yield held + text
            held = ""
        else:
            held += text
    if held:
        yield held


def _record(line: str) -> str | None:
    """The text in one json-file record, or None where the line is something else."""
    if '"log":' not in line and '"MESSAGE"' not in line:
        return None
    try:
        data = json.loads(line)
    except ValueError:
        return None
    if isinstance(data, dict) and isinstance(data.get("log"), str):
        return str(data["log"])
    if isinstance(data, dict) and isinstance(data.get("MESSAGE"), str):
        return str(data["MESSAGE"]) + "\n"
    return None
