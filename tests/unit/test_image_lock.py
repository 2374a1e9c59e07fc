"""Making a lock: what is asked for, what is written, and the size of a download. No index is reached here."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from hearth.errors import ConfigError, MissingError, Unreachable
from hearth.image import lock as locking
from hearth.image.lock import Size, header, pin_base, requirements, size_of, wheel_asks, without
from hearth.image.pins import parse_lock
from hearth.image.spec import load, parse

IMAGES = Path(__file__).parents[2] / "images"
HASH = "--hash=sha256:" + "0" * 64


def wheel(name: str, size: int) -> dict[str, Any]:
    """A wheel as pylock.toml lists it."""
    return {"url": f"https://index.example/{name}", "size": size}


def source(size: int) -> dict[str, Any]:
    """A source archive as pylock.toml lists it."""
    return {"sdist": {"size": size}}


def test_size_takes_the_wheel_that_pip_would_take() -> None:
    packages = [
        {
            "name": "torch",
            "wheels": [
                wheel("torch-2.14.1-cp312-cp312-manylinux_2_28_x86_64.whl", 1),
                wheel("torch-2.14.1-cp311-cp311-manylinux_2_28_aarch64.whl", 2),
                wheel("torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl", 500),
                wheel("torch-2.14.1-py3-none-any.whl", 4),
            ],
        },
        {"name": "abi", "wheels": [wheel("abi-1-cp310-abi3-manylinux2014_x86_64.whl", 30)]},
        {
            "name": "newer",
            "wheels": [wheel("newer-1-cp311-cp311-manylinux_2_99_x86_64.whl", 9)],
            "sdist": {"size": 7},
        },
        {"name": "odd", "wheels": [wheel("not a wheel", 9)], **source(2)},
    ]
    size = size_of({"packages": packages}, "3.11")
    assert (size.total, size.files) == (539, 4)
    assert size.largest[0] == ("torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl", 500)
    assert ("newer (source)", 7) in size.largest


def test_header_is_read_again() -> None:
    spec = load(IMAGES / "glm5-nvfp4-sm120.yaml")
    text = header(spec, ["torch==2.14.1"], Size(4_000_000, 3, (("torch.whl", 3_000_000),)))
    lock = parse_lock(f"{text}torch==2.14.1 {HASH}\n", "x.lock")
    assert (lock.download_bytes, lock.download_files, lock.asks) == (4_000_000, 3, ("torch==2.14.1",))


@pytest.mark.parametrize("name", ["cpu", "glm5-nvfp4-sm120"])
def test_the_base_is_pinned_in_place(name: str) -> None:
    text = (IMAGES / f"{name}.yaml").read_text()
    first, second = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
    pinned = pin_base(text, first)
    assert parse(pinned, "x.yaml").base.reference == f"debian:12-slim@{first}"
    assert parse(pin_base(pinned, second), "x.yaml").base.digest == second
    assert [a for a, b in zip(text.splitlines(), pinned.splitlines(), strict=True) if a != b] == [
        line for line in text.splitlines() if line.startswith("  digest:")
    ]
    with pytest.raises(ConfigError, match="write `digest: null` under base"):
        pin_base(text.replace("  digest:", "  # digest:"), first)


def test_sglang_is_asked_for_once() -> None:
    spec = load(IMAGES / "cpu.yaml")
    has = parse_lock(f"sglang==0.5.23 {HASH}\n", "cpu.lock")
    assert requirements(spec, (has,)) == "flashinfer-python==0.7.2\n"
    assert requirements(spec, ()).startswith("sglang==0.5.23\n")


def test_without_drops_whole_entries() -> None:
    text = f"a==1 \\\n    {HASH}\n    # via b\nb==2 \\\n    {HASH}\n"
    assert without({"a"}, text) == f"b==2 \\\n    {HASH}\n"


def test_shipped_locks_name_no_index_and_no_path() -> None:
    for path in [*IMAGES.glob("glm5-*.lock"), IMAGES / "cpu-image.lock"]:
        text = path.read_text()
        for word in ("://", "/work", "/tmp", "/root", "--index", "--find-links", "-r "):
            assert word not in text, f"{path.name}: {word}"


def answers(code: int, complaint: str = "") -> Any:
    """A stand-in for a tool that ends with `code`."""
    return lambda *a, **k: subprocess.CompletedProcess(a, code, "", complaint)


def test_a_lock_that_cannot_be_made_leaves_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = tmp_path / "glm5-nvfp4-sm120.yaml"
    yaml.write_text((IMAGES / yaml.name).read_text())
    old = (IMAGES / "glm5-nvfp4-sm120.lock").read_text()
    (tmp_path / "glm5-nvfp4-sm120.lock").write_text(old)
    monkeypatch.setattr(locking, "wheel_asks", lambda spec: ())
    monkeypatch.setattr(subprocess, "run", answers(1, "error: no solution\n  because torch==1 and torch==2"))
    with pytest.raises(ConfigError, match="don't fit together: error: no solution because torch==1"):
        locking.lock(yaml, tmp_path)
    assert (tmp_path / "glm5-nvfp4-sm120.lock").read_text() == old


def test_no_index_and_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load(IMAGES / "glm5-nvfp4-sm120.yaml")
    monkeypatch.setattr(
        subprocess, "run", answers(1, "ERROR: no route to https://user:pass@index.example/simple")
    )
    with pytest.raises(Unreachable) as caught:
        wheel_asks(spec)
    assert "index.example" not in str(caught.value)
    assert "pass" not in str(caught.value)

    def absent(*a: Any, **k: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", absent)
    with pytest.raises(MissingError, match="isn't installed"):
        wheel_asks(spec)
