"""Packs a real SGLang for a GPU machine without a network: one .tar.xz of about 50 MB.

    python3 tests/gpu/engine/payload.py OUT.tar.xz [--wheels FOLDER]

The GPU machine has Python 3.12 and torch 2.11.0+cu130 with what usually lies beside them; SGLang 0.5.17 is
the newest release that pins that torch. From PyPI comes what is missing there, cut down to what a text
model on Hopper needs: no multimodal code, no FA3, no kernels for other GPUs. Whoever has a network installs
`sglang==0.5.17` instead. Unpacked: `site/` for PYTHONPATH, `bin/` (py-spy) for PATH.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

PINNED = (
    "sglang==0.5.17",
    "sglang-kernel==0.4.5",
    "flashinfer-python==0.6.15.post1",
    "apache-tvm-ffi==0.1.11",
    "transformers==5.12.1",
    "tokenizers==0.22.2",
    "xgrammar==0.2.1",
    "openai==2.6.1",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
)
OTHERS = (
    *(
        "annotated-doc",
        "annotated-types",
        "compressed-tensors",
        "dill",
        "distro",
        "docstring-parser",
        "easydict",
    ),
    *(
        "fastapi",
        "gguf",
        "httptools",
        "importlib_metadata",
        "jiter",
        "jsonschema",
        "jsonschema-specifications",
    ),
    *(
        "kernels<0.15",
        "llguidance<2",
        "loguru",
        "msgspec",
        "opentelemetry-api",
        "orjson",
        "partial_json_parser",
    ),
    *(
        "py-spy",
        "pybase64",
        "python-dotenv",
        "python-multipart",
        "pyzmq",
        "referencing",
        "rpds-py",
        "setproctitle",
    ),
    *(
        "sniffio",
        "starlette",
        "torch_memory_saver",
        "typing-inspection",
        "uvicorn",
        "watchfiles",
        "websockets",
    ),
    *("zipp", "zstandard"),
    *("cyclonedx-python-lib", "docker", "wrapt"),  # Hearth's own, for its command line
)
GLIBC = (35, 34, 31, 28, 27, 24, 17, 5)
PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in GLIBC), "manylinux2014_x86_64", "manylinux1_x86_64")

# Left out, by the path in the wheel.
DROPPED = re.compile(
    r"sglang/(multimodal_gen|test|benchmark|eval|lang/backend/test)/"
    r"|sglang/srt/(grpc|server)/_core"
    r"|sgl_kernel/(flash_ops|infllm_ops|flashmla_ops|sm100/|spatial_ops)"
    r"|xgrammar/lib/.*\.a$|.*/include/.*\.a$"
    r"|flashinfer/data/(cutlass/(test|examples|tools|docs|media|python)|csrc/(fused_moe|xqa))/"
    r"|.*/tests?/.*|.*\.(pyi|c|pyx|md|rst)$|.*\.dist-info/(licenses/.*|sboms/.*)$"
)
# Packages that are imported by name and never used here.
STUBS = {
    "soundfile.py": "",
    "interegular.py": "",
    "IPython/__init__.py": "",
    "IPython/display.py": "HTML = display = lambda *args, **kwargs: None\n",
}


def wanted(name: str) -> bool:
    """Whether a file of a wheel goes into the payload."""
    return not name.endswith("/") and DROPPED.match(name) is None


def download(folder: Path) -> None:
    """Fetch the wheels. Raises CalledProcessError with pip's own message above."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    only = ["--only-binary=:all:", "--implementation", "cp", "--python-version", "3.12"]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run([*pip, *only, *platforms, "-d", str(folder), *PINNED, *OTHERS], check=True)


def files(wheels: Path) -> Iterator[tuple[str, bytes, int]]:
    """Name, content and mode of each file to pack; like beside like, so that it compresses well."""
    found = []
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = [info.filename for info in archive.infolist() if wanted(info.filename)]
            found += [(placed(name), archive.read(name)) for name in names]
    found += [(f"site/{name}", text.encode()) for name, text in STUBS.items()]
    for name, content in sorted(found, key=lambda item: (Path(item[0]).suffix, item[0])):
        binary = name.startswith("bin/") or ".so" in Path(name).name
        yield name, stripped(content) if binary else content, 0o755 if binary else 0o644


def placed(name: str) -> str:
    """Where a wheel's file goes."""
    data = re.match(r"[^/]+\.data/(scripts|purelib|platlib|data)/(.*)", name)
    if data is None:
        return f"site/{name}"
    return f"bin/{data[2]}" if data[1] == "scripts" else f"site/{data[2]}"


def stripped(content: bytes) -> bytes:
    """A shared object without its symbols for debuggers; the content as it is where strip can't."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        result = subprocess.run(
            ["strip", "--strip-unneeded", file.name], capture_output=True, check=False, text=True
        )
        return Path(file.name).read_bytes() if result.returncode == 0 else content


def pack(wheels: Path, out: Path) -> int:
    """Write the archive; the number of files in it. The same wheels give the same bytes."""
    count = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out, "w:xz", preset=6) as archive:
        for name, content, mode in files(wheels):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
            count += 1
    return count


def main() -> None:
    """Download, pack, say how large it is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheels", type=Path, help="a folder that keeps the wheels for the next time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.wheels or Path(temporary)
        if not any(folder.glob("*.whl")):
            download(folder)
        count = pack(folder, args.out)
    print(f"{args.out}: {count} files, {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
