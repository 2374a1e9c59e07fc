"""A release's model: what may stand in it, what counts as the same, which config a container can serve."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.config import parse as parse_config
from hearth.deploy.release import Draft, Release, parse, problems, secret_names, sha256, with_digest
from hearth.errors import ConfigError

DIGEST = "sha256:" + "a" * 64
CONFIG = """\
model: {path: /models/x, served_name: x}
engine: {version: 0.5.23}
ports: {engine_host: 0.0.0.0, supervisor_host: 0.0.0.0}
"""
DRAFT = {
    "image": {"ref": "hearth/cpu:latest", "digest": DIGEST},
    "container": {"ports": [{"container": 30000, "host": 30000}, {"container": 9400, "host": 9400}]},
    "made_by": "ann@desk",
}
RELEASE = {
    **DRAFT,
    "id": "20261129T215500Z-3fa91c",
    "made_at": "2026-11-29T21:55:00Z",
    "config": {"sha256": sha256(CONFIG)},
}


def read(data, kind=Release):
    return parse(json.dumps(data), "release.json", kind)


def test_what_is_written_is_read_back():
    release = read(RELEASE)
    assert parse(release.to_json(), "again", Release) == release


def test_equal_content_is_equal_whoever_made_it_and_when():
    one = read(RELEASE)
    other = read({**RELEASE, "id": "20271129T215500Z-000000", "made_by": "bob@desk", "previous": one.id})
    assert one.content == other.content


@pytest.mark.parametrize(
    "change",
    [
        {"image": {"ref": "hearth/cpu:latest", "digest": "sha256:" + "b" * 64}},
        {"config": {"sha256": "0" * 64}},
        {"container": {"gpus": "none"}},
        {"hearth_version": "9"},
        {"smoke": {"stream": None}},
    ],
)
def test_other_content_is_another_release(change):
    assert read({**RELEASE, **change}).content != read(RELEASE).content


def test_another_name_for_the_same_image_is_no_other_release():
    named = {**RELEASE, "image": {"ref": "other", "digest": DIGEST}}
    assert read(named).content == read(RELEASE).content


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"id": "../../etc"}, "not a release id"),
        ({"image": {"ref": "x", "digest": "latest"}}, "not a digest"),
        ({"immage": 1}, "did you mean image?"),
        ({"container": {"gpus": "two"}}, "container.gpus"),
        ({"smoke": {"prompts": [{"prompt": "x", "expect": "("}]}}, "not a regular expression"),
        ({"ready_within": -1}, "ready_within"),
    ],
)
def test_wrong_values_are_named(change, word):
    with pytest.raises(ConfigError) as caught:
        read({**RELEASE, **change})
    assert word in str(caught.value)
    assert str(caught.value).startswith("release.json: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "{}", '{"id": 1}', "\ud83d"])
def test_half_written_files_are_errors(text):
    with pytest.raises(ConfigError):
        parse(text, "release.json", Release)


@given(st.recursive(st.none() | st.text() | st.integers(), lambda inner: st.dictionaries(st.text(), inner)))
def test_any_json_is_a_release_or_an_error(data):
    with pytest.raises(ConfigError, match=r"^release\.json: "):
        parse(json.dumps(data), "release.json", Draft)  # nobody draws a whole draft by chance


def test_the_digest_is_written_into_the_config():
    text = with_digest(CONFIG, DIGEST, "hearth.yaml")
    assert parse_config(text, "x").image_digest == DIGEST
    assert with_digest(text, DIGEST, "hearth.yaml") == text
    with pytest.raises(ConfigError, match="remove the key"):
        with_digest(text, "sha256:" + "b" * 64, "hearth.yaml")


@pytest.mark.parametrize(
    "text", ['{"model": {"path": "/m", "served_name": "x"}, "engine": {"version": "1"}}\n']
)
def test_a_config_that_nothing_can_be_added_to_is_refused(text):
    with pytest.raises(ConfigError, match="block style"):
        with_digest(text, DIGEST, "hearth.yaml")


def said(text, container=DRAFT["container"]):
    draft = read({**DRAFT, "container": container}, Draft)
    return problems(draft.container, parse_config(text, "hearth.yaml"))


def test_a_container_that_fits_its_config():
    assert said(CONFIG) == []
    assert said(CONFIG + "secrets: {api_key_file: /run/secrets/api_key}\n") == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (
            CONFIG.replace("supervisor_host: 0.0.0.0", "supervisor: 9401, supervisor_host: 0.0.0.0"),
            "9401 isn't published",
        ),
        (CONFIG.replace("supervisor_host: 0.0.0.0", "supervisor_host: 127.0.0.1"), "ports.supervisor_host"),
        (CONFIG.replace("engine_host: 0.0.0.0", "engine_host: localhost"), "ports.engine_host"),
        (CONFIG + "secrets: {api_key_file: /etc/key}\n", "write /run/secrets/key"),
        (CONFIG + "secrets: {redact_files: [/run/secrets/deep/key]}\n", "secrets.redact_files.0"),
    ],
)
def test_a_container_that_could_never_serve_its_config(text, word):
    assert any(word in line for line in said(text))


def test_secrets_are_credentials_by_name():
    text = CONFIG + "secrets: {api_key_file: /run/secrets/api_key, redact_files: [/run/secrets/hf]}\n"
    names = secret_names(parse_config(text, "x"))
    assert names == {"secrets.api_key_file": "api_key", "secrets.redact_files.0": "hf"}


def test_what_a_webhook_keeps_secret_is_a_credential_too():
    hook = "{url_file: /run/secrets/hook, header_files: {Authorization: /run/secrets/auth}}"
    text = f"{CONFIG}notify: {hook}\n"
    names = secret_names(parse_config(text, "x"))
    assert names == {"notify.url_file": "hook", "notify.header_files.Authorization": "auth"}
    outside = CONFIG + "notify: {url_file: /etc/hook}\n"
    assert any("write /run/secrets/hook" in line for line in said(outside))


def test_an_absent_part_of_the_smoke_test_is_not_asked():
    assert read({**DRAFT, "smoke": {"stream": None, "long_prompt": None}}, Draft).smoke.stream is None
