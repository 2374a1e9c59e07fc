"""Reads the engine's output and never holds the engine up.

One thread reads the pipe in chunks, cuts them at line ends, masks secrets, and hands the lines on; another
writes to our stdout, and drops (and counts) what a slow reader there doesn't take. Progress bars end their
lines with a carriage return, so that is a line end too.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

from hearth.engine.forward import Forwarder
from hearth.engine.redact import Redactor

PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 18
# Below this a chunk isn't worth its overhead: let the pipe fill for a moment before the next look.
SMALL_CHUNK = 1 << 16
PAUSE_SECONDS = 0.004
LONGEST_PENDING = 16 << 20
"""Bytes of a line that are held back for its end; a longer line is cut."""
LINE_CHARS = 16 << 10
"""Longest line kept and handed on; of a longer one, the beginning and the end."""
BATCH_CHARS = 64 << 20
HEAD_LINES, TAIL_LINES, SECTION_CHARS = 200, 400, 256 << 10
MOST_SECTIONS = 64

logger = logging.getLogger(__name__)


def log_pipe() -> tuple[int, int]:
    """A pipe (read end, write end) as large as an ordinary user may have: 1 MiB, else the default 64 KiB."""
    read, write = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return read, write


class Blocks:
    """Cuts a stream of chunks after the last line end so far, and masks secrets in what it gives out."""

    def __init__(self, redactor: Redactor, longest: int = LONGEST_PENDING) -> None:
        self._redactor = redactor
        self._longest = longest + 2 * redactor.longest
        self._pending: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> bytes:
        """The next block, masked: it ends with a line end unless a line was too long. May be empty."""
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if end == 0 and self._size + len(chunk) <= self._longest:
            self._pending.append(chunk)
            self._size += len(chunk)
            return b""
        data = b"".join([*self._pending, chunk])
        cut = self._size + end if end else self._redactor.safe_cut(data, len(data) - self._redactor.longest)
        self._pending = [data[cut:]]
        self._size = len(data) - cut
        return self._redactor(data[:cut])

    def rest(self) -> bytes:
        """The unfinished line, masked."""
        return self._redactor.unfinished(b"".join(self._pending))


class Lines:
    """Turns blocks into lines of text: any bytes will do, and no line is longer than LINE_CHARS."""

    def __init__(self) -> None:
        self._after_cr = False

    def of(self, block: bytes) -> list[str]:
        if not block:
            return []
        text = block.decode("utf-8", "replace")
        if self._after_cr and text.startswith("\n"):
            text = text[1:]  # the other half of a \r\n
        self._after_cr = text.endswith("\r")
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        if not lines[-1]:
            lines.pop()
        return lines if len(text) <= LINE_CHARS else [shortened(line) for line in lines]


def shortened(line: str) -> str:
    """The beginning and the end of a line that is too long, with a mark between them."""
    if len(line) <= LINE_CHARS:
        return line
    head, tail = LINE_CHARS * 3 // 4, LINE_CHARS // 4 - 64
    return f"{line[:head]}…[hearth: {len(line) - head - tail} characters left out]…{line[-tail:]}"


class Section:
    """The lines of one phase: the first ones and the last ones, bounded by count and by size."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._head_room = SECTION_CHARS
        self._tail_size = 0
        self._left_out = 0

    def extend(self, lines: list[str]) -> None:
        taken = 0
        while taken < len(lines) and len(self._head) < HEAD_LINES and self._head_room > 0:
            self._head.append(lines[taken])
            self._head_room -= len(lines[taken])
            taken += 1
        recent = lines[max(taken, len(lines) - TAIL_LINES) :]
        self._left_out += len(lines) - taken - len(recent)
        self._tail.extend(recent)
        self._tail_size += sum(map(len, recent))
        while len(self._tail) > TAIL_LINES or self._tail_size > SECTION_CHARS:
            self._tail_size -= len(self._tail.popleft())
            self._left_out += 1

    def lines(self) -> list[str]:
        gap = [f"[hearth] {self._left_out} lines left out here"] if self._left_out else []
        return [*self._head, *gap, *self._tail]


class LogStream:
    """The engine's output, from the descriptor `fd` (owned and closed here) to everybody who looks at it.

    Every line, masked, goes to `on_lines` in batches: in `loop`'s thread, or in the reader thread where
    `loop` is None. Lines longer than LINE_CHARS arrive shortened. `forward` gets the masked bytes unchanged.
    """

    def __init__(
        self,
        fd: int,
        forward: BinaryIO | int | None,
        redactor: Redactor,
        on_lines: Callable[[list[str]], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.lines_seen = 0
        self.last_line_at = time.monotonic()
        """When the engine last wrote anything (time.monotonic()); bytes without a line end count too."""
        self._fd = fd
        self._forwarder = None if forward is None else Forwarder(forward)
        self._on_lines = on_lines
        self._loop = loop
        self._blocks = Blocks(redactor)
        self._lines = Lines()
        self._lock = threading.RLock()
        self._batch: list[str] = []
        self._batch_size = 0
        self._missed = 0
        self._current: list[str] = []
        self._sections = [Section("")]
        self._marks: list[tuple[int, str]] | None = None
        self._stop = os.eventfd(0)
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="log-read", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        if self._forwarder is not None:
            self._forwarder.start()
        self._thread.start()

    async def drained(self, timeout: float | None = None) -> bool:
        """Wait for the end of the output (no process holds it open any more) until everything is handed on
        and forwarded. False after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        # Not in an executor: a thread that waits there for ever would keep the interpreter from ending.
        while not (done := self._finish(0)) and (end is None or time.monotonic() < end):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        return done

    def close(self) -> None:
        """Take what is there, then stop reading. A process that still writes gets SIGPIPE."""
        with self._lock:
            if self._stop >= 0:
                os.eventfd_write(self._stop, 1)
        self._finish(1.0)

    def mark(self, phase: str, index: int | None = None) -> None:
        """Lines belong to `phase` from here on.

        Inside `on_lines`, `index` says from which line of the batch; without it, from the next batch.
        """
        with self._lock:
            if self._marks is not None:
                self._marks.append((1 << 62 if index is None else index, phase))
            else:
                self._begin(phase)

    def tail(self, n: int) -> list[str]:
        """The last `n` lines, the unfinished one included."""
        return self.all_lines()[-n:] if n > 0 else []

    def section(self, phase: str) -> list[str]:
        """The kept lines of a phase."""
        with self._lock:
            return [line for part in self._sections if part.phase == phase for line in part.lines()]

    def all_lines(self) -> list[str]:
        """Every kept line in the order of time, the unfinished one included."""
        with self._lock:
            kept = [line for part in self._sections for line in part.lines()]
            rest = [] if self._ended else Lines().of(self._blocks.rest())
            return [*kept, *self._current, *self._batch, *rest]

    def _finish(self, timeout: float) -> bool:
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        return self._forwarder is None or self._forwarder.finish(timeout)

    def _run(self) -> None:
        try:
            self._read_all()
            rest = self._blocks.rest()
            self._ended = True
            self._hand_on(rest)
        finally:
            with self._lock:
                os.close(self._fd)
                os.close(self._stop)
                self._stop = -1

    def _read_all(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        wait: int | None = None
        reads_left = 256  # once stopping: a process that writes on and on isn't waited for
        while reads_left:
            ready = dict(poll.poll(wait))
            if self._stop in ready:
                poll.unregister(self._stop)
                wait = 0
            elif self._fd not in ready or not (chunk := os.read(self._fd, READ_BYTES)):
                return
            else:
                self._took(chunk)
            reads_left -= wait == 0

    def _took(self, chunk: bytes) -> None:
        self.last_line_at = time.monotonic()
        try:
            self._hand_on(self._blocks.feed(chunk))
        except Exception:
            # Whatever it is: an engine whose output nobody reads stands still.
            logger.exception("a piece of the engine's log could not be handled")
        if len(chunk) < SMALL_CHUNK:
            time.sleep(PAUSE_SECONDS)

    def _hand_on(self, block: bytes) -> None:
        lines = self._lines.of(block)
        if self._forwarder is not None and block:
            self._forwarder.put(block, len(lines))
        if not lines:
            return
        self.lines_seen += len(lines)
        if self._loop is None:
            self._deliver(lines)
        else:
            self._enqueue(lines, self._loop)

    def _enqueue(self, lines: list[str], loop: asyncio.AbstractEventLoop) -> None:
        """Add to the batch; the loop is woken once for each batch, however many chunks it is made of."""
        with self._lock:
            first = not self._batch
            if self._batch_size > BATCH_CHARS:
                self._missed += len(lines)
                return
            self._batch += lines
            self._batch_size += sum(map(len, lines))
        if first:
            try:
                loop.call_soon_threadsafe(self._deliver_batch)
            except RuntimeError:  # the loop is closed: nobody looks any more, but the lines are kept
                self._keep(self._take_batch(), [])

    def _take_batch(self) -> list[str]:
        with self._lock:
            batch, self._batch, self._batch_size = self._batch, [], 0
            if self._missed:
                batch.append(f"[hearth] {self._missed} log lines not looked at: the supervisor is busy")
                self._missed = 0
        return batch

    def _deliver_batch(self) -> None:
        self._deliver(self._take_batch())

    def _deliver(self, lines: list[str]) -> None:
        self._current, self._marks = lines, []
        try:
            self._on_lines(lines)
        except Exception:
            logger.exception("a batch of log lines could not be looked at")
        finally:
            with self._lock:
                marks, self._marks = self._marks, None
                self._current = []
                self._keep(lines, marks)

    def _keep(self, lines: list[str], marks: list[tuple[int, str]]) -> None:
        with self._lock:
            done = 0
            for index, phase in marks:
                index = min(max(index, done), len(lines))
                self._sections[-1].extend(lines[done:index])
                self._begin(phase)
                done = index
            self._sections[-1].extend(lines[done:])

    def _begin(self, phase: str) -> None:
        if self._sections[-1].phase != phase:
            self._sections.append(Section(phase))
        if len(self._sections) > MOST_SECTIONS:
            del self._sections[MOST_SECTIONS // 2]
