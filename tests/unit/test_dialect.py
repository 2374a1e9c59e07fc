from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.engine.dialect import WORDS, Dialect, dialect_for
from hearth.errors import ConfigError, ExitCode, UnknownVersion
from hearth.ladder import GraphPlan

GLM5 = "GlmMoeDsaForCausalLM"
RELEASES = [
    *("0.5.6.post2", "0.5.7", "0.5.8", "0.5.8.post1", "0.5.9", "0.5.10", "0.5.10.post1", "0.5.11", "0.5.12"),
    *("0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17"),
    *("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
]
NEW = "--cuda-graph-backend-prefill {} --cuda-graph-backend-decode {}"


def spelled(version: str, graphs: str, arch: str | None = GLM5) -> str:
    dialect = dialect_for(version, arch)
    return " ".join(dialect.argv(dialect.resolve(graphs)))


@pytest.mark.parametrize(
    ("versions", "piecewise", "standard", "eager"),
    [
        (("0.5.6.post2", "0.5.9"), "--enable-piecewise-cuda-graph", "", "--disable-cuda-graph"),
        (
            ("0.5.10", "0.5.10.post1", "0.5.11", "0.5.12.post1"),
            "--enforce-piecewise-cuda-graph",
            "--disable-piecewise-cuda-graph",
            "--disable-piecewise-cuda-graph --disable-cuda-graph",
        ),
        (
            ("0.5.13", "0.5.13.post1"),
            "",
            "--disable-piecewise-cuda-graph",
            "--disable-piecewise-cuda-graph --disable-cuda-graph",
        ),
        (
            ("0.5.14", "0.5.15.post1", "0.5.16"),
            NEW.format("tc_piecewise", "full"),
            NEW.format("disabled", "full"),
            NEW.format("disabled", "disabled"),
        ),
        (
            ("0.5.17", "0.5.21", "0.5.22", "0.5.23", "0.5.23.post4"),
            NEW.format("breakable", "full"),
            NEW.format("disabled", "full"),
            NEW.format("disabled", "disabled"),
        ),
    ],
)
def test_glm5(versions: tuple[str, ...], piecewise: str, standard: str, eager: str) -> None:
    for version in versions:
        assert spelled(version, "piecewise") == piecewise
        assert spelled(version, "standard") == standard
        assert spelled(version, "eager") == eager


@pytest.mark.parametrize(
    ("version", "arch", "prefill"),
    [
        ("0.5.9", None, ("tc_piecewise", "disabled")),
        ("0.5.11", None, ("tc_piecewise", "disabled")),
        ("0.5.14", None, ("tc_piecewise", "breakable", "disabled")),
        ("0.5.15", None, ("breakable", "tc_piecewise", "disabled")),
        ("0.5.16", GLM5, ("tc_piecewise", "disabled")),
        ("0.5.17", GLM5, ("breakable", "tc_piecewise", "disabled")),
        ("0.5.17", "DeepseekV3ForCausalLM", ("tc_piecewise", "disabled")),
        ("0.5.18", "DeepseekV3ForCausalLM", ("breakable", "tc_piecewise", "disabled")),
        ("0.5.22", GLM5, ("breakable", "disabled")),
    ],
)
def test_prefill_backends_in_ladder_order(version: str, arch: str | None, prefill: tuple[str, ...]) -> None:
    dialect = dialect_for(version, arch)
    assert dialect.prefill == prefill
    assert dialect.ladder(dialect.resolve("piecewise")).prefill == prefill


def test_other_architectures_are_not_enforced() -> None:
    assert spelled("0.5.12", "piecewise", None) == ""
    assert spelled("0.5.12", "piecewise", "LlamaForCausalLM") == ""


def test_breakable_by_request_on_0_5_11_and_never_a_step_down_there() -> None:
    dialect = dialect_for("0.5.11")
    assert dialect.argv(dialect.resolve("breakable,full")) == ("--enable-breakable-cuda-graph",)
    assert "breakable" not in dialect.ladder(dialect.resolve("piecewise")).prefill
    with pytest.raises(ConfigError, match="MLA"):
        dialect_for("0.5.11", GLM5).resolve("breakable,full")


def test_decode_max_bs_by_version_and_only_with_decode_graphs() -> None:
    assert spelled("0.5.13", "tc_piecewise,full,32") == "--cuda-graph-max-bs 32"
    assert spelled("0.5.14", "disabled,breakable,32").endswith("breakable --cuda-graph-max-bs-decode 32")
    assert "max-bs" not in spelled("0.5.23", "disabled,disabled,32")
    assert dialect_for("0.5.23").resolve("piecewise", 16) == GraphPlan("breakable", "full", 16)


def test_ladder_keeps_the_other_kind_and_never_climbs_in_decode() -> None:
    dialect = dialect_for("0.5.21")
    ladder = dialect.ladder(dialect.resolve("tc_piecewise,breakable"))
    assert ladder.prefill == ("tc_piecewise", "breakable", "disabled")
    assert ladder.decode == ("breakable", "disabled")
    assert dialect.ladder(dialect.resolve("piecewise")).decode == ("full", "disabled")
    assert dialect.ladder(dialect.resolve("full,full")).prefill == (
        *("full", "breakable", "tc_piecewise", "disabled"),
    )


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "a",
            "Piecewise",
            "full",
            "tc_piecewise,full",
            "breakable,tc_piecewise",
            ",",
            "breakable,full,0",
        ),
        *(
            "breakable,full,-1",
            "breakable,full,",
            "breakable,full,8,8",
            "breakable,full,٣",
            "breakable,full,1e3",
        ),
        "breakable,full," + "9" * 5000,
    ],
)
def test_bad_plans_name_what_is_allowed(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"PREFILL,DECODE.*breakable\|disabled\|full.*full\|disabled\|breakable"
    ):
        dialect_for("0.5.23").resolve(text)


def test_a_batch_given_twice_must_be_the_same() -> None:
    dialect = dialect_for("0.5.23")
    assert dialect.resolve("breakable,full,32", 32).decode_max_bs == 32
    with pytest.raises(ConfigError, match="given twice: 32 and 64"):
        dialect.resolve("breakable,full,32", 64)
    with pytest.raises(ConfigError, match="at least 1"):
        dialect.argv(GraphPlan("breakable", "full", 0))


def test_argv_refuses_what_the_version_has_not() -> None:
    for version, plan in [
        ("0.5.9", GraphPlan("breakable", "full")),
        ("0.5.13", GraphPlan("disabled", "breakable")),
        ("0.5.14", GraphPlan("full", "full")),
        ("0.5.22", GraphPlan("tc_piecewise", "full")),
        ("0.5.21", GraphPlan("breakable", "tc_piecewise")),
    ]:
        with pytest.raises(ConfigError):
            dialect_for(version).argv(plan)


@pytest.mark.parametrize("version", RELEASES)
def test_every_release_has_all_three_words_and_a_way_down(version: str) -> None:
    for arch, word in itertools.product((None, GLM5), WORDS):
        dialect = dialect_for(version, arch)
        plan = dialect.resolve(word)
        assert plan.name == word
        assert dialect.version == version
        ladder = dialect.ladder(plan)
        assert (ladder.prefill[-1], ladder.decode[-1]) == ("disabled", "disabled")
        for prefill, decode in itertools.product(ladder.prefill, ladder.decode):
            dialect.argv(GraphPlan(prefill, decode, 8))


@pytest.mark.parametrize(
    "version",
    [
        "0.5.6",
        "0.5.6.post1",
        "0.5.24",
        "0.6",
        "1.0",
        "0.5.9.1",
        "0.5.23rc1",
        "0.5.24.dev1",
        "1!0.5.23",
        "",
        "newest",
    ],
)
def test_unknown_versions_name_the_known_ones(version: str) -> None:
    with pytest.raises(UnknownVersion, match=r"0\.5\.6\.post2 to 0\.5\.23") as caught:
        dialect_for(version)
    assert caught.value.code is ExitCode.CONFIG


def test_a_local_label_is_the_same_release() -> None:
    assert dialect_for("0.5.23+cu130").version == "0.5.23"


@given(st.text(max_size=20))
def test_any_version_text_is_known_or_refused(text: str) -> None:
    with contextlib.suppress(UnknownVersion):
        assert dialect_for(text).prefill[-1] == "disabled"


@given(st.sampled_from(RELEASES), st.text(alphabet="breakablfuldisctp_ew,0123456789 -", max_size=30))
def test_any_plan_text_is_a_plan_or_refused(version: str, text: str) -> None:
    dialect = dialect_for(version)
    try:
        plan = dialect.resolve(text)
    except ConfigError:
        return
    assert dialect.argv(plan) is not None
    assert dialect.resolve(str(plan)) == plan


def test_what_else_goes_by_version() -> None:
    assert [dialect_for(v).decode_first for v in ("0.5.9", "0.5.13.post1", "0.5.14")] == [True, True, False]
    assert [dialect_for(v).dsa_prefix for v in ("0.5.12.post1", "0.5.13", "0.5.23")] == ["nsa", "dsa", "dsa"]
    assert dialect_for("0.5.19").jit_guard == {}
    assert dialect_for("0.5.20").jit_guard == {"SGLANG_CRASH_ON_JIT_COMPILE": "1"}


def test_caches_lie_below_one_directory() -> None:
    for version in RELEASES:
        env = dialect_for(version).cache_env("/var/cache/hearth/")
        assert all(path.startswith("/var/cache/hearth/") for path in env.values())
        assert env["TRITON_CACHE_DIR"] == "/var/cache/hearth/triton"
        newer = RELEASES.index(version) >= RELEASES.index("0.5.18")
        assert ("SGLANG_JIT_CACHE_DIR" in env) == newer


HELP = """
usage: launch_server.py [-h] --model-path MODEL_PATH
                        [--cuda-graph-backend-decode {full,breakable,newkind,disabled}]
options:
  --cuda-graph-backend-decode {full,breakable,newkind,disabled}
                        Backend for the decode phase.
  --cuda-graph-backend-prefill
        {full,breakable,
        disabled}
  --cuda-graph-max-bs-decode CUDA_GRAPH_MAX_BS_DECODE
  --disable-cuda-graph
"""


def test_from_help_of_a_version_outside_the_table() -> None:
    dialect = Dialect.from_help("0.5.24.dev3", HELP)
    assert dialect.prefill == ("breakable", "disabled")
    assert dialect.on_request == ("full",)
    assert (dialect.decode, dialect.decode_on_request) == (("full", "disabled"), ("breakable",))
    assert " ".join(dialect.argv(dialect.resolve("piecewise", 8))) == (
        NEW.format("breakable", "full") + " --cuda-graph-max-bs-decode 8"
    )


def test_from_help_keeps_the_architectures_exceptions() -> None:
    both = HELP.replace("disabled}", "tc_piecewise,disabled}")
    assert Dialect.from_help("0.5.16.post3", both, GLM5).prefill == ("tc_piecewise", "disabled")
    assert Dialect.from_help("0.5.16rc1", both, GLM5).prefill == ("tc_piecewise", "disabled")
    assert Dialect.from_help("0.5.16rc1", both).prefill == ("breakable", "tc_piecewise", "disabled")


def test_from_help_without_piecewise_kinds() -> None:
    text = HELP.replace("{full,breakable,\n        disabled}", "{full,disabled}")
    dialect = Dialect.from_help("0.6.0", text)
    assert dialect.prefill == ("disabled",)
    assert dialect.resolve("standard") == GraphPlan("disabled", "full")
    with pytest.raises(ConfigError, match="no piecewise prefill graphs"):
        dialect.resolve("piecewise")


def test_from_help_of_something_else() -> None:
    with pytest.raises(UnknownVersion, match="none of the CUDA-graph flags"):
        Dialect.from_help("9.9", "usage: ls [--all]")
    with pytest.raises(UnknownVersion, match="not a version number"):
        Dialect.from_help("banana", HELP)
