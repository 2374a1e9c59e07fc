"""Which GPU architectures a library has code for, read from the library itself.

A CUDA shared library carries *fat binaries* in the ELF sections `.nv_fatbin` and `__nv_relfatbin`: a header,
then entries, each with a header of its own that names the kind (machine code or PTX) and the architecture.
NVIDIA documents only the container (`fatbinary_section.h`). The entry fields below were read off libraries
that nvcc 13.0 made for sm_90 to sm_121 with each suffix, plain or compressed, and agree with `cuobjdump` on
each. Only headers are read (payloads are skipped, compressed or not), so memory
stays small whatever the file's size, and a damaged file gives `KernelFileError`, never anything else.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hearth.errors import MissingError

_SECTIONS = (b".nv_fatbin\0", b"__nv_relfatbin\0")
_FATBIN_MAGIC = 0xBA55ED50
_KIND_PTX, _KIND_ELF = 1, 2
_FLAG_ARCH_SPECIFIC = 1 << 20
_FLAG_FAMILY = 1 << 21
_MAX_SECTIONS = 65535
_MAX_NAMES = 1 << 20
# Reads of one file; a real library of a hundred translation units needs some hundreds.
_MAX_READS = 1_000_000

_FATBIN_HEADER = struct.Struct("<IHHQ")
_ENTRY_HEADER = struct.Struct("<HHIQIIHHIIIQ")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")


class KernelFileError(MissingError):
    """A library that can't be read as a 64-bit ELF file with well-formed fat binaries."""


@dataclass(frozen=True, order=True)
class Arch:
    """One architecture: compute capability `major.minor` and how far its code carries.

    `suffix` is "" (that minor version and later ones of the same major), "a" (that version alone) or "f" (the
    family: carries like "", with family-specific instructions).
    """

    major: int
    minor: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> Arch:
        """From "12.0f", "sm_120f" or "120f". Raises ValueError on anything else."""
        body = text.strip().removeprefix("sm_").removeprefix("compute_")
        suffix = body[-1:] if body[-1:] in ("a", "f") else ""
        digits = body.removesuffix(suffix) if suffix else body
        major, dot, minor = digits.partition(".") if "." in digits else (digits[:-1], ".", digits[-1:])
        if not (dot and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()):
            raise ValueError(f"{text!r} is no CUDA architecture such as 12.0f or sm_120f")
        if not _plausible(int(major) * 10 + int(minor)):
            raise ValueError(f"{text!r} is no CUDA architecture: there is no sm_{major}{minor}")
        return cls(int(major), int(minor), suffix)

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @property
    def dotted(self) -> str:
        """The spelling of FLASHINFER_CUDA_ARCH_LIST: "12.0f"."""
        return f"{self.major}.{self.minor}{self.suffix}"

    def runs_on(self, major: int, minor: int) -> bool:
        """Whether machine code for this architecture loads on a device of that compute capability.

        CUDA Programming Guide, "Compute capability and feature sets": plain and family code runs on the same
        major version from its minor version on, architecture-specific code on exactly its own.
        """
        if self.suffix == "a":
            return (major, minor) == (self.major, self.minor)
        return major == self.major and minor >= self.minor


@dataclass(frozen=True, order=True)
class Entry:
    """One entry of a fat binary. `ptx` entries need a compiler (the driver's) before they run."""

    arch: Arch
    ptx: bool
    compressed: bool = False


def read_archs(path: Path) -> tuple[str, ...]:
    """The architectures a library has machine code for, sorted: `("sm_120f",)`; empty without device code.

    PTX doesn't count. Raises KernelFileError, which names the file and what is wrong with it.
    """
    return tuple(str(arch) for arch in sorted({e.arch for e in read_entries(path) if not e.ptx}))


def read_entries(path: Path) -> tuple[Entry, ...]:
    """Every fat binary entry in file order. Raises KernelFileError."""
    try:
        if not path.is_file():
            raise KernelFileError(f"{path}: no such file" if not path.exists() else f"{path}: not a file")
        with path.open("rb") as file:
            return tuple(_Reader(file, path).entries())
    except OSError as error:
        raise KernelFileError(f"{path}: can't be read: {error.strerror or error}") from error


class _Reader:
    """Reads an ELF file by offsets, each checked against the file's real size."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._size = os.fstat(file.fileno()).st_size
        self._reads = 0

    def entries(self) -> Iterator[Entry]:
        for start, end in self._device_sections():
            yield from self._section_entries(start, end)

    def _error(self, what: str) -> KernelFileError:
        return KernelFileError(f"{self._path}: {what}", "bake it again or copy it again")

    def _read(self, offset: int, length: int, what: str) -> bytes:
        if offset < 0 or length < 0 or offset + length > self._size:
            raise self._error(f"truncated: {what} ends at byte {offset + length} of {self._size}")
        self._reads += 1
        if self._reads > _MAX_READS:
            raise self._error("malformed: its device code has no end")
        self._file.seek(offset)
        data = self._file.read(length)
        if len(data) != length:
            raise self._error(f"truncated while reading {what}")
        return data

    def _device_sections(self) -> list[tuple[int, int]]:
        """Start and end offsets of the sections that hold fat binaries."""
        headers = self._section_headers()
        names = self._names(headers)
        found = []
        for name, _, _, _, offset, size, *_ in headers:
            if any(names.startswith(wanted, name) for wanted in _SECTIONS):
                self._check_extent(offset, size)
                found.append((offset, offset + size))
        return found

    def _check_extent(self, offset: int, size: int) -> None:
        if offset + size > self._size:
            raise self._error(f"truncated: device code ends at byte {offset + size} of {self._size}")

    def _section_headers(self) -> list[tuple[int, ...]]:
        head = self._read(0, 64, "the ELF header")
        if head[:4] != b"\x7fELF":
            raise self._error("not an ELF file")
        if head[4:6] != b"\x02\x01":
            raise self._error("not a 64-bit little-endian ELF file")
        (offset,) = struct.unpack_from("<Q", head, 0x28)
        entry_size, count, self._name_index = struct.unpack_from("<HHH", head, 0x3A)
        if offset == 0 or count == 0:
            return []
        if entry_size != _SECTION_HEADER.size or count > _MAX_SECTIONS:
            raise self._error("its section table is malformed")
        table = self._read(offset, entry_size * count, "the section table")
        return list(_SECTION_HEADER.iter_unpack(table))

    def _names(self, headers: list[tuple[int, ...]]) -> bytes:
        if not headers:
            return b""
        if self._name_index >= len(headers):
            raise self._error("its section table names no string table")
        offset, size = headers[self._name_index][4:6]
        if size > _MAX_NAMES:
            raise self._error("its section names are malformed")
        return self._read(offset, size, "the section names")

    def _section_entries(self, start: int, end: int) -> Iterator[Entry]:
        """Fat binaries lie one after the other, each on an 8-byte boundary, zeros between them."""
        position = start
        while position + _FATBIN_HEADER.size <= end:
            magic, _, header_size, size = _FATBIN_HEADER.unpack(
                self._read(position, _FATBIN_HEADER.size, "a fat binary header")
            )
            if magic == 0:
                position += 8
                continue
            if magic != _FATBIN_MAGIC or header_size < _FATBIN_HEADER.size:
                raise self._error(f"malformed fat binary at byte {position}")
            body = position + header_size
            if body + size > end:
                raise self._error(f"malformed fat binary at byte {position}: longer than its section")
            yield from self._fatbin_entries(body, body + size)
            position = start + _align(body + size - start)

    def _fatbin_entries(self, position: int, end: int) -> Iterator[Entry]:
        while position < end:
            if position + _ENTRY_HEADER.size > end:
                raise self._error(f"malformed fat binary entry at byte {position}")
            fields = _ENTRY_HEADER.unpack(self._read(position, _ENTRY_HEADER.size, "an entry header"))
            kind, _, header_size, size = fields[:4]
            if header_size < _ENTRY_HEADER.size or position + header_size + size > end:
                raise self._error(f"malformed fat binary entry at byte {position}")
            if kind in (_KIND_PTX, _KIND_ELF):
                if not _plausible(fields[8]):
                    raise self._error(f"malformed fat binary entry at byte {position}: sm_{fields[8]}")
                yield _entry(kind, compressed=fields[4] != 0, arch=fields[8], flags=fields[11])
            position += header_size + size


def _plausible(number: int) -> bool:
    """Whether sm_NUMBER can exist: below 50 no CUDA 13 tool knows it, from 1000 on the number is damage."""
    return 50 <= number < 1000


def _align(position: int) -> int:
    return (position + 7) & ~7


def _entry(kind: int, *, compressed: bool, arch: int, flags: int) -> Entry:
    suffix = "f" if flags & _FLAG_FAMILY else "a" if flags & _FLAG_ARCH_SPECIFIC else ""
    return Entry(Arch(arch // 10, arch % 10, suffix), ptx=kind == _KIND_PTX, compressed=compressed)
