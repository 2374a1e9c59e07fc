"""Build an image from its bill of materials: arguments and labels (pure), and the run over the Docker SDK.

The SDK speaks to the Engine's classic builder; `builder="buildkit"` runs the `docker` client instead, which
is the only way to BuildKit. Both tell of the same steps (`steps.py`). Every line goes into a log file.
"""

from __future__ import annotations

import io
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hearth import __version__
from hearth.errors import ExitCode, HearthError, MissingError, Unreachable
from hearth.image.spec import Spec, load_whole, modules_of
from hearth.image.steps import BuildKit, Classic, Step

Builder = Literal["classic", "buildkit"]
TITLE = "org.opencontainers.image"
OWN = "io.hearth"
LICENCES = "Apache-2.0"
_DOCKERFILE = "docker/Dockerfile"


class BuildFailed(HearthError):
    """The build stopped: which step, its last lines, and where the whole log is."""

    code = ExitCode.CHECK_FAILED


@dataclass(frozen=True)
class Request:
    """What to build: the YAML file, the project's folder, and what overrides the bill of materials.

    `base` and `build_base` replace the base image of the run-time and of the build stages; `jobs` caps the
    compile jobs; `logs` is the folder that the build's log goes to.
    """

    spec: Path
    root: Path
    tag: str
    logs: Path
    base: str | None = None
    build_base: str | None = None
    builder: Builder = "classic"
    jobs: int | None = None


@dataclass(frozen=True)
class Source:
    """Where the code comes from: commit (with -dirty), its time in RFC 3339, its address; "" if unknown."""

    revision: str = ""
    created: str = ""
    url: str = ""


@dataclass(frozen=True)
class Layer:
    """One layer of an image, topmost first: bytes, and the Dockerfile line that made it."""

    size: int
    made_by: str


@dataclass(frozen=True)
class Built:
    """An image that was built. `cached` of `steps` were taken from the cache."""

    id: str
    tag: str
    layers: tuple[Layer, ...]
    steps: int
    cached: int
    seconds: float
    log: Path

    @property
    def size(self) -> int:
        """Bytes, all layers together."""
        return sum(layer.size for layer in self.layers)


Report = Callable[[Step], None]


def build_args(spec: Spec, folder: Path, request: Request | None = None) -> dict[str, str]:
    """The Dockerfile's arguments. `folder` is the one that holds the YAML file."""
    base = (request and request.base) or spec.base.reference
    return {
        "BASE_IMAGE": base,
        "BUILD_BASE": (request and request.build_base) or base,
        "IMAGE": spec.name,
        "PYTHON": spec.python,
        "LOCKS": " ".join(spec.locks),
        "TRY_LOCK": spec.cpu.torch_lock if spec.cpu else "",
        "CUDA_LIBS": spec.cpu.cuda_libs if spec.cpu else "",
        "FILES": "/cpu_files" if spec.cpu else "",
        "WITHOUT": " ".join(item.package for item in spec.without),
        "APT": " ".join(spec.apt),
        "ARCHS": ",".join(spec.kernels.archs),
        "MODULES": ",".join(module.name for module in modules_of(spec, folder)),
        "JOBS": str(request.jobs) if request and request.jobs else "",
    }


def labels(spec: Spec, source: Source, base: str, digest: str) -> dict[str, str]:
    """What the image says of itself; labels of the bill of materials come on top. `base` is what FROM got."""
    said = {
        f"{TITLE}.title": spec.title,
        f"{TITLE}.version": __version__,
        f"{TITLE}.licenses": LICENCES,
        f"{TITLE}.source": source.url,
        f"{TITLE}.revision": source.revision,
        f"{TITLE}.created": source.created,
        f"{TITLE}.base.name": base.partition("@")[0],
        f"{TITLE}.base.digest": digest,
        f"{OWN}.image": spec.name,
        f"{OWN}.sglang": spec.engine.sglang,
        f"{OWN}.torch": spec.engine.torch,
        f"{OWN}.flashinfer": spec.engine.flashinfer,
        f"{OWN}.cuda": spec.compiler.release,
        f"{OWN}.archs": " ".join(spec.kernels.archs),
        f"{OWN}.graphs": spec.graphs.wanted,
        f"{OWN}.minimum-driver": spec.minimum_driver or "",
        **spec.labels,
    }
    return {key: value for key, value in said.items() if value}


def connect() -> Any:
    """A client of the Docker Engine that the environment names. Raises MissingError or Unreachable."""
    try:
        from docker.client import from_env
        from docker.errors import DockerException
    except ImportError as error:
        raise MissingError("the docker package isn't installed", "make setup") from error
    try:
        client = from_env(timeout=3600)
        client.ping()
    except (DockerException, OSError) as error:
        why = str(error)[:200]
        raise Unreachable(f"no Docker Engine answers: {why}", "start it, or set DOCKER_HOST") from error
    return client


def build(client: Any, request: Request, report: Report) -> Built:
    """Build, reporting each step as it begins and ends.

    Raises ConfigError (bill of materials, locks), MissingError (base image), BuildFailed, Unreachable.
    """
    spec, _ = load_whole(request.spec)
    arguments = build_args(spec, request.spec.parent, request)
    digest = base_digest(client, arguments["BASE_IMAGE"])
    if arguments["BUILD_BASE"] != arguments["BASE_IMAGE"]:
        base_digest(client, arguments["BUILD_BASE"])
    marks = labels(spec, source_of(request.root), arguments["BASE_IMAGE"], digest)
    started = time.monotonic()
    request.logs.mkdir(parents=True, exist_ok=True)
    log = request.logs / f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}.log"
    run = _classic if request.builder == "classic" else _buildkit
    steps = run(client, request, arguments, marks, log, report)
    image = client.images.get(request.tag)
    cached = sum(step.cached for step in steps)
    took = time.monotonic() - started
    return Built(image.id, request.tag, layers_of(image), len(steps), cached, took, log)


def seal(client: Any, tag: str, marks: Mapping[str, str]) -> str:
    """Add labels to an image that is there, in no layer of their own. Its new id."""
    text = f"FROM {tag}\n".encode()
    image, _ = client.images.build(fileobj=io.BytesIO(text), labels=dict(marks), tag=tag, rm=True)
    return str(image.id)


def unchecked(tag: str) -> str:
    """The name that an image has until it passed its checks."""
    return f"{tag}-unchecked"


def accept(client: Any, tag: str) -> None:
    """Name an image that was built as `unchecked(tag)` by `tag`: from now on it may be deployed."""
    from docker.utils import parse_repository_tag

    client.images.get(unchecked(tag)).tag(*parse_repository_tag(tag))
    client.images.remove(unchecked(tag))


def layers_of(image: Any) -> tuple[Layer, ...]:
    """The layers that hold anything, topmost first."""
    steps = image.history()
    return tuple(Layer(step["Size"], step["CreatedBy"]) for step in steps if step["Size"])


def base_digest(client: Any, reference: str) -> str:
    """The digest of a base image: the registry's where it has one, else the id of the local image.

    Fetches the image where it isn't there. Raises MissingError.
    """
    from docker.errors import APIError, ImageNotFound

    try:
        try:
            image = client.images.get(reference)
        except ImageNotFound:
            image = client.images.pull(reference)
    except APIError as error:
        raise MissingError(
            f"base image {reference}: can't be had: {str(error.explanation or error)[:160]}",
            "log in to a registry that has it, or say --base with an image that is here",
        ) from error
    digests = image.attrs.get("RepoDigests") or []
    return str(digests[0]).rpartition("@")[2] if digests else str(image.id)


def registry_digest(client: Any, reference: str) -> str:
    """The digest that a registry gives for NAME:TAG now. Raises Unreachable."""
    from docker.errors import APIError

    try:
        return str(client.images.get_registry_data(reference).id)
    except APIError as error:
        raise Unreachable(f"{reference}: no registry tells its digest: {str(error)[:160]}") from error


def source_of(root: Path) -> Source:
    """What git says of the project's folder; empty where it isn't a checkout."""
    revision = _git(root, "rev-parse", "HEAD")
    if not revision:
        return Source()
    dirty = "-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
    url = _git(root, "remote", "get-url", "origin")
    shown = url if url.startswith("https://") and "@" not in url else ""
    return Source(revision + dirty, _git(root, "log", "-1", "--format=%cI"), shown)


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _classic(
    client: Any,
    request: Request,
    arguments: Mapping[str, str],
    marks: Mapping[str, str],
    log: Path,
    report: Report,
) -> list[Step]:
    """Build over the SDK."""
    events = client.api.build(
        path=str(request.root),
        dockerfile=_DOCKERFILE,
        tag=request.tag,
        buildargs=dict(arguments),
        labels=dict(marks),
        rm=True,
        forcerm=True,
        decode=True,
    )
    parser = Classic()
    with closing(events), log.open("w", encoding="utf-8", buffering=1) as file:
        for event in events:
            file.write(event.get("stream") or event.get("error") or "")
            _tell(parser.take(event), report)
    return _finish(parser, log)


def _buildkit(
    client: Any,
    request: Request,
    arguments: Mapping[str, str],
    marks: Mapping[str, str],
    log: Path,
    report: Report,
) -> list[Step]:
    """Build with the `docker` client, which has BuildKit."""
    command = ["docker", "build", "--progress=plain", "--file", _DOCKERFILE, "--tag", request.tag]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    for name, value in marks.items():
        command += ["--label", f"{name}={value}"]
    parser = BuildKit()
    with log.open("w", encoding="utf-8", buffering=1) as file:
        for line in _lines([*command, "."], request.root):
            file.write(line)
            _tell(parser.take(line), report)
    return _finish(parser, log)


def _lines(command: list[str], folder: Path) -> Iterator[str]:
    """What a command says, line by line. A last line tells of an exit code that isn't 0."""
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    try:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError as error:
        raise MissingError("the docker client isn't installed", "apt-get install docker-cli") from error
    assert process.stdout is not None
    try:
        yield from process.stdout
    finally:
        process.stdout.close()
        code = process.wait()
    if code != 0:
        yield f"ERROR: docker build ended with {code}\n"


def _tell(steps: list[Step], report: Report) -> None:
    for step in steps:
        report(step)


def _finish(parser: Classic | BuildKit, log: Path) -> list[Step]:
    """The steps of a build that went through. Raises BuildFailed."""
    if parser.error:
        last = "\n".join(f"  {line}" for line in parser.tail)
        raise BuildFailed(f"{parser.where}: {parser.error}\n{last}\n  whole log: {log}")
    return parser.finished()
