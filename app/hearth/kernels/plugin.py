"""Puts the opaque FP4 ops in place of FlashInfer's raw functions inside an engine.

SGLang <= 0.5.11 imports `fp4_quantize` raw, which `torch.compile(fullgraph=True)` can't trace. Two ways in:

* 0.5.11: `install` is an entry point of group `sglang.srt.plugins`, called in every engine process;
* older: `write_pth` puts `hearth_fp4.pth` into the environment. It waits, without importing anything, for
  the first import of `sglang` in a process, then arms a wrapt post-import hook on flashinfer.

SGLang >= 0.5.12 wraps the function in an op of its own: nothing is replaced. Each engine process prints
one line to standard error (SGLang sets its logging up later than this runs), which the supervisor reads.
No failure here stops an engine: it would only run as it did before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

PREFIX = "hearth-fp4:"
PTH_NAME = "hearth_fp4.pth"
WRAPS_ITSELF = (0, 5, 12)

# Runs at the start of every interpreter of the environment, so it only leaves a finder that compares names.
# It is never removed from sys.meta_path: the import system is iterating over that list when it fires.
_PTH_SOURCE = """
class HearthFp4:
    armed = False

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "sglang" and not cls.armed:
            cls.armed = True
            try:
                from hearth.kernels.plugin import install
                install()
            except Exception as error:
                print("hearth-fp4: not installed:", repr(error), file=sys.stderr, flush=True)
        return None

sys.meta_path.insert(0, HearthFp4)
"""

_installed = False


def install() -> None:
    """Replace FlashInfer's FP4 functions in this process, now or as soon as flashinfer is imported.

    Never raises: what goes wrong is printed. Calling it again does nothing.
    """
    global _installed
    if _installed:
        return
    _installed = True
    _guarded(_arm)


def write_pth(site_dir: Path) -> Path:
    """Write the import hook into a site-packages folder and return its path. Raises OSError."""
    path = site_dir / PTH_NAME
    aside = path.with_suffix(".tmp")
    aside.write_text(f'import sys; exec({_PTH_SOURCE!r}, {{"sys": sys, "__name__": "hearth_fp4"}})\n')
    aside.replace(path)
    return path


def replace_in(modules: Iterable[ModuleType], originals: dict[int, Callable[..., Any]]) -> dict[str, int]:
    """Replace every module attribute that *is* one of the originals (keyed by id), whatever its name there.

    Returns the key of the original for each place, `module.attribute`.
    """
    places = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in originals:
                setattr(module, name, originals[id(value)])
                places[f"{module.__name__}.{name}"] = id(value)
    return places


def loaded_modules(*packages: str) -> list[ModuleType]:
    """The modules of some top-level packages that are loaded now."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and isinstance(module, ModuleType)
    ]


def engine_version() -> str:
    """The installed SGLang's version, or "unknown" (a source tree)."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "unknown"


def needs_replacing(version: str) -> bool:
    """Whether that SGLang calls FlashInfer's functions raw. An unknown one is taken to: it does no harm."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).release < WRAPS_ITSELF
    except InvalidVersion:
        return True


def _guarded(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception as error:  # an engine without graphs is better than none
        reason = str(error).splitlines()[0] if str(error) else ""
        _say(f"not replaced in pid {os.getpid()}: {type(error).__name__}: {reason}")


def _arm() -> None:
    version = engine_version()
    if not needs_replacing(version):
        _say(f"nothing to replace: sglang {version} wraps fp4_quantize itself")
        return
    if "flashinfer" in sys.modules:
        _replace()
        return
    import wrapt

    wrapt.register_post_import_hook(lambda module: _guarded(_replace), "flashinfer")


def _replace() -> None:
    from hearth.kernels import ops

    registered = ops.register()
    defining = sys.modules[registered["fp4_quantize"].raw.__module__]
    originals = {id(op.raw): op.call for op in registered.values()}
    # In the defining module the originals call each other, and FlashInfer's own op calls `fp4_quantize`
    # by its global name: that one stays as it is.
    modules = [m for m in loaded_modules("flashinfer", "sglang") if m is not defining]
    places = replace_in(modules, originals)
    names = sorted(op.name for op in registered.values() if id(op.raw) in places.values())
    _say(
        f"replaced {len(names)} ops ({', '.join(names)}) in pid {os.getpid()} ({_process_name()})"
        f" for sglang {engine_version()}"
    )


def _process_name() -> str:
    from multiprocessing import current_process

    return current_process().name


def _say(text: str) -> None:
    print(PREFIX, text, file=sys.stderr, flush=True)
