"""The `cpu` image from a local Debian root: built, checked, rebuilt, changed, and broken on purpose."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.image import look as looking
from hearth.image.check import HEARTH_LAYER_LIMIT, Line, lines
from hearth.image.leaks import Needle, default_needles
from hearth.image.spec import load_whole, modules_of

from .conftest import IMAGES, ROOT, TAG

CPU = IMAGES / "cpu.yaml"
AOT = "/opt/hearth/venv/lib/python3.11/site-packages/flashinfer/data/aot"
LIBRARY = f"{AOT}/fp4_quantization_120f/fp4_quantization_120f.so"
SECRET = "hearth-test-secret-0123456789"
NO_TAG = "hearth-test/never:latest"
# What a checkout has of a build's context, for a copy that a test may change.
CONTEXT = "app docker images requirements tools pyproject.toml README.md LICENSE .dockerignore"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the build takes, to be changed."""
    for name in CONTEXT.split():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, target)
    return tmp_path


@pytest.fixture
def derive(client: Any) -> Iterator[Any]:
    """Makes an image from the built one by a few more Dockerfile lines; removed after the test."""
    made: list[str] = []

    def more(text: str, files: dict[str, bytes] | None = None) -> str:
        context = io.BytesIO()
        with tarfile.open(fileobj=context, mode="w") as archive:
            for name, data in {"Dockerfile": f"FROM {TAG}\n{text}\n".encode(), **(files or {})}.items():
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(data), 0o755
                archive.addfile(info, io.BytesIO(data))
        context.seek(0)
        tag = f"hearth-test/broken-{len(made)}:latest"
        client.images.build(fileobj=context, custom_context=True, tag=tag, rm=True)
        made.append(tag)
        return tag

    yield more
    for tag in made:
        client.images.remove(tag, force=True)


def checked(client: Any, tag: str, sought: list[Needle] | None = None) -> dict[str, Line]:
    """Every line of the check of an image."""
    spec, locks = load_whole(CPU)
    needles = default_needles(ROOT) if sought is None else sought
    seen, _ = looking.look(client, tag, spec, needles, lambda what: None)
    return {line.id: line for line in lines(spec, locks, modules_of(spec, IMAGES), seen)}


def test_the_built_image_passes_its_checks(built: Any, hearth: Any) -> None:
    done = hearth("image", "check", "cpu", "--tag", TAG, "--json")
    body = json.loads(done.stdout)
    assert {line["id"]: line["status"] for line in body["checks"] if line["status"] != "ok"} == {
        "pip_check": "skip"
    }, done.stdout
    assert (done.returncode, body["ok"]) == (0, True)


def test_rebuilding_without_a_change_makes_no_layer(
    built: Any, hearth: Any, bases: list[str], client: Any
) -> None:
    """Every step comes from the cache: a layer made again would have new times in it."""
    done = hearth("image", "build", "cpu", "--tag", TAG, "--no-check", *bases)
    assert done.returncode == 0, done.stderr
    assert client.images.get(TAG).attrs["RootFS"] == built.attrs["RootFS"]


def test_a_change_of_one_hearth_file_ships_under_5_mb(
    built: Any, hearth: Any, bases: list[str], client: Any, tree: Path
) -> None:
    with (tree / "app/hearth/web.py").open("a") as file:
        file.write("\n# a change\n")
    tag = "hearth-test/changed:latest"
    done = hearth("image", "build", "cpu", "--root", str(tree), "--tag", tag, "--no-check", *bases)
    assert done.returncode == 0, done.stderr
    changed = client.images.get(tag)
    before, after = (image.attrs["RootFS"]["Layers"] for image in (built, changed))
    assert len(before) == len(after)
    differing = [n for n, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    assert differing == [len(after) - 1]
    sizes = [step["Size"] for step in changed.history() if step["Size"]]
    assert 0 < sizes[0] < HEARTH_LAYER_LIMIT
    client.images.remove(tag, force=True)


def test_what_is_added_turns_the_check_red(built: Any, client: Any, derive: Any) -> None:
    tag = derive(
        "USER root\nCOPY gcc /usr/bin/gcc\nCOPY key /opt/hearth/key\nENV TOKEN=" + SECRET + "\n"
        f"RUN chmod u+s /usr/bin/gcc && mkdir -p /root/.cache/pip && touch /root/.cache/pip/x\n"
        f"RUN rm -r {AOT}/fp4*\n"
        "STOPSIGNAL SIGKILL\nLABEL io.hearth.archs=",
        {"gcc": b"#!/bin/sh\n", "key": f"key = {SECRET}\n".encode()},
    )
    found = checked(client, tag, [Needle("the test's secret", SECRET.encode())])
    bad = {name for name, line in found.items() if line.status == "fail"}
    # Root without capabilities can't write the folders of the image's user, which importing needs.
    also = {"imports", "trace"}
    assert bad - also == {"user", "start", "labels", "compilers", "setuid", "caches", "kernels", "leaks"}, (
        found
    )
    assert "/usr/bin/gcc" in found["compilers"].seen
    assert "fp4_quantization_120f" in found["kernels"].seen
    assert SECRET not in repr(found)
    for place in ("config", "/opt/hearth/key"):
        assert place in found["leaks"].seen


def test_an_altered_library_turns_the_check_red(built: Any, client: Any, derive: Any) -> None:
    tag = derive(f"USER root\nRUN printf x | dd of={LIBRARY} bs=1 seek=4096 conv=notrunc\nUSER 10001:10001")
    answer = looking.ask(client, tag, ["hearth", "kernels", "verify", "--device", "12.0", "--json"])
    assert answer.code != 0
    assert not answer.body["ok"]
    assert answer.body["libraries"][0]["problem"]


def test_a_library_for_another_gpu_turns_the_check_red(built: Any, client: Any) -> None:
    answer = looking.ask(client, TAG, ["hearth", "kernels", "verify", "--device", "9.0", "--json"])
    assert answer.code != 0
    assert "sm_120" in answer.body["libraries"][0]["problem"]


def test_an_untraceable_operator_stops_the_build(
    hearth: Any, bases: list[str], built: Any, tree: Path
) -> None:
    """The engine's op looks at a data pointer while it is traced, as FlashInfer's plain functions do."""
    with (tree / "docker/hearth.py").open("a") as file:
        file.write(
            "    path = Path(sysconfig.get_path('purelib'), 'sglang/srt/layers/quantization/fp4_utils.py')\n"
            "    old, new = 'input.stride(-2) == 1', 'input.data_ptr() == 1'\n"
            "    assert old in path.read_text()\n"
            "    path.write_text(path.read_text().replace(old, new))\n"
        )
    done = hearth("image", "build", "cpu", "--root", str(tree), "--tag", NO_TAG, *bases)
    assert done.returncode == 3
    assert re.search(r"stage hearth, step \d+/\d+: RUN hearth trace", done.stderr), done.stderr
    assert "fp4_quantize" in done.stderr
    assert "whole log: " in done.stderr


def test_an_unpinned_requirement_stops_the_build(hearth: Any, bases: list[str], tree: Path) -> None:
    with (tree / "images/cpu-image.lock").open("a") as file:
        file.write("leftpad>=1\n")
    done = hearth("image", "build", "cpu", "--root", str(tree), *bases)
    assert done.returncode == 78
    assert "'leftpad>=1' is not pinned" in done.stderr
    assert "Step" not in done.stderr


def test_a_base_that_cannot_be_had(hearth: Any, client: Any) -> None:
    done = hearth("image", "build", "cpu", "--base", "hearth-test-no-such-base:1")
    assert done.returncode == 79
    assert "hearth-test-no-such-base:1: can't be had" in done.stderr


def test_the_files_of_the_image_are_the_licences_and_the_trace(built: Any, client: Any) -> None:
    answer = looking.ask(client, TAG, ["cat", "/opt/hearth/trace.json"])
    assert answer.body["ok"] is True


def test_python_of_the_base_must_fit(hearth: Any, bases: list[str], tree: Path) -> None:
    text = (tree / "images/cpu.yaml").read_text()
    (tree / "images/cpu.yaml").write_text(text.replace('python: "3.11"', 'python: "3.12"'))
    done = hearth("image", "build", "cpu", "--root", str(tree), "--tag", NO_TAG, *bases)
    assert done.returncode == 3
    assert "the base has Python 3.11, the locks are for 3.12" in done.stderr


def test_no_build_arg_holds_a_machine_path(hearth: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hearth", "image", "args", "cpu"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert str(ROOT) not in done.stdout
