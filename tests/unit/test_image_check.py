"""Every check of an image, right and wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hearth.image import probe
from hearth.image.build import Layer
from hearth.image.check import Answer, Line, Seen, good, lines
from hearth.image.leaks import Leak
from hearth.image.pins import parse_lock
from hearth.image.spec import Module, load

IMAGES = Path(__file__).parents[2] / "images"
SPEC = load(IMAGES / "glm5-nvfp4-sm120.yaml")
HASH = "--hash=sha256:" + "0" * 64
LOCK = parse_lock(
    f"torch==2.14.1 {HASH}\nninja==1.13.2 {HASH}\ncolorama==0.4.6 ; sys_platform == 'win32' {HASH}\n",
    "a.lock",
)
MODULES = (Module(name="norm", why="x"),)
COMPILERS = "gcc gcc-12 x86_64-linux-gnu-g++-12 cc c++ cpp clang-15 ld ld.bfd as nvcc ptxas ptxas-blackwell"
LABELS = {
    f"org.opencontainers.image.{key}": "x" for key in ("title", "version", "licenses", "base.digest")
} | {f"io.hearth.{key}": "x" for key in ("sglang", "torch", "flashinfer", "cuda", "archs", "sbom")}
GOOD = Seen(
    config={
        "User": "10001:10001",
        "Entrypoint": ["/usr/bin/tini", "--", "hearth"],
        "StopSignal": "SIGTERM",
        "Healthcheck": {"Test": ["CMD", "python3", "-c", "http://127.0.0.1:9400/livez"]},
        "Labels": LABELS,
    },
    layers=(Layer(1_000_000, "COPY hearth"), Layer(900_000_000, "COPY torch")),
    who=Answer(0, {"uid": 10001, "gid": 10001, "groups": [], "writable": ["/tmp"], "python": "3.11"}),
    files=Answer(0, {"compilers": [], "setuid": [], "caches": [], "compat": [], "unread": []}),
    packages=Answer(0, {"python": {"Torch": "2.14.1"}, "debian": {}}),
    imports=Answer(0, {"torch": "", "sglang": ""}),
    kernels=Answer(0, {"ok": True, "libraries": [{"name": "norm", "problem": None}]}),
    trace=Answer(0, {"ok": True, "ops": [{"op": "fp4", "traceable": True, "frame": None, "reason": None}]}),
    plan=Answer(0, {"plan": {"prefill": "breakable", "decode": "full", "decode_max_bs": None}}),
    pip=Answer(1, None, "flashinfer 0.7.2 requires ninja, which is not installed."),
    sbom_digest="x",
)


def look(**changes: Any) -> dict[str, Line]:
    """The lines for an image that differs from a good one in these points."""
    return {line.id: line for line in lines(SPEC, (LOCK,), MODULES, dataclasses.replace(GOOD, **changes))}


def files(kind: str, *paths: str) -> Answer:
    """A file listing with one thing wrong."""
    return Answer(0, {**GOOD.files.body, kind: list(paths)})


def config(**changes: Any) -> dict[str, Any]:
    """The image's config with changes."""
    return {**GOOD.config, **changes}


def test_a_good_image_passes_every_line() -> None:
    found = look()
    assert {line.status for line in found.values()} == {"ok"}, found
    assert good(found.values())


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("user", {"who": Answer(0, {**GOOD.who.body, "uid": 0})}, "uid 0"),
    ("user", {"config": config(User="")}, "USER root"),
    ("user", {"who": Answer(0, {**GOOD.who.body, "writable": ["/opt/hearth"]})}, "may write /opt/hearth"),
    ("user", {"who": Answer(127, None, "no python3")}, "no answer (exit 127): no python3"),
    ("start", {"config": config(Entrypoint=["hearth"])}, "PID 1 is hearth"),
    ("start", {"config": config(Entrypoint=None)}, "PID 1 is nothing"),
    ("start", {"config": config(StopSignal="SIGKILL")}, "stop signal SIGKILL"),
    (
        "start",
        {"config": config(Healthcheck={"Test": ["CMD", "http://x:30000/health"]})},
        "doesn't ask",
    ),
    ("labels", {"config": config(Labels={})}, "missing: org.opencontainers.image.title"),
    ("compilers", {"files": files("compilers", "/usr/bin/gcc")}, "/usr/bin/gcc"),
    ("compilers", {"files": files("compilers", "/x/nvidia/cu13/bin/nvcc")}, "nvcc"),
    ("compilers", {"files": files("unread", "/root")}, "can't be read: /root"),
    ("setuid", {"files": files("setuid", "/usr/bin/su")}, "/usr/bin/su"),
    ("caches", {"files": files("caches", "/root/.cache/pip/x")}, "/root/.cache/pip/x"),
    ("cuda_compat", {"files": files("compat", "/usr/local/cuda/compat/libcuda.so")}, "compat"),
    ("cuda_compat", {"files": Answer(1)}, "no answer"),
    (
        "pins",
        {"packages": Answer(0, {"python": {"torch": "2.13.0"}, "debian": {}})},
        "torch 2.13.0, locked",
    ),
    ("pins", {"packages": Answer(0, {"python": {}, "debian": {}})}, "torch absent"),
    (
        "pins",
        {"packages": Answer(0, {"python": {"torch": "2.14.1", "ninja": "1.13.2"}, "debian": {}})},
        "ninja is in, though left out",
    ),
    ("pip_check", {"pip": Answer(1, None, "a 1 requires b, which is not installed.")}, "a 1 requires b"),
    ("pip_check", {"pip": Answer(127, None, "pip: not found")}, "pip: not found"),
    (
        "imports",
        {"imports": Answer(0, {"torch": "", "sglang": "ImportError: libnuma"})},
        "sglang: Import",
    ),
    ("imports", {"imports": Answer(-9, None, "Killed")}, "no answer (exit -9): Killed"),
    ("kernels", {"kernels": Answer(0, {"ok": True, "libraries": []})}, "norm: not there"),
    (
        "kernels",
        {"kernels": Answer(79, {"ok": False, "libraries": [{"name": "norm", "problem": "for sm_90 alone"}]})},
        "norm: for sm_90 alone",
    ),
    ("kernels", {"kernels": Answer(79, None, "hearth: no manifest")}, "no manifest"),
    (
        "trace",
        {"trace": Answer(3, {"ok": False, "ops": [{"op": "fp4", "traceable": False, "reason": "skipped"}]})},
        "fp4: skipped",
    ),
    ("trace", {"trace": Answer(0, {"ok": True, "ops": []})}, "no operator was traced"),
    ("plan", {"plan": Answer(0, {"plan": {"prefill": "disabled", "decode": "full"}})}, "disabled"),
    ("plan", {"plan": Answer(78, None, "hearth: unknown version")}, "unknown version"),
    ("size", {"layers": (Layer(6_000_000, "x"),)}, "0.01 GB"),
    ("size", {"layers": ()}, "no layer"),
    ("sbom", {"sbom_digest": "sha256:other"}, "sha256:other"),
    ("sbom", {"sbom_digest": "", "config": config(Labels={**LABELS, "io.hearth.sbom": ""})}, "label absent"),
    ("leaks", {"leaks": (Leak("the value of API_TOKEN", "/opt/x"),)}, "the value of API_TOKEN in /opt/x"),
]


@pytest.mark.parametrize(("name", "changes", "says"), BAD, ids=[f"{n}-{s[:30]}" for n, _, s in BAD])
def test_each_wrong_thing_fails_its_line_with_a_fix(name: str, changes: dict[str, Any], says: str) -> None:
    found = look(**changes)
    assert found[name].status == "fail"
    assert says in found[name].seen
    assert found[name].fix
    assert not good(found.values())


def test_every_check_has_a_way_to_fail() -> None:
    assert set(look()) == {name for name, _, _ in BAD}


def test_a_package_brings_its_own_assembler() -> None:
    path = "/opt/hearth/venv/lib/python3.11/site-packages/triton/backends/nvidia/bin/ptxas"
    line = look(files=files("compilers", path))["compilers"]
    assert (line.status, path in line.seen) == ("ok", True)


def test_no_driver_where_the_image_is_built() -> None:
    error = "ImportError: libcuda.so.1: cannot open shared object file"
    line = look(imports=Answer(0, {"torch": "", "sgl_kernel": error}))["imports"]
    assert (line.status, "sgl_kernel" in line.seen) == ("skip", True)


def test_ops_that_the_engine_does_not_need_may_be_untraceable() -> None:
    ops = [
        {"op": "plain", "traceable": False, "required": False, "reason": "skipped"},
        {"op": "ours", "traceable": True, "required": True, "reason": None},
    ]
    assert look(trace=Answer(0, {"ok": True, "ops": ops}))["trace"].status == "ok"


def test_a_lock_that_is_not_whole_is_not_asked_to_be() -> None:
    cpu = load(IMAGES / "cpu.yaml")
    found = {line.id: line for line in lines(cpu, (LOCK,), MODULES, GOOD)}
    assert found["pip_check"].status == "skip"


@pytest.mark.parametrize(
    "name",
    COMPILERS.split(),
)
def test_probe_knows_a_compiler(tmp_path: Path, name: str) -> None:
    tool = tmp_path / name
    tool.write_text("")
    tool.chmod(0o755)
    assert probe.judge(str(tool), name) == ["compilers"]
    tool.chmod(0o644)
    assert probe.judge(str(tool), name) == []


@pytest.mark.parametrize("name", ["python3", "tini", "hearth", "gcc.py", "cache", "assets", "make_me", "ldd"])
def test_probe_leaves_other_programs_alone(tmp_path: Path, name: str) -> None:
    tool = tmp_path / name
    tool.write_text("")
    tool.chmod(0o755)
    assert probe.judge(str(tool), name) == []


def test_probe_sees_setuid_links_caches_and_compat(tmp_path: Path) -> None:
    tool = tmp_path / "su"
    tool.write_text("")
    tool.chmod(0o4755)
    assert probe.judge(str(tool), "su") == ["setuid"]
    (tmp_path / "gcc").symlink_to("gcc-12")
    assert probe.judge(str(tmp_path / "gcc"), "gcc") == ["compilers"]
    cache = tmp_path / ".cache" / "pip" / "x"
    cache.parent.mkdir(parents=True)
    cache.write_text("")
    assert probe.judge(str(cache), "x") == ["caches"]
    assert probe.judge(str(tmp_path / "absent"), "gcc") == []
    assert probe.COMPAT.fullmatch("/usr/local/cuda-13.0/compat/libcuda.so.1")
