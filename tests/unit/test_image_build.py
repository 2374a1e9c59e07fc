"""Arguments and labels of a build, and what stands in the Dockerfile around them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hearth.image.build import BuildFailed, Request, Source, _buildkit, build_args, labels, source_of
from hearth.image.spec import load

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
NAMES = sorted(path.stem for path in IMAGES.glob("*.yaml") if not path.stem.startswith("kernels-"))
CPU = load(IMAGES / "cpu.yaml")
GPU = load(IMAGES / "glm5-nvfp4-sm120.yaml")
REQUEST = Request(IMAGES / "cpu.yaml", ROOT, "t", ROOT)


def copied(stage: str) -> list[str]:
    """The files that a stage of the Dockerfile copies from the project's folder."""
    body = re.split(r"^FROM .*$", DOCKERFILE.replace("\\\n", " "), flags=re.MULTILINE)
    names = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    lines = re.findall(r"^COPY (?!--from)(.*)$", body[names.index(stage) + 1], re.MULTILINE)
    return [word for line in lines for word in line.split()[:-1]]


@pytest.mark.parametrize("name", NAMES)
def test_dockerfile_takes_every_argument(name: str) -> None:
    given = build_args(load(IMAGES / f"{name}.yaml"), IMAGES)
    declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert set(given) <= declared
    assert declared - set(given) == {"USER_ID"}


def test_arguments_say_what_the_bill_says() -> None:
    cpu, gpu = build_args(CPU, IMAGES), build_args(GPU, IMAGES)
    assert cpu["LOCKS"] == "cpu.lock cpu-image.lock"
    assert cpu["TRY_LOCK"] == "cpu-torch.lock"
    assert cpu["MODULES"] == "fp4_quantization_120f"
    assert gpu["WITHOUT"] == "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm ninja"
    assert gpu["BASE_IMAGE"] == gpu["BUILD_BASE"] == "debian:12-slim"
    assert (gpu["TRY_LOCK"], gpu["FILES"]) == ("", "")


def test_bases_can_be_replaced_apart() -> None:
    request = Request(IMAGES / "cpu.yaml", ROOT, "t", ROOT, base="mine:1", build_base="mine:build", jobs=3)
    given = build_args(CPU, IMAGES, request)
    assert (given["BASE_IMAGE"], given["BUILD_BASE"], given["JOBS"]) == ("mine:1", "mine:build", "3")
    alone = build_args(CPU, IMAGES, Request(IMAGES / "cpu.yaml", ROOT, "t", ROOT, base="mine:1"))
    assert alone["BUILD_BASE"] == "mine:1"


def test_labels_name_every_version_and_hold_nothing_empty() -> None:
    said = labels(GPU, Source("abc", "2026-11-29T18:00:00+00:00", ""), "debian:12-slim@sha256:1", "sha256:1")
    assert said["org.opencontainers.image.base.name"] == "debian:12-slim"
    assert said["org.opencontainers.image.revision"] == "abc"
    assert said["org.opencontainers.image.base.digest"] == "sha256:1"
    assert said["io.hearth.sglang"] == "0.5.23"
    assert said["io.hearth.archs"] == "12.0f"
    assert "org.opencontainers.image.source" not in said
    assert all(said.values())


def test_source_of_a_folder_without_git(tmp_path: Path) -> None:
    assert source_of(tmp_path) == Source()


def test_source_tells_a_changed_tree(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "remote", "add", "origin", "https://user:secret@example.org/x"], check=True)
    clean = source_of(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{40}", clean.revision)
    assert clean.url == ""
    (tmp_path / "file").write_text("2")
    assert source_of(tmp_path).revision == clean.revision + "-dirty"


def test_a_failed_build_names_its_step_and_keeps_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "docker"
    said = ["#5 [kernels 2/3] RUN bake", "#5 1.0 no nvcc", "#5 ERROR: exit code: 1"]
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in said) + "exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(BuildFailed) as caught:
        _buildkit(None, REQUEST, {}, {}, tmp_path / "log", lambda step: None)
    assert str(caught.value).startswith("stage kernels, step 2/3: RUN bake: exit code: 1\n  no nvcc\n")
    assert "no nvcc" in (tmp_path / "log").read_text()


def test_a_builder_that_dies_silently_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(BuildFailed, match="ended with 7"):
        _buildkit(
            None, Request(IMAGES / "cpu.yaml", tmp_path, "t", tmp_path), {}, {}, tmp_path / "log", print
        )


def test_dockerfile_needs_no_registry_of_syntaxes_and_no_buildkit() -> None:
    assert not DOCKERFILE.lower().startswith("# syntax")
    assert "--mount" not in DOCKERFILE
    assert "--chmod" not in DOCKERFILE


def test_baking_does_not_change_with_the_rest_of_hearth(tmp_path: Path) -> None:
    """The kernels stage copies few files of Hearth, and these are enough to bake."""
    files = copied("kernels")
    assert all(name.startswith("app/hearth/") and not name.endswith("/") for name in files)
    for name in files:
        target = tmp_path / Path(name).relative_to("app")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    code = (
        "import sys; sys.path = [p for p in sys.path if not p.rstrip('/').endswith('/app')]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "editable = lambda f: 'editable' in str(getattr(f, '__module__', f)).lower()\n"
        "sys.meta_path = [f for f in sys.meta_path if not editable(f)]\n"
        "import hearth, typer; from hearth.cli.bake import bake\n"
        f"assert hearth.__file__.startswith({str(tmp_path)!r}), hearth.__file__\n"
        "sys.argv = ['bake', '--help']; typer.run(bake)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--install" in done.stdout


def test_every_copied_file_passes_dockerignore() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    stages = ("toolchain", "engine", "kernels", "hearth")
    for name in [file for stage in stages for file in copied(stage)]:
        shown = name.replace("${IMAGE}", "cpu")
        fits = [rule for rule in allowed if f"{shown}/".startswith(f"{rule}/") or rule.startswith(shown)]
        assert fits or re.fullmatch(r"images/cpu\*\.lock", shown), name


def test_the_locks_that_a_stage_copies_are_the_bills() -> None:
    for name in NAMES:
        spec = load(IMAGES / f"{name}.yaml")
        extra = [spec.cpu.torch_lock, spec.cpu.cuda_libs] if spec.cpu else []
        assert all(lock.startswith(name) for lock in [*spec.locks, *extra])


def test_compose_file_runs_the_image_as_the_checks_do() -> None:
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["hearth"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["ulimits"] == {"memlock": -1, "stack": 67108864, "nofile": 1048576}
    devices = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    assert service["logging"]["options"]["max-size"]
    assert "healthcheck" not in service
    assert any(entry.startswith("/run/hearth:") for entry in service["tmpfs"])
