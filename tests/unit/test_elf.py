"""The reader of architectures: real nvcc headers, damaged files, hostile files."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.kernels.elf import Arch, KernelFileError, read_archs, read_entries

# Entry headers as nvcc 13.0.88 wrote them (32-bit words); only the payload size is the test's own.
SM_90A = "01010002 00000040 {size} 0 00000376 0 00010008 5a 0 0 00108011 0 0 0 00000e70 0"
SM_120F = (
    "01010002 00000070 {size} 0 000004b3 40 00010008 78 0 0 01208011 0 0 0 00001498 0 48 24 "
    "00090200 01020200 05050200 01070300 00030201 01060200 080b0400 00005000 0 0"
)
SM_120A = "01010002 00000060 {size} 0 0 40 00010008 78 0 0 01100011 0 0 0 0 0 48 10 01090200 080b0400 0 0 0 0"
SM_100 = "01010002 00000060 {size} 0 0 40 00010008 64 0 0 01000011 0 0 0 0 0 48 10 00090200 080b0400 0 0 0 0"
PTX_120F = "01010001 00000050 {size} 0 00000102 40 00090000 78 0 0 00208011 0 0 0 00000197 0 48 0 0 0"


def entry(header: str, payload: bytes = b"\xaa" * 24) -> bytes:
    words = [int(word, 16) for word in header.format(size=f"{len(payload):x}").split()]
    return struct.pack(f"<{len(words)}I", *words) + payload


def fatbin(*headers: str) -> bytes:
    body = b"".join(entry(header) for header in headers)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(device_code: bytes | None, section: bytes = b".nv_fatbin") -> bytes:
    """A shared library with nothing in it but section names and, perhaps, device code."""
    names = b"\0.shstrtab\0" + section + b"\0"
    code = device_code or b""
    table = 64 + len(names) + len(code)
    head = bytearray(64)
    head[:7] = b"\x7fELF\x02\x01\x01"
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HHH", head, 0x3A, 64, 2 if device_code is None else 3, 1)
    sections = [bytes(64), header(1, 64, len(names)), header(11, 64 + len(names), len(code))]
    return bytes(head) + names + code + b"".join(sections[: 2 if device_code is None else 3])


def header(name: int, offset: int, size: int) -> bytes:
    return struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, size, 0, 0, 8, 0)


def write(folder: Path, data: bytes) -> Path:
    path = folder / "kernel.so"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("headers", "archs"),
    [
        ((SM_120F,), ("sm_120f",)),
        ((SM_120A,), ("sm_120a",)),
        ((SM_90A, SM_120F, SM_120F), ("sm_90a", "sm_120f")),
        ((SM_100, SM_90A), ("sm_90a", "sm_100")),
        ((PTX_120F,), ()),
        ((), ()),
    ],
)
def test_architectures_of_real_headers(
    tmp_path: Path, headers: tuple[str, ...], archs: tuple[str, ...]
) -> None:
    assert read_archs(write(tmp_path, elf(fatbin(*headers)))) == archs


def test_kind_and_compression_are_read(tmp_path: Path) -> None:
    entries = read_entries(write(tmp_path, elf(fatbin(SM_120F, SM_120A, PTX_120F))))
    assert [(str(e.arch), e.ptx, e.compressed) for e in entries] == [
        ("sm_120f", False, True),
        ("sm_120a", False, False),
        ("sm_120f", True, True),
    ]


def test_fat_binaries_follow_each_other_with_padding_and_in_the_other_section(tmp_path: Path) -> None:
    code = fatbin() + fatbin(SM_120F) + bytes(8) + fatbin(SM_90A)
    path = write(tmp_path, elf(code, b"__nv_relfatbin"))
    assert read_archs(path) == ("sm_90a", "sm_120f")


def test_a_library_without_device_code_has_none(tmp_path: Path) -> None:
    assert read_archs(write(tmp_path, elf(None))) == ()


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "truncated"),
        (b"\x7fELF", "truncated"),
        (b"#!/bin/sh\n" + bytes(64), "not an ELF file"),
        (b"\x7fELF\x01\x01" + bytes(64), "not a 64-bit"),
        (elf(b"\1" * 64), "malformed fat binary"),
        (elf(fatbin(SM_120F)[:-8]), "longer than its section"),
        (elf(fatbin(SM_120F))[:-1], "truncated"),
        (elf(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 63)), "longer than its section"),
        (elf(struct.pack("<IHHQ", 0xBA55ED50, 1, 0, 0)), "malformed"),
        (elf(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 8) + bytes(8)), "malformed fat binary entry"),
    ],
)
def test_damage_is_named_with_the_file(tmp_path: Path, data: bytes, word: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(KernelFileError, match=word) as caught:
        read_entries(path)
    assert str(path) in str(caught.value)


def test_missing_file_folder_and_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, word in (("none.so", "no such file"), (".", "not a file"), ("pipe", "not a file")):
        with pytest.raises(KernelFileError, match=word):
            read_entries(tmp_path / name)


def test_every_truncation_is_an_error_or_the_right_answer(tmp_path: Path) -> None:
    whole = elf(fatbin(SM_120F, SM_90A))
    for length in range(len(whole)):
        with pytest.raises(KernelFileError):
            read_entries(write(tmp_path, whole[:length]))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_altered_bytes_never_crash_the_reader(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    image = bytearray(elf(fatbin(SM_90A, SM_120F, PTX_120F)))
    for _ in range(data.draw(st.integers(1, 8))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    path = write(tmp_path_factory.mktemp("fuzz"), bytes(image))
    try:
        entries = read_entries(path)
    except KernelFileError:
        return
    assert all(str(Arch.parse(str(e.arch))) == str(e.arch) for e in entries)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_never_crash_the_reader(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, as_code: bool
) -> None:
    path = write(tmp_path_factory.mktemp("fuzz"), elf(data) if as_code else b"\x7fELF\x02\x01" + data)
    with contextlib.suppress(KernelFileError):
        read_entries(path)


def test_a_huge_sparse_section_ends_soon_and_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.kernels.elf._MAX_READS", 1000)
    size = 1 << 34
    path = write(tmp_path, elf(b"")[:64] + b"\0.nv_fatbin\0" + header(0, 64, 12) + header(1, 4096, size))
    with path.open("r+b") as file:
        head = bytearray(file.read(64))
        struct.pack_into("<Q", head, 0x28, 76)
        struct.pack_into("<HHH", head, 0x3A, 64, 2, 0)
        file.seek(0)
        file.write(head)
        file.truncate(4096 + size)
    with pytest.raises(KernelFileError, match="no end"):
        read_entries(path)


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("12.0f", Arch(12, 0, "f")),
        ("sm_120f", Arch(12, 0, "f")),
        ("120f", Arch(12, 0, "f")),
        ("9.0a", Arch(9, 0, "a")),
        ("sm_90", Arch(9, 0)),
        (" 10.3 ", Arch(10, 3)),
        ("compute_75", Arch(7, 5)),
    ],
)
def test_arch_spellings(text: str, arch: Arch) -> None:
    assert Arch.parse(text) == arch
    assert Arch.parse(str(arch)) == arch == Arch.parse(arch.dotted)


@pytest.mark.parametrize(
    "text", ["", "f", "sm_", "12", "12.", ".0", "12.0z", "twelve", "12.0.0", "-1.0", "１２.0"]
)
def test_a_bad_arch_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Arch.parse(text)


@pytest.mark.parametrize(
    ("arch", "device", "runs"),
    [
        ("sm_120f", (12, 0), True),
        ("sm_120f", (12, 1), True),
        ("sm_120f", (9, 0), False),
        ("sm_120a", (12, 0), True),
        ("sm_120a", (12, 1), False),
        ("sm_121f", (12, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (12, 0), False),
        ("sm_80", (8, 9), True),
        ("sm_80", (9, 0), False),
    ],
)
def test_where_code_runs(arch: str, device: tuple[int, int], runs: bool) -> None:
    assert Arch.parse(arch).runs_on(*device) is runs
