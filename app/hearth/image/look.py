"""Look into an image: its configuration and layers, and what a sealed container of it says.

Sealed: no network, read-only root, the image's own user, no capabilities, no new privileges, memory-backed
folders where it may write.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hearth.errors import MissingError, StateError
from hearth.image import leaks as leaking
from hearth.image.build import layers_of
from hearth.image.check import USER_ID, Answer, Seen
from hearth.image.leaks import Leak, Needle
from hearth.image.sbom import digest, sbom
from hearth.image.spec import Spec

_PROBE = Path(__file__).with_name("probe.py")
_OWNED = f"mode=0750,uid={USER_ID},gid={USER_ID}"
SEAL: dict[str, Any] = {
    "network_mode": "none",
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "tmpfs": {"/tmp": "mode=1777", "/run/hearth": _OWNED, "/var/cache/hearth": _OWNED},
}
"""How every container of a check runs, as the SDK's arguments."""
_SAVED = "/var/tmp"
_MARK = "\nhearth-probe "
Say = Callable[[str], None]


def look(client: Any, tag: str, spec: Spec, needles: list[Needle], say: Say) -> tuple[Seen, str]:
    """Everything that `check.lines` judges, and the SBOM's text. Raises MissingError without the image."""
    image = get(client, tag)
    modules = ["torch", "sglang", "flashinfer", "hearth.supervisor", "tvm_ffi"]
    modules += [] if spec.cpu else ["sgl_kernel"]
    archs = ",".join(spec.kernels.archs)
    aimed = {"FLASHINFER_CUDA_ARCH_LIST": " ".join(spec.kernels.archs)}
    say("packages")
    packages = probe(client, tag, ["packages"])
    listing = sbom_of(spec, packages)
    say("files")
    files = probe(client, tag, ["files"], user="0:0", cap_add=["DAC_READ_SEARCH"])
    say("imports")
    imported = probe(client, tag, ["imports", *modules], environment=aimed)
    say("kernels, trace, plan")
    graphs = ["-v", spec.engine.sglang, "-g", spec.graphs.wanted, "--json"]
    graphs += ["-a", spec.engine.architecture] if spec.engine.architecture else []
    seen = Seen(
        config=image.attrs["Config"],
        layers=layers_of(image),
        who=probe(client, tag, ["self"]),
        files=files,
        packages=packages,
        imports=imported,
        kernels=ask(client, tag, ["hearth", "kernels", "verify", "--device", device(archs), "--json"]),
        trace=ask(client, tag, ["hearth", "trace", "--json"], environment=aimed),
        plan=ask(client, tag, ["hearth", "plan", *graphs]),
        pip=ask(client, tag, ["python3", "-m", "pip", "check"]) if spec.whole else Answer(0),
        leaks=_leaks(client, image, needles, say),
        leaks_sought=len(needles),
        sbom_digest=digest(listing) if listing else "",
    )
    return seen, listing


def get(client: Any, tag: str) -> Any:
    """The image. Raises MissingError."""
    from docker.errors import ImageNotFound

    try:
        return client.images.get(tag)
    except ImageNotFound:
        raise MissingError(f"{tag}: no such image in this Docker Engine", "hearth image build") from None


def sbom_of(spec: Spec, packages: Answer) -> str:
    """The SBOM's text; empty where the packages couldn't be listed."""
    if not isinstance(packages.body, dict):
        return ""
    return sbom(spec.name, spec.engine.sglang, packages.body["python"], packages.body["debian"])


def device(archs: str) -> str:
    """The compute capability that the first of these architectures is for: `12.0f` -> `12.0`."""
    return archs.split(",")[0].rstrip("abcdefghijklmnopqrstuvwxyz")


def probe(client: Any, tag: str, action: list[str], **options: Any) -> Answer:
    """Run `probe.py` in a sealed container. Its JSON, or its last words."""
    answer = ask(client, tag, ["python3", "-c", _PROBE.read_text(encoding="utf-8"), *action], **options)
    mark = answer.words.rfind(_MARK)
    if mark < 0:
        return answer
    return Answer(answer.code, json.loads(answer.words[mark + len(_MARK) :].splitlines()[0]), answer.words)


def ask(client: Any, tag: str, command: list[str], **options: Any) -> Answer:
    """Run a command in a sealed container. Exit code, its JSON if it printed one, and what it said."""
    settings = {**SEAL, "entrypoint": command[:1], "command": command[1:], **options}
    container = client.containers.create(tag, **settings)
    try:
        container.start()
        code = int(container.wait()["StatusCode"])
        said = container.logs(stdout=True, stderr=False).decode("utf-8", "replace")
        complaint = container.logs(stdout=False, stderr=True).decode("utf-8", "replace")
    finally:
        container.remove(force=True, v=True)
    return Answer(code, _json(said), f"{complaint}\n{said}")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _leaks(client: Any, image: Any, needles: list[Needle], say: Say) -> tuple[Leak, ...]:
    """Search config, history and every layer above the base's."""
    if not needles:
        return ()
    say("layers")
    found = leaking.in_config(image.attrs, image.history(), needles)
    try:
        with tempfile.TemporaryFile(dir=_SAVED) as saved:
            for chunk in image.save():
                saved.write(chunk)
            saved.seek(0)
            found += leaking.in_layers(saved, needles, base_layers(client, image))
    except OSError as error:
        if error.errno is None:  # the Engine's, not the disk's
            raise
        size = image.attrs["Size"] / 1e9
        raise StateError(
            f"{_SAVED}: the image can't be saved there to look through its layers: {error.strerror or error}",
            f"it takes {size:.1f} GB: free as much, and run it again",
        ) from error
    return tuple(dict.fromkeys(found))


def base_layers(client: Any, image: Any) -> int:
    """How many of the image's lowest layers are the base's, which the build didn't make; 0 if unknown."""
    from docker.errors import DockerException

    said = image.attrs["Config"].get("Labels") or {}
    digest_, name = (said.get(f"org.opencontainers.image.base.{key}", "") for key in ("digest", "name"))
    base = None
    for reference in (digest_, f"{name}@{digest_}") if digest_ else ():
        with contextlib.suppress(DockerException):
            base = base or client.images.get(reference)
    return len(base.attrs["RootFS"]["Layers"]) if base is not None else 0
