"""The log stream: nothing is lost, nothing secret leaves, and the engine never waits for us."""

import asyncio
import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.engine.forward import Forwarder
from hearth.engine.logstream import LINE_CHARS, Blocks, Lines, LogStream, Section, log_pipe, shortened
from hearth.engine.redact import Redactor

PLAIN = Redactor(())
SECRET = "Tr0ub4dor&3/x"


class Log:
    """A stream on a pipe, with what came out of it."""

    def __init__(self, forward: object = None, secrets: tuple[str, ...] = (), loop: bool = True) -> None:
        read, self.fd = log_pipe()
        self.lines: list[str] = []
        self.on_lines: Callable[[list[str]], None] = self.lines.extend
        running = asyncio.get_running_loop() if loop else None
        self.stream = LogStream(read, forward, Redactor(secrets), lambda new: self.on_lines(new), running)  # type: ignore[arg-type]
        self.stream.start()

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.fd, data) :]

    async def end(self) -> list[str]:
        os.close(self.fd)
        assert await self.stream.drained(20)
        return self.lines


async def test_every_kind_of_line_end_and_any_byte() -> None:
    out = io.BytesIO()
    log = Log(out)
    data = b"one\ntwo\r\n\rbar 1%\rbar 2%\n\n" + b"nul \0 bad \xff\xfe\nh\xc3\xa9\nunfinished"
    log.write(data)
    lines = await log.end()
    assert lines == ["one", "two", "", "bar 1%", "bar 2%", "", "nul \0 bad ��", "hé", "unfinished"]
    assert out.getvalue() == data
    assert log.stream.lines_seen == 9
    assert log.stream.all_lines() == lines
    assert log.stream.tail(2) == ["hé", "unfinished"]


@given(st.lists(st.sampled_from([b"\r", b"\n", b"a", b"b\r\n"]), max_size=30), st.data())
def test_lines_do_not_depend_on_where_chunks_end(parts: list[bytes], data: st.DataObject) -> None:
    text = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    blocks, lines = Blocks(PLAIN), Lines()
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += lines.of(blocks.feed(text[begin:end]))
    found += lines.of(blocks.rest())
    assert found == [line.decode() for line in text.splitlines()]


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            [b"x" * 30, b" ", SECRET.encode(), b"--api-key 'Zq77777'", b"api_key='Zq8888888'", b"\n"]
        )
    ),
    st.lists(st.integers(1, 40), min_size=1),
)
def test_a_secret_across_chunks_is_masked(parts: list[bytes], sizes: list[int]) -> None:
    text = b"".join(parts)
    # Lines of more than 50 bytes (and what the rules need to look back at) are cut: also there.
    redactor = Redactor([SECRET])
    redactor.longest = 64
    blocks = Blocks(redactor, longest=50)
    out, place = b"", 0
    while place < len(text):
        size = sizes[len(out) % len(sizes)]
        out += blocks.feed(text[place : place + size])
        place += size
    out += blocks.rest()
    assert SECRET.encode() not in out
    assert b"Zq" not in out
    assert out.count(b"\n") == text.count(b"\n")


async def test_an_unfinished_line_is_shown_without_the_beginning_of_a_secret() -> None:
    log = Log(secrets=(SECRET,))
    log.write(b"first\nCapturing batches: 50% " + SECRET[:7].encode())
    for _ in range(100):
        await asyncio.sleep(0.01)
        if len(log.stream.all_lines()) == 2:
            break
    assert log.stream.tail(1) == ["Capturing batches: 50% ***"]
    await log.end()


async def test_a_line_of_ten_megabytes() -> None:
    out = io.BytesIO()
    log = Log(out, (SECRET,))
    writer = threading.Thread(
        target=log.write, args=(b"a" * 5_000_000 + SECRET.encode() + b"b" * 5_000_000 + b"\nnext\n",)
    )
    writer.start()
    await asyncio.to_thread(writer.join)
    long, following = await log.end()
    assert following == "next"
    assert len(long) <= LINE_CHARS
    assert long.startswith("aaa")
    assert long.endswith("bbb")
    assert "characters left out" in long
    assert out.getvalue() == b"a" * 5_000_000 + b"***" + b"b" * 5_000_000 + b"\nnext\n"


async def test_a_line_without_end_is_cut_not_kept_for_ever() -> None:
    log = Log(forward=None)
    writer = threading.Thread(target=lambda: [log.write(b"z" * (1 << 20)) for _ in range(40)])
    writer.start()
    await asyncio.to_thread(writer.join)
    lines = await log.end()
    assert 2 <= len(lines) <= 4


async def test_a_blocked_stdout_does_not_hold_the_writer_up_and_the_loss_is_told() -> None:
    blocked, stdout = os.pipe()
    log = Log(stdout)
    block = b"".join(b"%07d " % i + b"x" * 112 + b"\n" for i in range(10_000))
    for _ in range(20):  # 24 MB, three times what is buffered: a writer held up would never get through
        await asyncio.to_thread(log.write, block)
    os.close(log.fd)
    async with asyncio.timeout(120):
        while len(log.lines) < 200_000:
            await asyncio.sleep(0.01)
    assert not await log.stream.drained(0.5)

    def read_on() -> bytes:
        with os.fdopen(blocked, "rb") as reader:
            return reader.read()

    text = asyncio.create_task(asyncio.to_thread(read_on))
    assert await log.stream.drained(120)
    os.close(stdout)
    lines = (await text).decode().splitlines()
    # Between two losses a small block may still have fitted: each loss is told where it is.
    told = [re.fullmatch(r"\[hearth\] (\d+) log lines not forwarded: stdout is slow", line) for line in lines]
    lost = [int(note[1]) for note in told if note]
    assert lost
    assert sum(lost) + len(lines) - len(lost) == 200_000


async def test_a_closed_stdout_is_no_reason_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    read, stdout = os.pipe()
    os.close(read)
    log = Log(stdout)
    for number in range(3):
        log.write(b"line %d\n" % number)
        await asyncio.sleep(0.03)
    assert await log.end() == ["line 0", "line 1", "line 2"]
    assert "no longer forwarded" in caplog.text
    os.close(stdout)


async def test_a_stdout_that_does_not_block_is_waited_for() -> None:
    read, stdout = os.pipe()
    os.set_blocking(stdout, False)
    forwarder = Forwarder(stdout)
    forwarder.start()
    forwarder.put(b"x" * 300_000, 1)
    with os.fdopen(read, "rb") as file:
        assert len(await asyncio.to_thread(file.read, 300_000)) == 300_000
    assert forwarder.finish(5)
    os.close(stdout)


async def test_sections_follow_the_marks_to_the_line() -> None:
    log = Log()

    def look(new: list[str]) -> None:
        for index, line in enumerate(new):
            if line.startswith("begin "):
                log.stream.mark(line.split()[1], index)

    log.on_lines = look
    log.write(b"a\nbegin load\nb\nbegin capture_decode\nc\n")
    await asyncio.sleep(0.1)
    log.write(b"d\n")
    await log.end()
    log.stream.mark("drain")
    assert log.stream.section("") == ["a"]
    assert log.stream.section("load") == ["begin load", "b"]
    assert log.stream.section("capture_decode") == ["begin capture_decode", "c", "d"]
    assert log.stream.section("drain") == []
    assert log.stream.all_lines() == ["a", "begin load", "b", "begin capture_decode", "c", "d"]


async def test_lines_are_there_for_a_look_from_inside_the_callback() -> None:
    log = Log()
    seen: list[str] = []
    log.on_lines = lambda new: seen.extend(log.stream.tail(5))
    log.write(b"fatal\n")
    await log.end()
    assert seen == ["fatal"]


@pytest.mark.parametrize("loop", [True, False])
async def test_a_callback_that_raises_stops_nothing(loop: bool, caplog: pytest.LogCaptureFixture) -> None:
    log = Log(loop=loop)
    log.on_lines = lambda new: 1 / 0  # type: ignore[assignment,return-value]
    log.write(b"a\n")
    await asyncio.sleep(0.05)
    log.write(b"b\n")
    await log.end()
    assert log.stream.all_lines() == ["a", "b"]
    assert "ZeroDivisionError" in caplog.text


async def test_a_busy_loop_gets_batches_not_chunks() -> None:
    log = Log()
    sizes: list[int] = []
    log.on_lines = lambda new: sizes.append(len(new))
    for _ in range(20):
        log.write(b"x\n")
        time.sleep(0.01)  # the loop is blocked meanwhile
    await log.end()
    assert sum(sizes) == 20
    assert len(sizes) <= 2


async def test_close_takes_what_is_there_and_frees_everything() -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(20):
        log = Log()
        log.write(b"last words\n")
        log.stream.close()
        log.stream.close()
        await asyncio.sleep(0)
        assert log.stream.all_lines() == ["last words"]
        os.close(log.fd)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert not [t for t in threading.enumerate() if t.name.startswith("log-")]


async def test_output_of_real_processes_in_order() -> None:
    log = Log()
    code = "import sys\nfor i in range(500):\n    print(i, file=(sys.stdout, sys.stderr)[i % 2], flush=True)"
    process = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], stdout=log.fd, stderr=log.fd, check=True
    )
    assert process.returncode == 0
    assert await log.end() == [str(i) for i in range(500)]


@given(st.lists(st.integers(0, 3000), max_size=30), st.integers(0, 30_000))
def test_a_section_is_bounded_and_keeps_both_ends(batches: list[int], width: int) -> None:
    section = Section("load")
    every: list[str] = []
    for size in batches:
        new = [f"{len(every) + i} ".ljust(min(width, 2_000_000 // (size + 1)), "x") for i in range(size)]
        every += new
        section.extend(new)
    kept = section.lines()
    assert len(kept) <= 601
    assert sum(map(len, kept)) <= 2 * (256 << 10) + 30_000 + 50
    if every:
        assert kept[0] == every[0]
        assert kept[-1] == every[-1] or len(every[-1]) > 200_000
    gaps = [line for line in kept if line.startswith("[hearth] ")]
    left_out = int(gaps[0].split()[1]) if gaps else 0
    assert len(kept) - len(gaps) + left_out == len(every)


def test_shortened_lines_say_what_is_missing() -> None:
    assert shortened("x" * LINE_CHARS) == "x" * LINE_CHARS
    line = shortened("a" * 20_000 + "b" * 20_000)
    assert len(line) <= LINE_CHARS
    assert line.count("a") - 4 + line.count("b") + int(line.split("[hearth: ")[1].split()[0]) in range(
        39_990, 40_010
    )
