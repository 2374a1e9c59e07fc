from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.engine.command import engine_argv, engine_env
from hearth.engine.dialect import dialect_for
from hearth.errors import ConfigError

DIALECT = dialect_for("0.5.23", "GlmMoeDsaForCausalLM")
PLAN = DIALECT.resolve("standard", 32)


def argv(args: dict[str, Any], version: str = "0.5.23") -> tuple[str, ...]:
    dialect = dialect_for(version)
    return engine_argv("/opt/py", dialect, dialect.resolve("eager"), "/m", "::", 30000, "glm-5", args)


def words(args: dict[str, Any], version: str = "0.5.23") -> list[str]:
    """What the arguments add."""
    given, bare = list(argv(args, version)), list(argv({}, version))
    assert given[: len(bare)] == bare
    return given[len(bare) :]


def test_the_whole_command() -> None:
    words = engine_argv("/opt/py", DIALECT, PLAN, "/models/glm", "0.0.0.0", 30000, "glm-5", {"tp": 8})
    assert " ".join(words) == (
        "/opt/py -m sglang.launch_server --model-path /models/glm --served-model-name glm-5 --host 0.0.0.0"
        " --port 30000 --cuda-graph-backend-prefill disabled --cuda-graph-backend-decode full"
        " --cuda-graph-max-bs-decode 32 --enable-metrics --tp 8"
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"tp": 8}, ["--tp", "8"]),
        ({"trust_remote_code": True}, ["--trust-remote-code"]),
        ({"--mem-fraction-static": 0.85}, ["--mem-fraction-static", "0.85"]),
        ({"tp": False, "dp-size": None}, []),
        ({"tokens": [1, 2, "x y"]}, ["--tokens", "1", "2", "x y"]),
        ({"offsets": [-1, 2]}, ["--offsets", "-1", "2"]),
        ({"seed": -1}, ["--seed=-1"]),
        ({"x": "--y"}, ["--x=--y"]),
        ({"x": ""}, ["--x", ""]),
        (
            {"model-loader-extra-config": {"enable_multithread_load": True, "num_threads": 16}},
            ["--model-loader-extra-config", '{"enable_multithread_load":true,"num_threads":16}'],
        ),
        ({"cuda-graph-max-bs-prefill": 4096}, ["--cuda-graph-max-bs-prefill", "4096"]),
        ({"enable_metrics": True}, []),
    ],
)
def test_arguments(args: dict[str, Any], expected: list[str]) -> None:
    assert words(args) == expected


def test_metrics_can_be_turned_off() -> None:
    assert "--enable-metrics" in argv({})
    assert "--enable-metrics" not in argv({"enable-metrics": False})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("model-path", "model.path"),
        ("model_path", "model.path"),
        ("--model", "model.path"),
        ("model-pa", "short for model-path"),
        ("host", "ports.engine_host"),
        ("port", "ports.engine"),
        ("served_model_name", "served_name"),
        ("api_key", "secrets."),
        ("admin-api-key", "secrets."),
        ("config", "engine.args"),
        ("cuda-graph-backend-prefill", "graphs."),
        ("disable_cuda_graph", "graphs."),
        ("disable-cuda-g", "graphs."),
        ("cuda-graph-max-bs", "graphs."),
        ("enforce-piecewise-cuda-graph", "graphs."),
    ],
)
@pytest.mark.parametrize("value", ["x", None, False])
def test_what_hearth_sets_itself_is_refused(key: str, hint: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        argv({key: value})
    assert f"engine.args: {key}" in str(caught.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"": 1}, "not a flag"),
        ({"tp 8": 1}, "not a flag"),
        ({"Tp": 1}, "not a flag"),
        ({"tp=8": True}, "not a flag"),
        ({"a-b": 1, "a_b": 2}, "there twice"),
        ({"dsa-decode-backend": "a", "nsa-decode-backend": "b"}, "there twice"),
        ({"x": []}, "list is empty"),
        ({"x": ["-y"]}, "can't begin with a dash"),
        ({"x": [True]}, "can't be written"),
        ({"x": object()}, "can't be written"),
        ({"x": "a\0b"}, "NUL"),
        ({"x": {"y": float("nan")}}, "JSON"),
        ({"x": {"y": {1, 2}}}, "JSON"),
    ],
)
def test_bad_arguments_name_the_key(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        argv(args)
    assert str(caught.value).startswith("engine.args: ")
    assert "\n" not in str(caught.value)


def test_sparse_attention_backends_are_spelled_as_the_version_does() -> None:
    for key in ("nsa-decode-backend", "dsa_decode_backend"):
        assert words({key: "tilelang"}) == ["--dsa-decode-backend", "tilelang"]
        assert words({key: "tilelang"}, "0.5.12") == ["--nsa-decode-backend", "tilelang"]
    assert words({"dsa-topk-backend": "x"}, "0.5.12") == ["--dsa-topk-backend", "x"]


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=12), JSONISH, max_size=4))
def test_any_arguments_are_words_or_refused(args: dict[str, Any]) -> None:
    try:
        made = argv(args)
    except ConfigError:
        return
    assert all(isinstance(word, str) and "\0" not in word for word in made)


@given(st.dictionaries(st.text(), JSONISH))
def test_a_mapping_survives_as_json(value: dict[str, Any]) -> None:
    assert json.loads(words({"x": value})[-1].removeprefix("--x=")) == value


BASE = {
    "PATH": "/usr/bin",
    "LC_ALL": "C.UTF-8",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "NCCL_P2P_LEVEL": "SYS",
    "HF_HOME": "/hf",
    "HF_HUB_OFFLINE": "1",
    "HF_TOKEN": "secret",
    "HF_HUB_TOKEN": "secret",
    "SGLANG_PORT": "tcp://10.0.0.1:80",
    "NCCL_PORT": "tcp://10.0.0.1:80",
    "NCCL_SERVICE_HOST": "10.0.0.1",
    "NCCL_SERVICE_PORT_HTTP": "80",
    "CUDA_PORT_80_TCP_ADDR": "10.0.0.1",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "PROMETHEUS_MULTIPROC_DIR": "/tmp/old",
    "PYTHONPATH": "/somewhere",
    "TRITON_CACHE_DIR": "/elsewhere",
    "MY_FLAG": "1",
    "MY_API_KEY": "secret",
}


def test_only_what_is_allowed_passes() -> None:
    env = engine_env(DIALECT, {}, base=BASE)
    own = {"PYTHONUNBUFFERED", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "SGLANG_PYSPY_DUMP_BEFORE_CRASH"}
    passed = {"PATH", "LC_ALL", "CUDA_VISIBLE_DEVICES", "NCCL_P2P_LEVEL", "HF_HOME", "HF_HUB_OFFLINE"}
    assert set(env) == passed | own
    assert env["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "0"


def test_more_can_be_allowed_by_name_or_prefix() -> None:
    env = engine_env(DIALECT, {}, ["MY_*", "HF_TOKEN", "SGLANG_*"], base=BASE)
    assert env["MY_FLAG"] == "1"
    assert env["HF_TOKEN"] == "secret"
    assert not {"MY_API_KEY", "SGLANG_PORT"} & set(env)


def test_caches_and_the_configs_own_values_win() -> None:
    env = engine_env(DIALECT, {"TRITON_CACHE_DIR": "/mine"}, ["TRITON_*"], "/c", BASE)
    assert env["TRITON_CACHE_DIR"] == "/mine"
    assert env["SGLANG_JIT_CACHE_DIR"] == "/c/jit"
    assert env["FLASHINFER_WORKSPACE_BASE"] == "/c"


def test_the_own_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "secret")
    env = engine_env(DIALECT, {})
    assert env["NCCL_DEBUG"] == "INFO"
    assert "HF_TOKEN" not in env


@pytest.mark.parametrize("extra", [{"": "x"}, {"A=B": "x"}, {"A": "x\0"}])
def test_names_that_cannot_be_set(extra: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.env"):
        engine_env(DIALECT, extra, base={})
