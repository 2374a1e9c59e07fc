"""Secrets on their way to the container: the right ones, for one user; nothing is left when it goes wrong."""

import os

import pytest

from hearth.errors import ExitCode, MissingError
from hearth.host import credentials
from hearth.host.credentials import CredentialError, hand_over
from hearth.host.spec import USER_ID

NAMES = {"secrets.api_key_file": "api_key", "secrets.redact_files.0": "api_key"}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user: needs root")


@pytest.fixture
def given(tmp_path):
    folder = tmp_path / "credentials"
    folder.mkdir()
    (folder / "api_key").write_text("secret")
    (folder / "other").write_text("not asked for")
    return {"CREDENTIALS_DIRECTORY": str(folder)}


def test_no_secrets_no_folder(tmp_path):
    assert hand_over({}, tmp_path, {}) is None


@needs_root
def test_only_what_was_asked_for_and_for_one_user(tmp_path, given):
    folder = hand_over(NAMES, tmp_path, given)
    assert [path.name for path in folder.iterdir()] == ["api_key"]
    assert (folder / "api_key").read_text() == "secret"
    for path, mode in ((folder, 0o700), (folder / "api_key", 0o400)):
        seen = path.stat()
        assert (seen.st_mode & 0o777, seen.st_uid, seen.st_gid) == (mode, USER_ID, USER_ID)


@pytest.mark.parametrize("environ", [{}, {"CREDENTIALS_DIRECTORY": "/nonexistent"}])
def test_a_missing_credential_names_key_and_fix(tmp_path, environ):
    with pytest.raises(MissingError) as caught:
        hand_over(NAMES, tmp_path, environ)
    assert "secrets.api_key_file" in str(caught.value)
    assert "LoadCredential=api_key:/etc/hearth/secrets/api_key" in str(caught.value)


def test_a_refusal_leaves_nothing_behind(tmp_path, given, monkeypatch):
    runtime = tmp_path / "run"
    runtime.mkdir()

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(credentials.os, "fchown", refuse)
    with pytest.raises(CredentialError) as caught:
        hand_over(NAMES, runtime, given)
    assert caught.value.code is ExitCode.PERMISSION
    assert list(runtime.iterdir()) == []


def test_a_runtime_folder_that_is_not_there_is_named(tmp_path, given):
    with pytest.raises(CredentialError, match="gone"):
        hand_over(NAMES, tmp_path / "gone", given)
