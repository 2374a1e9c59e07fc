"""Asks FlashInfer, in its own interpreter, for build files; `bake.py` runs it as a script.

    python bake_worker.py plan REQUEST.json RESULT.json
    python bake_worker.py aot  REQUEST.json RESULT.json

`plan` calls each module's generator and writes its `build.ninja` (FLASHINFER_WORKSPACE_BASE says where);
`aot` says where the installed package looks for each library and whether FlashInfer takes it from there.
The engine's Python can differ from Hearth's: this file imports nothing of Hearth, and what goes in and out
is JSON. No GPU and no compiler runs here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

_PACKAGES = {"flashinfer": "flashinfer-python", "tvm_ffi": "apache-tvm-ffi", "torch": "torch"}


class Refused(Exception):
    """Something a person can fix: kind, and one line."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def main(verb: str, request_path: str, result_path: str) -> int:
    """Run one verb.

    Exit code 0 with the answer in the result file, 1 with `{"error": {kind, message}}` there.
    """
    request = json.loads(Path(request_path).read_text())
    try:
        result = {"plan": _plan, "aot": _aot}[verb](request)
    except Refused as error:
        result = {"error": {"kind": error.kind, "message": str(error)}}
    except Exception as error:
        result = {"error": {"kind": "worker", "message": f"{type(error).__name__}: {error}"}}
    Path(result_path).write_text(json.dumps(result))
    return 1 if "error" in result else 0


def _plan(request: dict[str, Any]) -> dict[str, Any]:
    _import("flashinfer.jit.core")
    modules = []
    for name in request["modules"]:
        spec = _spec(name, request["generators"].get(name, ""))
        if not hasattr(spec, "write_ninja"):
            raise Refused(
                "unsupported", f"{name}: not an nvcc module ({type(spec).__name__}); it compiles on a GPU"
            )
        spec.write_ninja()
        modules.append(_describe(name, spec))
    return {"versions": versions(), "modules": modules}


def _describe(name: str, spec: Any) -> dict[str, Any]:
    return {
        "name": name,
        "build_dir": str(spec.build_dir),
        "library": str(spec.jit_library_path),
        "sources": len(spec.sources),
    }


def _aot(request: dict[str, Any]) -> dict[str, Any]:
    _import("flashinfer.jit.core")
    found = []
    for name in request["modules"]:
        spec = _spec(name, request["generators"].get(name, ""))
        found.append({"name": name, "path": str(spec.aot_path), "is_aot": bool(spec.is_aot)})
    return {"versions": versions(), "modules": found}


def _spec(name: str, generator: str) -> Any:
    """The JitSpec of that name: by the declared generator, else by `gen_NAME_module` in flashinfer.jit."""
    for candidate in (generator, _conventional(name)):
        function = _function(candidate) if candidate else None
        if function is None:
            continue
        try:
            spec = function()
        except RuntimeError as error:
            raise Refused("unsupported", f"{name}: FlashInfer refuses: {error}") from error
        if spec.name != name:
            raise Refused(
                "unknown_module", f"{name}: {candidate} makes {spec.name!r} in FlashInfer {_version()}"
            )
        return spec
    raise Refused("unknown_module", f"{name}: FlashInfer {_version()} has no such module")


def _function(generator: str) -> Any:
    module, _, attribute = generator.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError:
        return None


def _conventional(name: str) -> str:
    """`module:gen_NAME_module`, found in FlashInfer's text: only the module that has it is imported."""
    root = Path(str(_import("flashinfer.jit").__file__)).parent
    wanted = re.compile(rf"^def gen_{re.escape(name)}_module\(\)", re.MULTILINE)
    for path in sorted(root.rglob("*.py")):
        if wanted.search(path.read_text(encoding="utf-8", errors="replace")):
            dotted = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            return f"flashinfer.jit.{dotted}:gen_{name}_module"
    return ""


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Refused("no_flashinfer", f"{sys.executable}: {error}") from error


def _version() -> str:
    return versions().get("flashinfer", "?")


def versions() -> dict[str, str]:
    """Installed versions of what a library depends on, without importing any of it."""
    found = {}
    for key, package in _PACKAGES.items():
        try:
            found[key] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
