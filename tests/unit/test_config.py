"""Every way to get a config wrong is one line that names the place and what to write."""

import ast
import inspect
import os
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from hearth import config as config_module
from hearth import yamltext
from hearth.config import Config, load, parse
from hearth.config_explain import bare, describe, show
from hearth.errors import ConfigError, ExitCode, HearthError, MissingError
from hearth.failure import Phase

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, DOCS = ROOT / "hearth.example.yaml", ROOT / "docs/configuration.md"
MODEL = "model: {path: /m, served_name: s}\n"
BASE = MODEL + "engine: {version: 0.5.23}\n"


def problems(text):
    """The lines of the error that `text` gives."""
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    assert caught.value.code is ExitCode.CONFIG
    return str(caught.value).splitlines()


def engine(lines):
    return MODEL + "engine:\n  version: 0.5.23\n  " + lines


# YAML after BASE -> the whole error.
WRONG = {
    "bogus: 1": "bogus: no such key: write one of model, engine, graphs,",
    "graph: {}": "graph: no such key: did you mean graphs?",
    "limits: {phases: {lod: {deadline: 3}}}": "limits.phases.lod: no such key: did you mean load?",
    "limits: {phases: {load: {silense: 3}}}": "limits.phases.load.silense: no such key: did you mean silence",
    "limits: {phases: {load: 3}}": "limits.phases.load: is not a mapping (given: 3): write a mapping with th",
    "limits: {stall: 60s}": "limits.stall: is not a number of the right kind (given: '60s'): write seconds,",
    "limits: {stall: 1:30}": "limits.stall: is not a number of the right kind (given: '1:30'): write seconds",
    "limits: {stall: true}": "limits.stall: is true or false: write a number",
    "limits: {stall: .inf}": "limits.stall: is out of range (given: inf): write seconds, a number above 0",
    "limits: {stall: .nan}": "limits.stall: is out of range (given: nan): write seconds, a number above 0",
    "limits: {stall: 0}": "limits.stall: is out of range (given: 0): write seconds, a number above 0 (defaul",
    "limits: {stall: }": "limits.stall: has no value: write seconds, a number above 0 (default: 120)",
    "limits: {restart_count: 2.5}": "limits.restart_count: is not a number of the right kind (given: 2.5): w",
    "ports: {engine: 70000}": "ports.engine: is out of range (given: 70000): write a port, 1 to 65535 (defau",
    "ports: {engine: 9400}": "ports: engine and supervisor have the same port: write two different ones",
    "ports: {supervisor: yes}": "ports.supervisor: is true or false: write a number",
    "graphs: {wanted: peicewise}": "graphs.wanted: no graph plan 'peicewise': write piecewise, standard, eag",
    "graphs: {wanted: [a, b]}": "graphs.wanted: is not text: write piecewise, standard, eager, or PREFILL,DE",
    "graphs: {wanted: 'breakable,full,8', decode_max_bs: 16}": "graphs: wanted says 8 and decode_max_bs 16:",
    "graphs: {ladder: {enabled: maybe}}": "graphs.ladder.enabled: is not true or false (given: 'maybe'): wri",
    "canary: {expect: '('}": "canary.expect: not a regular expression (",
    "canary: {max_tokens: 1000}": "canary.max_tokens: is out of range (given: 1000): write a whole number, 1",
    "secrets: {api_key: sk-123}": "secrets.api_key: no such key: did you mean api_key_file?",
    "paths: {state: ''}": "paths.state: an empty path: write a path",
    "paths: {state: ~}": "paths.state: has no value: write a path (default: /var/lib/hearth)",
    "paths: {state: ~nobody-of-that-name/x}": "paths.state: ~ stands for no home folder here: write the whol",
    "profile: tpu": "profile: is none of the choices (given: 'tpu'): write gpu or cpu (default: gpu)",
    "image_digest: no": "image_digest: is not text but a truth value, as yes, no, on and off are without quo",
    "'a\\nb': 1": "'a",
}


@pytest.mark.parametrize(("text", "error"), WRONG.items(), ids=WRONG.keys())
def test_a_wrong_value_is_one_line_with_place_and_advice(text, error):
    (line,) = problems(BASE + text)
    assert line.startswith(f"f.yaml: {error}")


WRONG_ENGINE = {
    "env: {A: true}": "engine.env.A: not text: write it in quotes",
    "env: {A: }": "engine.env.A: not text: write it in quotes",
    "env: {A: [1]}": "engine.env.A: not text: write one value",
    "env: {'a=b': 1}": "engine.env.'a=b': not the name of a variable",
    "args: {bad: [[1]]}": "engine.args.bad: a list in a list",
    "args: {bad: .inf}": "engine.args.bad: not a finite number",
    "args: {'a b': 1}": "engine.args.'a b': not the name of an argument",
    "args: {tp_size: 8, tp-size: 8}": "engine.args: tp-size is written twice, in two spellings",
    "args: {--model-path: x}": "engine.args.--model-path: Hearth sets this argument itself: write model.path",
    "args: {cuda_graph_max_bs: 3}": "engine.args.cuda_graph_max_bs: Hearth sets this argument itself: write",
    "args: [tp]": "engine.args: is not a mapping: write a mapping",
    "pass_env: FOO": "engine.pass_env: is not a list (given: 'FOO'): write a list",
    "pass_env: ['*']": "engine.pass_env.0: not the name of a variable: write NAME or PREFIX_*",
    "python: ''": "engine.python: an empty path: write a path",
    "versoin: 1": "engine.versoin: no such key: did you mean version?",
}


@pytest.mark.parametrize(("text", "error"), WRONG_ENGINE.items(), ids=WRONG_ENGINE.keys())
def test_wrong_engine_values(text, error):
    (line,) = problems(engine(text))
    assert line.startswith(f"f.yaml: {error}")


SECRETS = [
    "args: {api-key: S3CRET}",
    "args: {--admin_api_key: S3CRET}",
    "args: {ssl-keyfile-password: S3CRET}",
    "env: {HF_TOKEN: S3CRET}",
    "env: {OPENAI_API_KEY: S3CRET}",
    "env: {AWS_SECRET_ACCESS_KEY: S3CRET}",
    "env: {DB_PASSWORD: [S3CRET]}",
    "args: {x: [[S3CRET]]}",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_in_plain_text_is_refused_and_not_repeated(text):
    lines = problems(engine(text))
    assert not any("S3CRET" in line for line in lines)
    assert not any(
        "S3CRET" in line for line in problems(BASE + "secrets: {api_key: S3CRET, redact_files: S3CRET}")
    )


def test_arguments_that_only_look_like_secrets_are_taken():
    found = parse(engine("args: {max-total-tokens: 9, tokenizer-path: /t, tool-call-parser: x}"), "f")
    assert len(found.engine.args) == 3


def test_every_problem_has_its_line():
    lines = problems(
        "model: {path: /m}\nengine: {version: 1, env: {A: true, B: [1]}}\nlimits: {stall: x}\nnope: 1\n"
    )
    assert [line.split(": ")[1] for line in lines] == [
        "model.served_name",
        "engine.env.A",
        "engine.env.B",
        "limits.stall",
        "nope",
    ]


# Text (or bytes) that is no config at all -> what the error has.
NO_YAML = {
    "empty": (b"", r"\(file\): is empty"),
    "only comments": (b"# x\n", r"\(file\): is empty"),
    "a list": (b"- model\n", r"\(file\): must be a mapping"),
    "text": (b"model", r"\(file\): must be a mapping"),
    "key twice": (b"model: 1\nengine: 2\nmodel: 3\n", r"line 3: key 'model' is written twice: remove one"),
    "nested key twice": (b"model:\n  path: a\n  path: b\n", r"line 3: key 'path' is written twice"),
    "tab": (b"model:\n\tpath: a\n", r"line 2: .*indent with spaces, not with a tab"),
    "colon in text": (b"model: a: b\n", r"line 1: .*in quotes"),
    "open quote": (b"model: 'a\n", r"line 2: .*: fix the YAML there"),
    "two documents": (BASE.encode() + b"---\na: 1\n", r"keep one document"),
    "alias": (b"model: &a {path: x}\nengine: *a\n", r"line 2: an alias"),
    "python tag": (b"model: !!python/object/apply:os.system [id]\n", r"line 1: the tag .*: remove it"),
    "tag": (b"model: !vault x\n", r"line 1: the tag !vault: remove it"),
    "binary tag": (b"model: !!binary x\n", r"line 1: the tag !!binary: remove it"),
    "key is a list": (b"? [a]\n: 1\n", r"line 1: a key must be plain text"),
    "nul": (b"model: a\0b\n", r"line 1: the character #x00"),
    "nul escaped": (b'model: "\\0"\n', r"line 1: a NUL or half a character"),
    "surrogate": (b'model: "\\ud800"\n', r"line 1: a NUL or half a character"),
    "not utf-8": (b"model: x\n# caf\xe9\n", r"line 2: not UTF-8 text: save the file as UTF-8"),
    "utf-16": ("model: x".encode("utf-16"), r"not UTF-8 text"),
    "binary": (bytes(range(256)), r"not UTF-8 text|the character"),
    "10 MB": (b"a: b\n" * 2_000_000, r"\(file\): larger than 1 MiB"),
    "deep flow": (b"a: " + b"[" * 100_000, r"nested too deeply"),
    "deep maps": (b"{a: " * 10_000, r"nested too deeply"),
    "bomb": (
        b"a: &a [x,x,x]\n" + b"".join(b"%c: &%c [*%c,*%c]\n" % (n, n, n - 1, n - 1) for n in range(98, 120)),
        r"an alias",
    ),
}


@pytest.mark.parametrize(("raw", "error"), NO_YAML.values(), ids=NO_YAML.keys())
def test_a_file_that_is_no_config(tmp_path, raw, error):
    path = tmp_path / "f.yaml"
    path.write_bytes(raw)
    begun = time.process_time()
    with pytest.raises(ConfigError, match=error) as caught:
        load(path)
    assert time.process_time() - begun < 5
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) < 500


def test_no_file_and_a_directory(tmp_path):
    with pytest.raises(MissingError, match=r"no such file: copy hearth\.example\.yaml"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a directory: name the file in it"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="can't be read"):
        load(Path("a\0b"))


def test_an_endless_file_is_not_read_to_its_end():
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load(Path("/dev/zero"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text(BASE)
    path.chmod(0)
    with pytest.raises(ConfigError, match="can't be read: Permission denied"):
        load(path)


def test_a_byte_order_mark_and_windows_lines_do_no_harm(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load(path) == parse(BASE, "f") == parse("\ufeff" + BASE, "f")


@pytest.mark.parametrize(
    "written", ["0.5.23", "0.10", "1", "0123", "1:30", "1_000", "2024-01-01", "1e3", "0x10"]
)
def test_where_text_is_wanted_a_number_is_taken_as_written(written):
    text = (
        f"model: {{path: /m, served_name: {written}, revision: {written}}}\nengine:\n  version: {written}\n"
    )
    found = parse(f"{text}  env: {{A: {written}}}\nimage_digest: {written}\n", "f")
    values = {found.model.served_name, found.model.revision, found.engine.version, found.engine.env["A"]}
    assert values | {found.image_digest} == {written}


def test_arguments_keep_their_types():
    args = "args: {a: 8, b: 0.85, c: true, d: null, e: '8', f: [1, x], g: {n: [1, {m: 2}]}, h: no}"
    assert parse(engine(args), "f").engine.args == {
        "a": 8,
        "b": 0.85,
        "c": True,
        "d": None,
        "e": "8",
        "f": [1, "x"],
        "g": {"n": [1, {"m": 2}]},
        "h": False,
    }
    assert parse(engine(args), "f").engine.args["c"] is True


def test_truth_values_in_every_yaml_spelling():
    for written, value in {"yes": True, "on": True, "'no'": False, "off": False, "True": True}.items():
        assert parse(BASE + f"graphs: {{ladder: {{enabled: {written}}}}}", "f").graphs.ladder.enabled is value


def test_a_section_with_every_line_commented_out_has_its_defaults():
    empty = "graphs:\nlimits:\n  phases:\ncanary:\nports:\npaths:\nsecrets:\n"
    assert parse(BASE + empty, "f") == parse(BASE, "f")
    assert parse(engine("args:\n  env:\n  pass_env:\n"), "f") == parse(BASE, "f")


def test_home_in_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/op")
    found = parse("model: {path: ~/m, served_name: s}\nengine: {version: 1, python: ~/v/bin/python}\n", "f")
    assert (found.model.path, found.engine.python) == (Path("/home/op/m"), "/home/op/v/bin/python")
    assert parse(BASE, "f").engine.python == "python3"


def test_a_phase_keeps_the_default_that_it_does_not_set():
    limits = parse(BASE + "limits: {phases: {load: {deadline: 7}, warm: {silence: null}}}", "f").limits
    assert (limits.phase(Phase.LOAD).deadline, limits.phase(Phase.LOAD).silence) == (7.0, 600.0)
    assert (limits.phase(Phase.WARM).deadline, limits.phase(Phase.WARM).silence) == (3600.0, None)
    assert limits.phase(Phase.SERVING).deadline is None


def test_every_phase_before_serving_has_limits():
    for phase in set(Phase) - {Phase.SERVING, Phase.DRAIN}:
        limit = parse(BASE, "f").limits.phase(phase)
        assert limit.deadline
        assert limit.silence
        assert limit.silence <= limit.deadline


def said(text):
    """The lines of the error that `text` gives, if it gives one."""
    try:
        parse(text, "f")
    except HearthError as error:
        return str(error).split("\n")
    return []


@given(st.text())
def test_no_text_gives_anything_but_a_config_error(text):
    assert all(line.startswith("f: ") for line in said(text))


YAML_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PLACES = [
    "model",
    "engine",
    "graphs",
    "limits",
    "canary",
    "ports",
    "paths",
    "secrets",
    "profile",
    "image_digest",
]


@given(st.sampled_from(PLACES), YAML_VALUES)
def test_no_value_at_any_place_gives_anything_but_one_line_a_problem(place, value):
    sections = {"model": {"path": "/m", "served_name": "s"}, "engine": {"version": "1"}}
    text = yamltext.yaml.safe_dump({**sections, place: value}, allow_unicode=False)
    assert all(line.startswith("f: ") for line in said(text))


# The example, and the table of all keys


def test_the_example_is_right():
    found = load(EXAMPLE)
    assert (found.engine.version, found.graphs.wanted, found.graphs.decode_max_bs) == (
        "0.5.23",
        "piecewise",
        32,
    )
    assert re.search(found.canary.expect, " Rome. The capital of Spain is")
    assert found.engine.args["tp"] == 8


def test_the_example_names_every_key_and_the_default_of_what_is_commented_out():
    text = EXAMPLE.read_text(encoding="utf-8")
    for key, kind in keys(Config):
        name = key.split(".")[-1]
        assert re.search(rf"^[# ]*{name}:", text, re.M), f"{key} is not in {EXAMPLE.name}"
        commented = re.search(rf"^ *# {name}: (.*)$", text, re.M)
        if commented and not re.search(rf"^ *{name}:", text, re.M):
            assert commented[1] == default(kind), key


def keys(section, prefix=""):
    """(dotted key, field) of every key that isn't a section of its own."""
    for name, field in section.model_fields.items():
        kind = bare(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def default(field):
    if field.is_required():
        return "(required)"
    value = field.get_default(call_default_factory=True)
    return {"{}": "{}", "[]": "[]"}.get(str(value)) or show(value)


def meanings():
    """The text below each attribute in the source, by (class, attribute)."""
    found = {}
    for cls in ast.parse(inspect.getsource(config_module)).body:
        body = cls.body if isinstance(cls, ast.ClassDef) else []
        for node, after in pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[cls.name, node.target.id] = inspect.cleandoc(after.value.value).replace("\n", " ")
    return found


def rows(section, prefix=""):
    texts = meanings()
    for name, field in section.model_fields.items():
        kind = bare(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from rows(kind, f"{prefix}{name}.")
            continue
        what = describe(field.annotation, field.metadata).replace("|", "\\|")
        text = texts[section.__name__, name].replace("|", "\\|")
        yield f"| `{prefix}{name}` | {what} | `{default(field)}` | {text} |"


def page():
    """docs/configuration.md, from the models."""
    phases = config_module._default_phases().items()
    return "\n".join(
        [
            "# Configuration",
            "",
            "One YAML file; `hearth.example.yaml` explains it by example. Unknown keys, wrong types and keys",
            "written twice are errors, one line each: `file: key: what is wrong: what to write`.",
            "",
            "| key | value | default | meaning |",
            "|---|---|---|---|",
            *rows(Config),
            "",
            "## Phase limits",
            "",
            "`limits.phases.PHASE.deadline` and `.silence` in seconds; a phase beyond one has hung. What",
            "isn't set keeps its default; `null` takes the limit away.",
            "",
            "| phase | deadline | silence |",
            "|---|---|---|",
            *(f"| `{phase.value}` | {limit.deadline:g} | {limit.silence:g} |" for phase, limit in phases),
            "",
        ]
    )


def test_the_page_of_all_keys_is_what_the_models_say():
    if os.environ.get("HEARTH_WRITE_DOCS"):
        DOCS.write_text(page(), encoding="utf-8")
    assert DOCS.read_text(encoding="utf-8") == page(), (
        "run this test with HEARTH_WRITE_DOCS=1 to write the page"
    )
