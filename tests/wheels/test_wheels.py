"""The dialect against the argument definitions of real SGLang releases (both sides of every change)."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import cache

import pytest
from packaging.version import Version

from hearth.engine.command import engine_argv
from hearth.engine.dialect import Dialect, dialect_for
from hearth.errors import ConfigError
from hearth.ladder import GraphPlan
from tests.wheels.wheel import Wheel, fetch

pytestmark = pytest.mark.wheels

GLM5 = "GlmMoeDsaForCausalLM"
VERSIONS = [
    *("0.5.6.post2", "0.5.9", "0.5.10", "0.5.11", "0.5.12", "0.5.13", "0.5.14", "0.5.15"),
    *("0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
]
ARCHS = [None, GLM5, "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"]
# First and last release of each flag that some dialect uses; None: still there in the newest.
LIFE: dict[str, tuple[str, str | None]] = {
    "--enable-piecewise-cuda-graph": ("0.5.6.post2", "0.5.13"),
    "--disable-piecewise-cuda-graph": ("0.5.10", "0.5.19"),
    "--enforce-piecewise-cuda-graph": ("0.5.10", "0.5.19"),
    "--enable-breakable-cuda-graph": ("0.5.11", "0.5.19"),
    "--disable-cuda-graph": ("0.5.6.post2", None),
    "--cuda-graph-max-bs": ("0.5.6.post2", "0.5.19"),
    "--cuda-graph-backend-prefill": ("0.5.14", None),
    "--cuda-graph-backend-decode": ("0.5.14", None),
    "--cuda-graph-max-bs-decode": ("0.5.14", None),
    "--nsa-prefill-backend": ("0.5.6.post2", "0.5.19"),
    "--nsa-decode-backend": ("0.5.6.post2", "0.5.19"),
    "--dsa-prefill-backend": ("0.5.13", None),
    "--dsa-decode-backend": ("0.5.13", None),
}
# Graph flags that don't change the plan: theirs is the config's engine.args.
TUNING = {
    *("--cuda-graph-bs-prefill", "--cuda-graph-max-bs-prefill", "--cuda-graph-max-seq-len-prefill"),
    *("--cuda-graph-prefill-max-context", "--cuda-graph-tc-compiler", "--disable-cuda-graph-padding"),
    *("--enable-profile-cuda-graph", "--enable-cudagraph-gc", "--piecewise-cuda-graph-compiler"),
    *("--piecewise-cuda-graph-tokens", "--piecewise-cuda-graph-max-tokens"),
}


@cache
def wheel_of(version: str) -> Wheel:
    return fetch(version)


@pytest.fixture(params=VERSIONS)
def wheel(request: pytest.FixtureRequest) -> Wheel:
    return wheel_of(request.param)


def between(version: str, first: str, last: str | None) -> bool:
    return Version(first) <= Version(version) and (last is None or Version(version) <= Version(last))


def plans(dialect: Dialect) -> Iterator[GraphPlan]:
    prefill = (*dialect.prefill, *dialect.on_request)
    decode = (*dialect.decode, *dialect.decode_on_request)
    for graphs, size in itertools.product(itertools.product(prefill, decode), (None, 32)):
        yield GraphPlan(*graphs, size)


def pairs(words: tuple[str, ...]) -> Iterator[tuple[str, str | None]]:
    """Each flag with its value, None for a bare one."""
    for place, word in enumerate(words):
        if word.startswith("--"):
            after = words[place + 1 : place + 2]
            yield word, after[0] if after and not after[0].startswith("--") else None


@pytest.mark.parametrize("arch", ARCHS)
def test_every_flag_of_every_plan_is_defined_and_takes_the_value(wheel: Wheel, arch: str | None) -> None:
    dialect = dialect_for(wheel.version, arch)
    for plan in plans(dialect):
        for name, value in pairs(dialect.argv(plan)):
            flag = wheel.flags.get(name)
            assert flag is not None, f"{wheel.version} has no {name} (plan {plan})"
            assert flag.takes_value == (value is not None), f"{wheel.version} {name} {value}"
            assert flag.choices is None or value in flag.choices, f"{wheel.version} {name} {value}"
            assert between(wheel.version, *LIFE[name])


@pytest.mark.parametrize("flag", LIFE)
def test_flags_of_other_versions_are_not_defined(wheel: Wheel, flag: str) -> None:
    assert (flag in wheel.flags) == between(wheel.version, *LIFE[flag])


def test_flags_that_every_start_uses_are_defined(wheel: Wheel) -> None:
    dialect = dialect_for(wheel.version)
    args = {"tp": 8, "nsa-decode-backend": "x", "dsa_prefill_backend": "y"}
    words = engine_argv("python3", dialect, dialect.resolve("piecewise"), "/m", "h", 1, "n", args)
    given = {name for name, _ in pairs(words)}
    assert given - set(wheel.flags) - {"--tp"} == set()
    assert wheel.flags.keys() & {"--tp", "--tp-size"}
    assert wheel.flags["--config"].takes_value
    assert '__name__ == "__main__"' in wheel.text(dialect.serve_command[2].replace(".", "/") + ".py")


def test_every_graph_flag_is_refused_as_an_argument_or_harmless(wheel: Wheel) -> None:
    dialect = dialect_for(wheel.version)
    plan = dialect.resolve("standard")
    for flag in wheel.flags:
        words = ("python3", dialect, plan, "/m", "h", 30000, "n", {flag.removeprefix("--"): "value"})
        owned = ("cuda-graph" in flag and flag not in TUNING) or flag in (
            *("--model", "--model-path", "--host", "--port", "--served-model-name"),
            *("--api-key", "--admin-api-key", "--config"),
        )
        if owned:
            with pytest.raises(ConfigError):
                engine_argv(*words)
        else:
            assert ("value" in engine_argv(*words)) == (flag != "--help")


def test_backends_are_the_ones_that_the_release_allows(wheel: Wheel) -> None:
    dialect = dialect_for(wheel.version)
    if Version(wheel.version) < Version("0.5.14"):
        assert "--cuda-graph-backend-decode" not in wheel.flags
        assert set(dialect.decode) == {"full", "disabled"}
        breakable = "--enable-breakable-cuda-graph" in wheel.flags
        assert ("breakable" in (*dialect.prefill, *dialect.on_request)) == breakable
        return
    allowed = wheel.allowed_backends
    assert {*dialect.prefill, *dialect.on_request} == set(allowed["prefill"])
    assert {*dialect.decode, *dialect.decode_on_request} == set(allowed["decode"]) - {"tc_piecewise"}
    if "tc_piecewise" in allowed["decode"]:
        source = "sglang/srt/model_executor/runner_backend/utils.py"
        assert "decode='tc_piecewise' is not yet implemented" in wheel.text(source)


def test_capture_order(wheel: Wheel) -> None:
    assert dialect_for(wheel.version).decode_first == wheel.decode_first


def test_disabling_decode_graphs_leaves_prefill_graphs_on_before_per_phase_flags(wheel: Wheel) -> None:
    if not between(wheel.version, "0.5.10", "0.5.13"):
        assert "--disable-piecewise-cuda-graph" not in dialect_for(wheel.version).argv(
            GraphPlan("disabled", "disabled")
        )
        return
    source = wheel.function("sglang/srt/model_executor/model_runner.py", "init_piecewise_cuda_graphs")
    assert "server_args.disable_piecewise_cuda_graph" in source
    assert "server_args.disable_cuda_graph" not in source


def test_piecewise_is_enforced_for_exactly_the_architectures_that_the_release_turns_it_off_for(
    wheel: Wheel,
) -> None:
    everything = {a for v in VERSIONS for a in wheel_of(v).piecewise_blacklist} | {GLM5, "LlamaForCausalLM"}
    enforced = {
        arch
        for arch in everything
        if "--enforce-piecewise-cuda-graph"
        in dialect_for(wheel.version, arch).argv(dialect_for(wheel.version, arch).resolve("piecewise"))
    }
    by_flag = between(wheel.version, "0.5.10", "0.5.13")
    assert enforced == (wheel.piecewise_blacklist if by_flag else set())
    assert (GLM5 in wheel.piecewise_blacklist) == between(wheel.version, "0.5.10", "0.5.12")


def test_breakable_prefill_is_refused_for_mla_until_the_release_can(wheel: Wheel) -> None:
    rules = wheel.text("sglang/srt/server_args.py")
    whole, without_dsa = '("MLA attention"' in rules, '"MLA attention (non-DSA)"' in rules
    assert whole == between(wheel.version, "0.5.14", "0.5.16")
    assert without_dsa == (wheel.version == "0.5.17")
    if not between(wheel.version, "0.5.11", "0.5.17"):
        return
    dsa = {GLM5, "GlmMoeDsaForCausalLMNextN", "DeepseekV32ForCausalLM"}
    assert GLM5 in wheel.mla_archs
    for arch in wheel.mla_archs:
        dialect = dialect_for(wheel.version, arch)
        offered = "breakable" in (*dialect.prefill, *dialect.on_request)
        assert offered == (without_dsa and arch in dsa), arch


def test_variables_are_read_by_the_release(wheel: Wheel) -> None:
    dialect = dialect_for(wheel.version)
    ours = {name for name in dialect.cache_env("/c") if name.startswith("SGLANG_")} | set(dialect.jit_guard)
    later = {"SGLANG_JIT_CACHE_DIR", "SGLANG_CUTE_AOT_CACHE_DIR", "SGLANG_CRASH_ON_JIT_COMPILE"}
    crash = set(dialect.crash_env) if Version(wheel.version) >= Version("0.5.13") else set()
    assert wheel.mentions(ours | later | crash) == ours | crash


def test_a_dialect_read_from_help_spells_the_same(wheel: Wheel) -> None:
    parser = argparse.ArgumentParser(prog="sglang")
    for flag in wheel.flags.values():
        action = {"choices": flag.choices} if flag.takes_value else {"action": "store_true"}
        if flag.name != "--help":
            parser.add_argument(flag.name, **action)  # type: ignore[arg-type]
    for arch in ARCHS:
        table = dialect_for(wheel.version, arch)
        read = Dialect.from_help(wheel.version, parser.format_help(), arch)
        assert set(read.prefill) == set(table.prefill)
        assert read.decode == table.decode
        assert read.decode_first == table.decode_first
        for plan in plans(table):
            assert read.argv(plan) == table.argv(plan)
