"""Real SGLang wheels: fetched once, read without being installed or run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_TARGET = [
    *("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312"),
    *("--platform", "manylinux_2_34_x86_64"),
]
_ARCH = re.compile(r"[A-Z]\w+(?:ForCausalLM|ForConditionalGeneration|LM)\w*")
_CONFIG = "sglang/srt/model_executor/cuda_graph_config.py"
_MODELS = "sglang/srt/configs/model_config.py"
_RUNNER = "sglang/srt/model_executor/model_runner.py"
_SETUP = "sglang/srt/model_executor/model_runner_components/cuda_graph_setup.py"


def cache_dir() -> Path:
    """Where the wheels are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HEARTH_CACHE") or Path(base, "hearth")) / "wheels"


def fetch(version: str) -> Wheel:
    """The wheel of a release, downloaded by pip (without what it depends on) where it isn't there yet."""
    home = cache_dir()
    home.mkdir(parents=True, exist_ok=True)
    pattern = f"sglang-{version}-*.whl"
    if not any(home.glob(pattern)):
        with tempfile.TemporaryDirectory(dir=home) as aside:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
            only = ["--only-binary=:all:", *_TARGET, "--dest", aside, f"sglang=={version}"]
            subprocess.run([*pip, *only], check=True)
            found = next(Path(aside).glob(pattern))
            found.replace(home / found.name)
    return Wheel(version, next(iter(sorted(home.glob(pattern)))))


@dataclass(frozen=True)
class Flag:
    """A command-line flag as the wheel defines it. `choices`: None where any value goes or can't be told."""

    name: str
    choices: tuple[str, ...] | None = None
    takes_value: bool = True


class Wheel:
    """The facts of one wheel that Hearth relies on, read from its source."""

    def __init__(self, version: str, path: Path) -> None:
        self.version = version
        self._zip = zipfile.ZipFile(path)
        self._names = frozenset(self._zip.namelist())

    def has(self, name: str) -> bool:
        return name in self._names

    def text(self, name: str) -> str:
        return self._zip.read(name).decode("utf-8")

    def mentions(self, names: set[str]) -> set[str]:
        """Which of the names some Python file of the wheel holds."""
        left = {name.encode() for name in names}
        for member in self._names:
            if member.endswith(".py") and left:
                data = self._zip.read(member)
                left = {name for name in left if name not in data}
        return names - {name.decode() for name in left}

    @cached_property
    def flags(self) -> dict[str, Flag]:
        """Every flag of the server: `add_argument` calls, and fields that turn into flags (0.5.14 on)."""
        files = [
            name
            for name in sorted(self._names)
            if name == "sglang/srt/server_args.py" or name.startswith("sglang/srt/arg_groups/fields/")
        ]
        found: dict[str, Flag] = {}
        for tree in (ast.parse(self.text(name)) for name in files):
            for flag in (*self._added(tree), *self._fields(tree)):
                found.setdefault(flag.name, flag)
        return found

    @cached_property
    def allowed_backends(self) -> dict[str, tuple[str, ...]]:
        """ALLOWED_BACKENDS_PER_PHASE (0.5.14 on): `prefill` and `decode`."""
        table = _assigned(ast.parse(self.text(_CONFIG)), "ALLOWED_BACKENDS_PER_PHASE")
        assert isinstance(table, ast.Dict)
        return {
            _attribute(key).lower(): tuple(self._backends[_attribute(item)] for item in value.elts)
            for key, value in zip(table.keys, table.values, strict=True)
            if key is not None and isinstance(value, ast.Tuple)
        }

    @cached_property
    def piecewise_blacklist(self) -> frozenset[str]:
        """Architectures for which piecewise prefill graphs are off unless enforced; empty before 0.5.10."""
        value = _assigned(ast.parse(self.text(_MODELS)), "piecewise_cuda_graph_disabled_model_archs")
        return frozenset(ast.literal_eval(value)) if value is not None else frozenset()

    @cached_property
    def mla_archs(self) -> frozenset[str]:
        """Architectures in the conditions under which model_config sets AttentionArch.MLA."""
        found: set[str] = set()
        for node in ast.walk(ast.parse(self.text(_MODELS))):
            if isinstance(node, ast.If) and any(_sets_mla(line) for line in node.body):
                found |= set(_ARCH.findall(ast.unparse(node.test)))
        return frozenset(found)

    def function(self, file: str, name: str) -> str:
        """Source of the function `name`, without comments."""
        tree = ast.parse(self.text(file))
        return next(
            ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == name
        )

    @property
    def decode_first(self) -> bool:
        """Whether decode graphs are captured before prefill graphs, from the order of the two calls."""
        for file, name in (
            (_SETUP, "capture_cuda_graphs"),
            (_RUNNER, "init_cuda_graphs"),
            (_RUNNER, "initialize"),
        ):
            if self.has(file) and f"def {name}(" in self.text(file):
                source = self.function(file, name)
                prefill = re.search(
                    r"(init_piecewise_cuda_graphs|init_prefill_cuda_graph|capture_prefill_graph)\(", source
                )
                decode = re.search(
                    r"(init_device_graphs|init_decode_cuda_graph|capture_decode_graph)\(", source
                )
                if prefill and decode:
                    return decode.start() < prefill.start()
        raise AssertionError(f"{self.version}: no function calls both captures")

    @cached_property
    def _backends(self) -> dict[str, str]:
        """The constants of class Backend by name."""
        tree = ast.parse(self.text(_CONFIG))
        body = next(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "Backend")
        return {
            node.targets[0].id: node.value.value
            for node in body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }

    def _added(self, tree: ast.Module) -> Iterator[Flag]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _attribute(node.func) == "add_argument":
                action = next((ast.unparse(k.value) for k in node.keywords if k.arg == "action"), "")
                for word in node.args:
                    if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                        yield Flag(
                            str(word.value),
                            self._choices(node),
                            not re.search("(?i)store_?(true|const)", action),
                        )

    def _fields(self, tree: ast.Module) -> Iterator[Flag]:
        """`name: A[type, "help" | Arg(...)]` becomes `--name` (arg_groups/arg_utils.py)."""
        for node in ast.walk(tree):
            note = node.annotation if isinstance(node, ast.AnnAssign) else None
            if not (isinstance(note, ast.Subscript) and ast.unparse(note.value) in ("A", "Annotated")):
                continue
            assert isinstance(node, ast.AnnAssign)
            assert isinstance(node.target, ast.Name)
            assert isinstance(note.slice, ast.Tuple)
            kind, *rest = note.slice.elts
            arg = next((a for a in rest if isinstance(a, ast.Call) and _attribute(a.func) == "Arg"), None)
            words = {k.arg: k.value for k in arg.keywords} if arg else {}
            if "no_cli" in words:
                continue
            main = (
                words["cli_name"]
                if "cli_name" in words
                else ast.Constant("--" + node.target.id.replace("_", "-"))
            )
            names = [ast.literal_eval(main), *ast.literal_eval(words.get("aliases", ast.List([])))]
            for name in names:
                yield Flag(name, self._choices(arg) if arg else None, ast.unparse(kind) != "bool")

    def _choices(self, call: ast.Call) -> tuple[str, ...] | None:
        value = next((k.value for k in call.keywords if k.arg == "choices"), None)
        if isinstance(value, (ast.List, ast.Tuple)) and all(isinstance(e, ast.Constant) for e in value.elts):
            return tuple(str(item) for item in ast.literal_eval(value))
        if value is not None and ast.unparse(value) == "Backend.ALL":
            tree = ast.parse(self.text(_CONFIG))
            names = _assigned(tree, "ALL", "Backend")
            assert isinstance(names, ast.Tuple)
            return tuple(self._backends[_attribute(name)] for name in names.elts)
        return None


def _assigned(tree: ast.AST, name: str, inside: str | None = None) -> ast.expr | None:
    """What is assigned to `name`, at any depth, or in the class `inside`."""
    if inside is not None:
        tree = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == inside)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == name for t in node.targets
        ):
            return node.value
    return None


def _attribute(node: ast.expr) -> str:
    """Last part of a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _sets_mla(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node) == "self.attention_arch = AttentionArch.MLA"
