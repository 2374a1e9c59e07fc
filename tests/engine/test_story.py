"""One engine's story, in order: its piecewise plan fails, the next one serves, it is killed, it drains."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.engine.conftest import Hearth, get, gone


def metrics(hearth: Hearth) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    page = get(f"{hearth.url}/metrics")[1]
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def stream(hearth: Hearth, tokens: int, into: list[str]) -> None:
    """Stream a chat answer; the raw `data:` payloads go to `into`."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{hearth.engine_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        for raw in answer:
            line = raw.decode().strip()
            if line.startswith("data:"):
                into.append(line[5:].strip())


def test_a_failed_capture_steps_down_and_the_next_plan_serves(hearth: Hearth) -> None:
    hearth.config["engine"]["env"]["HEARTH_FAULT"] = "capture_prefill"
    hearth.start()
    early = hearth.wait_until("a first answer", lambda status: True, 30)
    assert early["state"] in ("idle", "starting")
    assert get(f"{hearth.url}/readyz")[0] == 503
    assert get(f"{hearth.url}/livez")[0] == 200
    status = hearth.wait_ready()
    assert status["plan"]["wanted"]["name"] == "piecewise"
    assert status["plan"]["started"]["prefill"] == "disabled"
    assert status["plan"]["started"]["decode"] == "full"
    assert [failure["kind"] for failure in status["failures"]] == ["graph_capture"]
    assert status["failures"][0]["axis"] == "prefill"
    assert "Unsupported" in " ".join(status["failures"][0]["evidence"])
    assert get(f"{hearth.url}/readyz")[0] == 200


def test_what_the_cpu_engine_silently_left_out_is_shown(hearth: Hearth) -> None:
    status = hearth.status()
    assert status is not None
    assert status["plan"]["effective"]["decode"] == "disabled"
    assert status["plan"]["downgrades"] == ["decode: asked for full, runs disabled"]
    assert metrics(hearth)[("hearth_graph_plan_downgraded", ())] == 1


def test_metrics_tell_the_same(hearth: Hearth) -> None:
    seen = metrics(hearth)
    assert seen[("hearth_state", (("state", "serving"),))] == 1
    assert seen[("hearth_ladder_steps", ())] == 1
    assert seen[("hearth_engine_restarts_total", (("kind", "graph_capture"),))] == 1
    steps = {key[1]: value for key, value in seen.items() if key[0] == "hearth_fallbacks_total"}
    assert list(steps.values()) == [1]
    assert ("axis", "prefill") in next(iter(steps))
    assert seen[("hearth_recovery_seconds_count", ())] == 1


def test_a_chat_request_is_answered_and_its_tokens_are_counted(hearth: Hearth) -> None:
    chunks: list[str] = []
    stream(hearth, 40, chunks)
    assert chunks[-1] == "[DONE]"
    status = hearth.wait_until(
        "counted tokens", lambda s: s["graph_passes"].get("decode_none", 0) > 30, limit=30
    )
    assert status["graph_passes"].get("prefill_cuda_graph", 0) == 0
    seen = metrics(hearth)
    assert seen[("hearth_tokens_total", (("kind", "generation"),))] >= 40
    assert seen[("hearth_last_token_timestamp_seconds", ())] > time.time() - 120


def test_hearth_status_says_it_in_words(hearth: Hearth) -> None:
    shown = hearth.cli("status", "--url", hearth.url)
    assert shown.returncode == 0, shown.stderr
    assert "serving" in shown.stdout
    assert "standard" in shown.stdout
    assert "graph_capture" in shown.stdout
    document = json.loads(hearth.cli("status", "--url", hearth.url, "--json").stdout)
    assert {"state", "phase", "plan", "tokens_per_second", "restarts", "failures", "sentence"} <= set(
        document
    )


def test_a_killed_scheduler_is_named_and_the_engine_comes_back(hearth: Hearth) -> None:
    hearth.scheduler().kill()
    hearth.wait_until("the failure", lambda s: len(s["failures"]) == 2, limit=120)
    status = hearth.wait_ready()
    assert status["failures"][-1]["kind"] == "engine_killed"
    assert status["failures"][-1]["phase"] == "serving"
    assert status["plan"]["started"]["prefill"] == "disabled", "one death is no reason to step down"
    assert status["restarts"] == 2


def test_a_stop_lets_the_running_stream_end(hearth: Hearth) -> None:
    chunks: list[str] = []
    reader = threading.Thread(target=stream, args=(hearth, 600, chunks))
    reader.start()
    while len(chunks) < 5:
        time.sleep(0.05)
    assert hearth.process is not None
    hearth.process.send_signal(signal.SIGTERM)
    assert len(hearth.engine_processes()) >= 3
    hearth.wait_until("draining", lambda s: s["state"] == "draining", limit=10)
    assert get(f"{hearth.url}/readyz")[0] == 503
    reader.join(120)
    assert chunks[-1] == "[DONE]"
    assert hearth.wait_exit(60) == 0
    assert not hearth.engine_processes()


def test_status_after_the_end_says_how_it_ended(hearth: Hearth) -> None:
    shown = hearth.cli("status", "-c", str(hearth.config_file))
    assert shown.returncode == 0, shown.stderr
    assert "No supervisor is running" in shown.stdout
    assert "stopped" in shown.stdout


def test_a_restarted_supervisor_goes_straight_to_the_remembered_plan(hearth: Hearth) -> None:
    hearth.start()
    status = hearth.wait_ready()
    assert status["failures"] == []
    assert status["restarts"] == 0
    assert status["plan"]["started"]["prefill"] == "disabled"
    assert status["ladder_steps"] == 1


def test_killing_the_supervisor_leaves_no_orphan(hearth: Hearth) -> None:
    assert hearth.process is not None
    assert len(hearth.engine_processes()) >= 4
    hearth.process.kill()
    hearth.process.wait()
    assert gone(hearth, 5), [process.cmdline() for process in hearth.engine_processes()]


def test_promote_forgets_the_step_down(hearth: Hearth) -> None:
    said = hearth.cli("promote", "-c", str(hearth.config_file))
    assert said.returncode == 0, said.stderr
    assert "Forgot" in said.stdout
    again = hearth.cli("promote", "-c", str(hearth.config_file))
    assert "nothing to forget" in again.stdout
