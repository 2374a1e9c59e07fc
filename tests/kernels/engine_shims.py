"""Lets real SGLang modules be imported where SGLang's dependencies are not: everything but torch is a shim.

Only imports made by SGLang's own files are answered, and two corners that a CPU can't have. The modules under
test, and the rest of flashinfer and torch, are the real ones.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch._inductor.compile_fx  # noqa: F401  before a triton shim is seen

# Descriptions of models, which need real transformers classes; and what loads the CUDA runtime on import.
SHIMMED = ("sglang.srt.configs", "flashinfer.comm")
REAL = {"sglang", "flashinfer", "torch", "hearth", "numpy", "tvm_ffi", "psutil", "packaging", "requests"}


class Meta(type):
    """A class whose attributes are classes, that can be subclassed, indexed and called."""

    def __getattr__(cls, name):
        return attribute(name)

    def __iter__(cls):
        return iter(())

    def __setitem__(cls, key, value):
        pass

    def __contains__(cls, key):
        return False

    def __getitem__(cls, key):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__


def attribute(name):
    if name.startswith("__") and name != "__func__":
        raise AttributeError(name)
    return "cpu" if name == "backend" else Meta(name, (Anything,), {})


class Anything(metaclass=Meta):
    """Also a decorator: called with one function, it returns it."""

    def __new__(cls, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return object.__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **kwargs):
        pass

    def __class_getitem__(cls, key):
        return cls

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name):
        return attribute(name)


class Shim(types.ModuleType):
    """A module that has whatever is asked of it."""

    __path__ = ()
    __all__ = ()

    def __getattr__(self, name):
        return attribute(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if name.startswith(SHIMMED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if root in REAL or root in sys.stdlib_module_names or not importer().startswith("sglang"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Shim(spec.name)

    def exec_module(self, module):
        pass


def importer():
    """The module whose import statement is being carried out."""
    frame = sys._getframe(2)
    while frame and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


def install():
    sys.meta_path.insert(0, Finder())
