"""Looks behind an obstacle: makes it a constant and traces again, until nothing is left that can be one.

An obstacle that only reads the machine (which nvcc, does a file exist, load a library) could be removed by
making its answer constant; what stays at the end can't be, and shows why only an opaque op helps.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from hearth.kernels import ops, plugin, trace_device

LIMIT = 16
# Calling these really would compile or load something: the tracer gets what they would return.
LOADERS = frozenset({"load", "load_module", "try_load", "build_and_load"})
TENSOR_PARAMETERS = frozenset(
    {"input", "a", "x", "unswizzled_sf", "input_tensor", "e2m1_tensor", "weight", "a_fp4", "paged_kv_cache"}
)


@dataclass(frozen=True)
class Frame:
    """One level of the traced program's stack."""

    file: str
    line: int
    name: str
    code: str


@dataclass(frozen=True)
class Obstacle:
    """Why a trace stopped, and the stack of the traced program there, outermost first.

    The stack is empty if the call itself was refused.
    """

    reason: str
    stack: tuple[Frame, ...]


@dataclass(frozen=True)
class _Owner:
    """A function that can be replaced: in its class, or in each module that imported it."""

    function: FunctionType
    cls: type | None
    name: str
    is_property: bool = False


class _SeenError(Exception):
    """Stops a run whose answer was seen."""


def peel(
    call: Callable[[], Any],
    trace: Callable[[Callable[[], Any]], Obstacle | None],
    owned: Callable[[str], bool],
) -> list[Obstacle]:
    """Every obstacle in a row on the way through `call`.

    `trace` traces a call once; `owned` says which files hold functions that may be made constant.
    """
    obstacles: list[Obstacle] = []
    with contextlib.ExitStack() as undo:
        found = trace(call)
        while found is not None and len(obstacles) < LIMIT:
            obstacles.append(found)
            found = _remove(found, call, trace, owned, undo) if found.stack else found
            if found is obstacles[-1]:
                break
    return obstacles


def _remove(
    obstacle: Obstacle,
    call: Callable[[], Any],
    trace: Callable[[Callable[[], Any]], Obstacle | None],
    owned: Callable[[str], bool],
    undo: contextlib.ExitStack,
) -> Obstacle | None:
    """Make the innermost function around the obstacle constant that lets the trace get further.

    Returns what comes next: another obstacle, None (traced), or the same one if nothing helps.
    """
    for owner in _candidates(obstacle, owned):
        with contextlib.ExitStack() as attempt:
            try:
                attempt.enter_context(_constant(owner, call))
            except Exception:  # its answer can't be had outside the trace: try the function around it
                continue
            after = trace(call)
            if after is None or _is_progress(obstacle, after):
                undo.push(attempt.pop_all().__exit__)
                return after
    return obstacle


def _is_progress(before: Obstacle, after: Obstacle) -> bool:
    """Whether the tracer stopped elsewhere, and not because the constant itself couldn't be made."""
    if not after.stack or "assume_constant_result" in after.reason:
        return False
    return (after.stack[-1].file, after.stack[-1].line) != (before.stack[-1].file, before.stack[-1].line)


def _candidates(obstacle: Obstacle, owned: Callable[[str], bool]) -> list[_Owner]:
    """Owned functions below the last one that takes tensors, innermost first."""
    owners = [_find(frame) for frame in obstacle.stack if owned(frame.file)]
    below: list[_Owner] = []
    for owner in owners:
        if owner is None or _takes_tensors(owner):
            below = []
        else:
            below.append(owner)
    return below[::-1]


def _takes_tensors(owner: _Owner) -> bool:
    return not TENSOR_PARAMETERS.isdisjoint(inspect.signature(owner.function).parameters)


def _find(frame: Frame) -> _Owner | None:
    """The function that a frame runs, if it is reachable as a module's or a class's attribute."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == frame.file:
            for owner in _functions(module):
                if _runs(owner.function, frame):
                    return owner
    return None


def _functions(module: ModuleType) -> Iterator[_Owner]:
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            for method, member in list(vars(value).items()):
                inner = member.fget if isinstance(member, property) else member
                if isinstance(inner, FunctionType):
                    yield _Owner(inner, value, method, isinstance(member, property))
        else:
            inner = inspect.unwrap(value) if callable(value) else value
            if isinstance(inner, FunctionType):
                yield _Owner(inner, None, name)


def _runs(function: FunctionType, frame: Frame) -> bool:
    code = function.__code__
    if code.co_filename != frame.file or code.co_name != frame.name:
        return False
    last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
    return code.co_firstlineno <= frame.line <= last


@contextlib.contextmanager
def _constant(owner: _Owner, call: Callable[[], Any]) -> Iterator[None]:
    """Replace the function by one whose result the tracer takes as it is."""
    if owner.cls is not None:
        with trace_device.replaced(owner.cls, owner.name, _constant_member(owner)):
            yield
        return
    with _everywhere(owner, _constant_function(owner, call)):
        yield


@contextlib.contextmanager
def _everywhere(owner: _Owner, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's function in every module that imported it."""
    with contextlib.ExitStack() as stack:
        for module in plugin.loaded_modules("flashinfer", "tvm_ffi", "sglang"):
            for name, value in list(vars(module).items()):
                if owner.function in (value, inspect.getattr_static(value, "__wrapped__", None)):
                    stack.enter_context(trace_device.replaced(module, name, replacement))
        yield


def _constant_function(owner: _Owner, call: Callable[[], Any]) -> Callable[..., Any]:
    import torch

    if owner.name in LOADERS:
        return _returning(trace_device.native_module())
    seen = _observe(owner, call)
    if seen:
        return _returning(seen[0])

    def once(*args: Any, **kwargs: Any) -> Any:
        with trace_device.preloaded():  # or this would compile
            return owner.function(*args, **kwargs)

    marked: Callable[..., Any] = torch._dynamo.assume_constant_result(once)
    return marked


def _observe(owner: _Owner, call: Callable[[], Any]) -> list[Any]:
    """What the function returns when the call runs for real, with every library loaded."""
    seen: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        seen.append(owner.function(*args, **kwargs))
        raise _SeenError  # nothing after this is of interest

    with trace_device.preloaded(), _everywhere(owner, record), contextlib.suppress(Exception):
        call()
    return seen


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _constant_member(owner: _Owner) -> Any:
    """A property or method of a JIT spec, with the answer of the real FP4 spec."""
    if owner.name in LOADERS:
        return _returning(trace_device.native_module())
    value = owner.function(ops.fp4_spec())
    return property(lambda self: value) if owner.is_property else _returning(value)
