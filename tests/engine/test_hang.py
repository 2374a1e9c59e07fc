"""An engine that hangs without dying, in capture and while serving: SGLang's own watchdog sees neither."""

from __future__ import annotations

import contextlib
import signal
import threading

import psutil

from tests.engine.conftest import Hearth
from tests.engine.test_story import stream


def test_a_hang_in_capture_is_killed_at_its_limit_and_stepped_down(hearth: Hearth) -> None:
    hearth.config["engine"]["env"]["HEARTH_FAULT"] = "capture_hang"
    hearth.config["limits"]["phases"] = {"capture_prefill": {"silence": 15}}
    hearth.config["limits"]["stall"] = 15
    hearth.start()
    status = hearth.wait_ready()
    assert [(f["kind"], f["phase"], f["axis"]) for f in status["failures"]] == [
        ("hang", "capture_prefill", "prefill")
    ]
    assert status["plan"]["started"]["prefill"] == "disabled"


def test_a_stopped_scheduler_is_noticed_by_its_missing_tokens(hearth: Hearth) -> None:
    reader = threading.Thread(target=_stream_until_cut, args=(hearth,))
    reader.start()
    hearth.wait_until("a running request", lambda s: s["requests"]["running"] > 0, 60)
    stopped = hearth.scheduler()
    stopped.send_signal(signal.SIGSTOP)
    try:
        status = hearth.wait_until("the hang", lambda s: len(s["failures"]) == 2, 120)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            stopped.send_signal(signal.SIGCONT)
    assert status["failures"][-1]["kind"] == "hang"
    assert status["failures"][-1]["phase"] == "serving"
    assert "no token" in status["failures"][-1]["evidence"][0]
    status = hearth.wait_ready()
    assert status["plan"]["started"]["prefill"] == "disabled", "one hang is no reason to step down"
    reader.join(30)


def _stream_until_cut(hearth: Hearth) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream(hearth, 4000, [])
