"""`hearth fetch` against a stand-in for the hub (tests/unit/hub.py): breaks, damage, full disks, names."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from hearth import fetch as fetching
from hearth import fetch_bytes, weights
from hearth.cli import app
from hearth.errors import CheckFailed, ConfigError, ExitCode, HearthError, MissingError, Unreachable
from hearth.fetch import fetch
from hearth.fetch_types import PARTS, Busy, Denied, NoRoom, Request
from hearth.weights import MANIFEST, WeightFile
from tests.unit.hub import COMMIT, REPO, Hub, safetensors

pytest.importorskip("huggingface_hub", reason="huggingface_hub (extra `fetch`) is not installed")
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(fetching, "SPARE", 0)
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)

    async def at_once(seconds: float) -> None:
        return None

    monkeypatch.setattr(fetch_bytes, "wait", at_once)
    with Hub() as running:
        yield running


def request(hub: Hub, folder: Path, **changes: Any) -> Request:
    return Request(**{"repo": REPO, "folder": folder, "endpoint": hub.url, "silence": 20.0, **changes})


def test_everything_arrives_and_is_verified(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    manifest = fetch(request(hub, folder))
    assert manifest.commit == COMMIT
    assert {f.path for f in manifest.files} == set(hub.files) - {"pytorch_model.bin"}
    assert all((folder / file.path).read_bytes() == hub.files[file.path] for file in manifest.files)
    assert not (folder / PARTS).exists()
    assert weights.load(folder) == manifest
    assert weights.verify(folder, manifest.files) == {}


def test_the_second_time_nobody_is_asked(hub: Hub, tmp_path: Path) -> None:
    fetch(request(hub, tmp_path))
    before = dict(hub.asked)
    assert fetching.complete(request(hub, tmp_path)) is not None
    assert fetching.complete(request(hub, tmp_path, revision=COMMIT)) is not None
    assert hub.asked == before
    assert fetching.complete(request(hub, tmp_path, revision="v1")) is None
    (tmp_path / "config.json").unlink()
    assert fetching.complete(request(hub, tmp_path)) is None


def test_a_broken_connection_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    hub.cut = {SHARD: 70_000}
    fetch(request(hub, tmp_path))
    # What came before a break may be lost in the client's buffer: it goes on from what is on disk.
    assert len(hub.begun[SHARD]) >= 5
    assert hub.begun[SHARD] == sorted(hub.begun[SHARD])
    assert hub.begun[SHARD][-1] >= len(hub.files[SHARD]) - 70_000
    assert (tmp_path / SHARD).read_bytes() == hub.files[SHARD]


def test_a_hub_without_ranges_is_asked_from_the_beginning(hub: Hub, tmp_path: Path) -> None:
    hub.once, hub.ranges = {SHARD: 70_000}, False
    fetch(request(hub, tmp_path))
    assert hub.sent[SHARD] == len(hub.files[SHARD]) + 70_000


def test_a_connection_that_falls_silent_is_begun_again(hub: Hub, tmp_path: Path) -> None:
    hub.silent = {SHARD}
    fetch(request(hub, tmp_path, silence=1.0))
    assert hub.asked[SHARD] == 2


def test_a_busy_hub_is_asked_again_and_a_dead_one_given_up(hub: Hub, tmp_path: Path) -> None:
    hub.status = {SHARD: [503, 429, 500]}
    fetch(request(hub, tmp_path / "a"))
    hub.cut = {SHARD: 0}
    with pytest.raises(Unreachable, match="6 times in a row"):
        fetch(request(hub, tmp_path / "b"))


def test_after_giving_up_the_next_fetch_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.once, hub.status = {SHARD: 100_000}, {}
    hub.cut = {SHARD: 0}
    with pytest.raises(Unreachable):
        fetch(request(hub, tmp_path))
    assert not (tmp_path / MANIFEST).exists()
    (part,) = (tmp_path / PARTS).glob(f"{hashlib.sha256(SHARD.encode()).hexdigest()[:16]}-*.part")
    have = part.stat().st_size
    hub.cut, hub.begun = {}, {}
    fetch(request(hub, tmp_path))
    assert hub.begun[SHARD] == [have]
    assert 0 < have <= 100_000


def test_a_damaged_file_is_fetched_once_more(hub: Hub, tmp_path: Path) -> None:
    hub.rotten_once = {SHARD}
    fetch(request(hub, tmp_path))
    assert (tmp_path / SHARD).read_bytes() == hub.files[SHARD]


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_a_file_that_keeps_coming_damaged_is_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.rotten = {name}
    with pytest.raises(CheckFailed, match=f"{name} is damaged: its hash is"):
        fetch(request(hub, tmp_path))
    assert not (tmp_path / name).exists()
    assert not (tmp_path / MANIFEST).exists()
    hub.rotten = set()
    fetch(request(hub, tmp_path))


def test_files_that_lie_there_already_are_adopted_when_right(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / SHARD).write_bytes(hub.files[SHARD])
    (tmp_path / "config.json").write_bytes(b"x" * len(hub.files["config.json"]))
    fetch(request(hub, tmp_path))
    assert hub.asked[SHARD] == 0
    assert (tmp_path / "config.json").read_bytes() == hub.files["config.json"]


def test_the_same_content_twice(hub: Hub, tmp_path: Path) -> None:
    hub.files |= {"a/weights.safetensors": hub.files[SHARD], "b/weights.safetensors": hub.files[SHARD]}
    fetch(request(hub, tmp_path))
    assert (tmp_path / "a/weights.safetensors").read_bytes() == hub.files[SHARD]
    assert (tmp_path / "b/weights.safetensors").read_bytes() == hub.files[SHARD]


def test_an_index_that_names_what_is_not_there(hub: Hub, tmp_path: Path) -> None:
    del hub.files[SHARD]
    with pytest.raises(CheckFailed, match=f"{SHARD} the index names it, and it is missing"):
        fetch(request(hub, tmp_path))


def test_the_token_reaches_the_hub_and_nobody_else(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    with pytest.raises(Denied) as denied:
        fetch(request(hub, tmp_path))
    assert denied.value.code is ExitCode.PERMISSION
    secret = request(hub, tmp_path, token="hf_secret")
    fetch(secret)
    assert hub.leaked == []
    assert "hf_secret" not in repr(secret)
    assert "hf_secret" not in (tmp_path / MANIFEST).read_text()


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"repo": "org/none"}, MissingError, "org/none: no such repository"),
        ({"revision": "v9"}, MissingError, "no revision v9"),
        ({"repo": "a/b/c"}, ConfigError, "not the name of a repository"),
        ({"endpoint": "http://127.0.0.1:9"}, Unreachable, "the hub doesn't answer"),
        ({"include": ("*.none",)}, ConfigError, "no file is left"),
    ],
)
def test_what_cannot_be_fetched(
    hub: Hub, tmp_path: Path, changes: dict[str, Any], error: type[HearthError], said: str
) -> None:
    with pytest.raises(error, match=said):
        fetch(request(hub, tmp_path, **changes))
    assert not (tmp_path / MANIFEST).exists()


def test_a_disk_that_is_too_small_is_noticed_before(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "SPARE", 1 << 60)
    with pytest.raises(NoRoom, match="needed for what is missing") as error:
        fetch(request(hub, tmp_path))
    assert error.value.code is ExitCode.DISK
    assert hub.asked[SHARD] == 0


def test_a_disk_that_fills_up_underway(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is injected: writes to a part fail with ENOSPC, as on a full file system."""
    real, full = Path.open, [True]

    def open_(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if full[0] and self.suffix == ".part" and "a" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_)
    with pytest.raises(NoRoom, match="the disk is full"):
        fetch(request(hub, tmp_path))
    full[0] = False
    fetch(request(hub, tmp_path))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no tmpfs can be mounted here (needs root); the injected ENOSPC is tried anyway")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(hub: Hub, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_make_room", lambda *_: None)
    with pytest.raises(NoRoom, match="the disk is full"):
        fetch(request(hub, small_disk))
    assert not (small_disk / MANIFEST).exists()


def test_one_fetch_at_a_time(hub: Hub, tmp_path: Path) -> None:
    with fetching.locked(tmp_path), pytest.raises(Busy, match="another fetch"):
        fetch(request(hub, tmp_path))


def test_a_folder_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoRoom, match="can't be written"):
        fetch(request(hub, tmp_path / "file" / "m"))


def test_parts_of_another_revision_are_dropped(hub: Hub, tmp_path: Path) -> None:
    old = tmp_path / PARTS / "0123-4567.part"
    old.parent.mkdir()
    old.write_bytes(b"x")
    fetch(request(hub, tmp_path))
    assert not old.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_fetch_goes_on(hub: Hub, tmp_path: Path, number: signal.Signals) -> None:
    """A real process, ended in the middle of a file."""
    hub.silent = {SHARD}
    words = [sys.executable, "-m", "hearth", "fetch", REPO, "--to", str(tmp_path)]
    env = {**os.environ, "HF_ENDPOINT": hub.url}
    process = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while hub.sent[SHARD] < 100_000 or not _has_part(tmp_path):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == ExitCode.RETRY
        assert "interrupted (run the same command to go on where it was)" in told
    hub.sent.clear()
    hub.release.set()
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert hub.sent[SHARD] <= len(hub.files[SHARD]) - 100_000
    assert weights.verify(tmp_path, weights.load(tmp_path).files) == {}


def _has_part(folder: Path) -> bool:
    return any(part.stat().st_size >= 100_000 for part in (folder / PARTS).glob("*.part"))


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["fetch", *words])


def test_the_verb(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    folder = str(tmp_path / "m")
    first = run(REPO, "--to", folder)
    assert first.exit_code == 0, first.output
    assert f"{folder}: fetched: {REPO} at {COMMIT}" in first.output
    again = json.loads(run(REPO, "--to", folder, "--json").stdout)
    assert (again["ok"], again["changed"], again["files"]) == (True, False, 4)
    assert run("--verify", folder).exit_code == 0
    (tmp_path / "m" / SHARD).write_bytes(b"x" * len(hub.files[SHARD]))
    (tmp_path / "m" / "config.json").unlink()
    broken = run("--verify", folder)
    assert isinstance(broken.exception, CheckFailed)
    assert "config.json is missing" in str(broken.exception)
    assert f"{SHARD} is damaged" in str(broken.exception)
    assert json.loads(run("--verify", folder, "--json").stdout)["ok"] is False
    assert run(REPO, "--to", folder).exit_code == 0
    assert run("--verify", folder).exit_code == 0


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ([], ConfigError, "no repository"),
        ([REPO], ConfigError, "no folder"),
        (
            [REPO, "--to", "/tmp/x", "--token-file", "/nonexistent"],
            MissingError,
            "/nonexistent: no such file",
        ),
        (["--verify", "/nonexistent"], MissingError, "no such folder"),
        (["--verify", "/"], MissingError, "hearth-weights.json: no such file"),
    ],
)
def test_wrong_use(words: list[str], error: type[HearthError], said: str) -> None:
    done = run(*words)
    assert isinstance(done.exception, error), done.output
    assert said in str(done.exception)


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", " hf_env\n")
    assert fetching.token_from(None) == "hf_env"
    file = tmp_path / "token"
    file.write_text("hf_file\n")
    assert fetching.token_from(file) == "hf_file"
    for text in ("", "two words"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="must hold one token"):
            fetching.token_from(file)


def test_without_huggingface_hub_the_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    done = run(REPO, "--to", str(tmp_path))
    assert "pip install 'hearth[fetch]'" in str(done.exception)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"repo": "a"}', "\xff", '{"files": [{"path": "../x"}]}'])
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=MANIFEST) as error:
        weights.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "a\\b", "."])
def test_a_path_that_leads_out(path: str) -> None:
    with pytest.raises(ValidationError):
        WeightFile(path=path, size=1)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_make_the_header_reader_raise_anything_else(data: bytes) -> None:
    path = Path(f"/dev/shm/hearth-test-{os.getpid()}")
    path.write_bytes(data)
    try:
        weights.tensors_of(path)
    except ValueError:
        pass
    finally:
        path.unlink()


def test_a_cut_shard_and_a_tensor_that_is_missing(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors", "c": "../two"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").write_bytes(safetensors({"a": 10}))
    found = dict(weights.index_problems(tmp_path))
    assert found["one.safetensors"] == "lacks 1 tensors of the index, e.g. b"
    assert "leads out" in found["../two"]
    (tmp_path / "one.safetensors").write_bytes(safetensors({"a": 10, "b": 5})[:-1])
    assert "its header asks for" in dict(weights.index_problems(tmp_path))["one.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "is no index" in dict(weights.index_problems(tmp_path))["model.safetensors.index.json"]
    shutil.rmtree(tmp_path)
