"""Reading hash-locked requirements: what isn't pinned and hashed is an error that names it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.errors import ConfigError, MissingError
from hearth.image.pins import parse_lock, read_lock, total_download

HASH = "--hash=sha256:" + "0a" * 32
GOOD = f"""\
# Made by somebody.
# download: 1234 bytes, 2 files; the largest:
# asks: torch==2.14.1
# asks: av==16.1.0; platform_machine == "aarch64"
Torch==2.14.1 \\
    {HASH} \\
    {HASH}
    # via sglang
uvicorn[standard]==0.54.0 ; python_full_version >= "3.11" \\
    {HASH}
"""


def test_pins_asks_and_download() -> None:
    lock = parse_lock(GOOD, "x.lock")
    assert lock.pins == {"torch": "2.14.1", "uvicorn": "0.54.0"}
    assert lock.asks == ("torch==2.14.1", 'av==16.1.0; platform_machine == "aarch64"')
    assert (lock.download_bytes, lock.download_files) == (1234, 2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"torch>=2.14 {HASH}", "'torch>=2.14' is not pinned"),
        (f"torch {HASH}", "'torch' is not pinned"),
        (f"torch==2.* {HASH}", "'torch==2.*' is not pinned"),
        (f"torch @ file:///x.whl {HASH}", "is not pinned"),
        (f"torch==2.14.1 ; nonsense {HASH}", "'nonsense' is no marker"),
        ("torch==2.14.1", "'torch==2.14.1' has no usable hash"),
        ("torch==2.14.1 --hash=md5:00", "'torch==2.14.1' has no usable hash"),
        (f"torch==2.14.1 {HASH} --hash=md5:00", "has no usable hash"),
        ("--extra-index-url https://user:password@host/simple", "--extra-index-url: an option"),
        ("-r other.lock", "-r: an option"),
        ("-e .", "-e: an option"),
    ],
)
def test_each_bad_line_is_named(line: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lock(f"{GOOD}{line}\n", "x.lock")
    assert says in str(caught.value)
    assert str(caught.value).startswith("x.lock: line 11: ")
    assert "password" not in str(caught.value)


def test_every_bad_line_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lock(f"{GOOD}a>=1\nb\n", "x.lock")
    assert [line.split(":")[1].strip() for line in str(caught.value).splitlines()] == ["line 11", "line 12"]


def test_two_versions_of_one_package() -> None:
    with pytest.raises(ConfigError, match="torch is pinned twice"):
        parse_lock(f"{GOOD}torch==2.13.0 {HASH}\n", "x.lock")


def test_empty_and_missing_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="holds no requirement"):
        parse_lock("# nothing\n", "x.lock")
    with pytest.raises(MissingError, match="no such lock"):
        read_lock(tmp_path / "x.lock")
    (tmp_path / "y.lock").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="can't be read"):
        read_lock(tmp_path / "y.lock")


def test_total_download_is_known_or_not() -> None:
    lock = parse_lock(GOOD, "x.lock")
    assert total_download((lock, lock)) == 2468
    assert total_download((lock, parse_lock(f"a==1 {HASH}\n", "y.lock"))) is None


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    said = ""
    try:
        pins = parse_lock(text, "x.lock").pins
    except ConfigError as error:
        pins, said = {}, str(error)
    assert bool(pins) != said.startswith("x.lock: line ")


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,4})?", fullmatch=True)
VERSIONS = st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){0,3}(\.post[0-9])?", fullmatch=True)


@given(st.dictionaries(NAMES, VERSIONS, min_size=1, max_size=8))
def test_what_was_pinned_is_read(pins: dict[str, str]) -> None:
    text = "".join(f"{name}=={version} \\\n    {HASH}\n" for name, version in pins.items())
    assert parse_lock(text, "x.lock").pins == pins
