"""What a Docker build says, as steps: stage, number, line, cached, seconds. Text in, values out."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

_TAIL = 15
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Step:
    """One step of a build. `number` of `total` as the builder counts; `seconds` is None until it ends."""

    stage: str
    number: int
    total: int
    text: str
    cached: bool = False
    seconds: float | None = None


class _Steps:
    """The steps so far, the last lines of the running one, and what went wrong ("" for nothing)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.error = ""
        self.where = "before the first step"
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self._clock = clock

    def _failed(self, step: Step | None, message: str) -> None:
        if step is not None:
            self.where = f"stage {step.stage}, step {step.number}/{step.total}: {step.text}"
        self.error = message.strip()


class Classic(_Steps):
    """Reads the classic builder's events (`{"stream": ...}`, `{"error": ...}`), in order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._done: list[Step] = []
        self._open: Step | None = None
        self._began = 0.0
        self._stage = "arguments"
        self._rest = ""

    def take(self, event: dict[str, Any]) -> list[Step]:
        """The steps that began or ended with this event."""
        found: list[Step] = []
        if "error" in event:
            self._failed(self._open, str(event["error"]))
        *lines, self._rest = (self._rest + str(event.get("stream") or "")).split("\n")
        for line in lines:
            found += self._line(_COLOURS.sub("", line).rstrip())
        return found

    def finished(self) -> list[Step]:
        """Every step, the last one too."""
        self._close()
        return self._done

    def _line(self, line: str) -> list[Step]:
        head = re.fullmatch(r"Step (\d+)/(\d+) : (.*)", line)
        if head:
            ended = self._close()
            self._begin(int(head[1]), int(head[2]), head[3])
            return [*ended, *([self._open] if self._open else [])]
        if self._open is not None and line.strip() == "---> Using cache":
            self._open = replace(self._open, cached=True)
        elif line and not line.startswith((" --->", "Removing intermediate container")):
            self.tail.append(line)
        return []

    def _begin(self, number: int, total: int, text: str) -> None:
        stage = re.match(r"FROM\s+\S+(?:\s+AS\s+(\S+))?", text, re.IGNORECASE)
        if stage:
            self._stage = stage[1] or "last"
        self._open, self._began = Step(self._stage, number, total, text), self._clock()
        self.tail.clear()

    def _close(self) -> list[Step]:
        if self._open is None:
            return []
        ended = replace(self._open, seconds=self._clock() - self._began)
        self._done.append(ended)
        self._open = None
        return [ended]


class BuildKit(_Steps):
    """Reads BuildKit's plain progress (`#12 [engine 3/4] RUN ...`, `#12 CACHED`, `#12 DONE 1.2s`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._steps: dict[str, Step] = {}
        self._said: dict[str, deque[str]] = {}

    def take(self, line: str) -> list[Step]:
        """The steps that began or ended with this line."""
        found = re.match(r"#(\d+) (.*)", line.rstrip("\n"))
        if found is None:
            if line.startswith("ERROR:") and not self.error:
                self._failed(None, line)
            return []
        return self._about(found[1], found[2])

    def finished(self) -> list[Step]:
        """Every step."""
        return list(self._steps.values())

    def _about(self, key: str, text: str) -> list[Step]:
        head = re.fullmatch(r"\[(?:(\S+) )?(\d+)/(\d+)\] (.*)", text)
        if head and key not in self._steps:
            self._steps[key] = Step(head[1] or "last", int(head[2]), int(head[3]), head[4])
            return [self._steps[key]]
        step = self._steps.get(key)
        if step is None:
            return []
        done = re.fullmatch(r"DONE ([\d.]+)s", text)
        if done or text == "CACHED":
            self._steps[key] = replace(step, cached=not done, seconds=float(done[1]) if done else 0.0)
            return [self._steps[key]]
        self._say(key, step, text)
        return []

    def _say(self, key: str, step: Step, text: str) -> None:
        lines = self._said.setdefault(key, deque(maxlen=_TAIL))
        if text.startswith("ERROR: "):
            self.tail = lines
            self._failed(step, text.removeprefix("ERROR: "))
        elif text.strip():
            lines.append(re.sub(r"^[\d.]+ ", "", text))
