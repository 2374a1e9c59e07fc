"""kernels.json: written whole, read strictly, and each way of breaking a library caught by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_elf import SM_90A, SM_120A, SM_120F, elf, fatbin
from typer.testing import CliRunner

from hearth.cli.kernels import kernels_app
from hearth.errors import ExitCode
from hearth.failure import FailureKind, Phase
from hearth.kernels.manifest import (
    Library,
    Manifest,
    ManifestError,
    describe,
    installed_versions,
    library_path,
    load,
    save,
    verify,
)

BUILT = {"flashinfer": "0.7.2.post1", "tvm_ffi": "0.1.11", "torch": "2.13.0+cpu", "cuda": "13.0"}
SM120 = elf(fatbin(SM_120F))


def baked(folder: Path, name: str = "fp4", data: bytes = SM120) -> Library:
    path = library_path(folder, name)
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return describe(path, name, BUILT, ("-O3",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "kernels.json", Manifest(libraries=(baked(tmp_path),)))
    return tmp_path


def problem(folder: Path, **more: object) -> str | None:
    report = verify(folder / "kernels.json", folder, **more)  # type: ignore[arg-type]
    assert report.ok is not bool(report.failures)
    for failure in report.failures:
        assert (failure.kind, failure.phase) == (FailureKind.MISSING_ARTIFACT, Phase.SPAWN)
        assert failure.hint
    return report.libraries[0].problem if report.libraries else report.manifest_problem


def test_what_was_baked_verifies(folder: Path) -> None:
    assert problem(folder, device_arch=(12, 0), versions=BUILT) is None
    assert problem(folder, device_arch=(12, 1)) is None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (Path.unlink, "missing: no "),
        (cut, "truncated: "),
        (flip, "changed: sha256"),
        (lambda path: path.write_bytes(b""), "truncated: 0 of"),
        (lambda path: path.write_bytes(bytes(4096)), "unreadable: "),
        (
            lambda path: path.write_bytes(elf(fatbin(SM_90A, SM_90A))),
            "has code for sm_90a where sm_120f was baked",
        ),
        (lambda path: (path.unlink(), path.mkdir()), "unreadable: "),
    ],
)
def test_each_harm_is_named(folder: Path, harm: Callable[[Path], object], words: str) -> None:
    harm(library_path(folder, "fp4"))
    assert words in str(problem(folder, device_arch=(12, 0)))


@pytest.mark.parametrize(
    ("code", "device", "fits"),
    [
        (SM_120F, (12, 1), True),
        (SM_120F, (9, 0), False),
        (SM_120A, (12, 1), False),
        (SM_90A, (12, 0), False),
    ],
)
def test_code_for_another_gpu(tmp_path: Path, code: str, device: tuple[int, int], fits: bool) -> None:
    save(tmp_path / "kernels.json", Manifest(libraries=(baked(tmp_path, data=elf(fatbin(code))),)))
    found = problem(tmp_path, device_arch=device)
    assert (found is None) is fits
    assert fits or f"this GPU is {device[0]}.{device[1]}" in str(found)


@pytest.mark.parametrize(
    ("package", "version", "fits"),
    [
        ("flashinfer", "0.7.2", False),
        ("flashinfer", "0.6.3", False),
        ("tvm_ffi", "0.1.13", True),
        ("tvm_ffi", "0.2.0", False),
        ("cuda", "13.1", True),
        ("cuda", "12.9", False),
        ("torch", "2.14.1", True),
    ],
)
def test_version_skew(folder: Path, package: str, version: str, fits: bool) -> None:
    found = problem(folder, versions={**BUILT, package: version})
    assert (found is None) is fits
    assert fits or f"{package} {BUILT[package]}, installed is {version}" in str(found)


def test_a_library_that_nobody_baked(folder: Path) -> None:
    baked(folder, "stranger")
    report = verify(folder / "kernels.json", folder)
    assert [(c.name, c.problem) for c in report.libraries] == [
        ("fp4", None),
        ("stranger", "not in the manifest"),
    ]


def test_a_library_without_gpu_code_fits_every_gpu(tmp_path: Path) -> None:
    save(tmp_path / "kernels.json", Manifest(libraries=(baked(tmp_path, data=elf(None)),)))
    assert problem(tmp_path, device_arch=(12, 0)) is None


GOOD = {"name": "a", "sha256": "0" * 64, "size": 1, "archs": ["sm_120f"], "built_with": {}, "flags": []}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not whole JSON"),
        ('{"schema_version": 1, "libr', "not whole JSON"),
        ("[" * 100_000, "not whole JSON"),
        ("[]", "valid dictionary"),
        ("\xff\xfe", "JSON"),
        (json.dumps({"schema_version": 2, "libraries": []}), "schema_version"),
        (json.dumps({"libraries": [GOOD | {"name": "../../etc/passwd"}]}), "libraries.0.name"),
        (json.dumps({"libraries": [GOOD | {"sha256": "x"}]}), "libraries.0.sha256"),
        (json.dumps({"libraries": [GOOD | {"archs": ["blackwell"]}]}), "blackwell"),
        (json.dumps({"libraries": [GOOD | {"extra": 1}]}), "extra"),
        (json.dumps({"libraries": [GOOD, GOOD]}), "twice"),
        (json.dumps({"libraries": []}), "lists no library"),
    ],
)
def test_an_unusable_manifest_is_one_problem(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "kernels.json").write_text(text, encoding="latin-1")
    found = str(problem(tmp_path))
    assert words in found
    assert str(tmp_path / "kernels.json") in found
    assert "\n" not in found


def test_no_manifest_at_all(tmp_path: Path) -> None:
    assert "No such file" in str(problem(tmp_path))


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["schema_version", "libraries", "name", "size", "archs"]),
                    inner,
                    max_size=3,
                )
            ),
            max_leaves=10,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_manifest_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("m") / "kernels.json"
    path.write_bytes(data)
    try:
        assert isinstance(load(path), Manifest)
    except ManifestError:
        assert not verify(path, path.parent).ok


def test_saving_is_whole_or_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (folder / "kernels.json").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(folder / "kernels.json", Manifest(libraries=()))
    assert (folder / "kernels.json").read_bytes() == before
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["kernels.json"]


def test_merging_replaces_by_name_and_sorts(tmp_path: Path) -> None:
    a, b = baked(tmp_path, "a"), baked(tmp_path, "b")
    newer = a.model_copy(update={"size": 999})
    assert Manifest(libraries=(b, a)).merged((newer,)).libraries == (newer, b)


def test_installed_versions_say_nothing_of_what_is_not_there() -> None:
    assert all(isinstance(value, str) and value for value in installed_versions().values())


run = CliRunner()


def test_verify_command_prints_the_contract_and_exits_79(folder: Path) -> None:
    good = run.invoke(kernels_app, ["verify", "--dir", str(folder), "--device", "12.0", "--json"])
    body = json.loads(good.stdout)
    assert good.exit_code == 0
    assert body["ok"] is True
    assert set(body["libraries"][0]) == {"name", "sha256", "archs", "problem"}
    bad = run.invoke(kernels_app, ["verify", "--dir", str(folder), "--device", "9.0", "--json"])
    assert bad.exit_code == ExitCode.MISSING
    assert "wrong arch" in json.loads(bad.stdout)["libraries"][0]["problem"]


def test_a_self_test_that_fails_makes_the_command_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hearth.kernels.selftest import SelfTest

    for status, code in (("fail", ExitCode.MISSING), ("skip", 0), ("ok", 0)):
        monkeypatch.setattr("hearth.cli.kernels.self_test", lambda s=status: SelfTest(s, "because"))
        done = run.invoke(kernels_app, ["verify", "--dir", str(folder), "--device", "12.0", "--self-test"])
        assert done.exit_code == code
        assert f"self-test: {status}: because" in done.stdout
