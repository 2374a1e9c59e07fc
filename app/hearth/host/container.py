"""The container of a release, through the Docker SDK: made, watched and removed. Blocking.

`arguments` says how it runs, as a value; nothing of it depends on the machine apart from the GPU wiring.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from docker.errors import APIError, ImageNotFound, NotFound
from docker.types import DeviceRequest, LogConfig, Mount, Ulimit

from hearth.errors import ConfigError, MissingError
from hearth.host import dockerd
from hearth.host.launch_plan import Gone
from hearth.host.spec import CONFIG_TARGET, OWN, SECRETS_TARGET, USER_ID, ContainerSpec

LABEL = f"{OWN}.unit"
"""Label that marks a container as the launcher's; its value is the container's name."""
CDI_ALL = "nvidia.com/gpu=all"
_FILE_LIMIT = 4 << 20
_REMOVAL = 20.0
"""Seconds that a removal begun by somebody else may take."""


@dataclass(frozen=True)
class Wanted:
    """Everything that a container is made from. Paths are the host's."""

    name: str
    release_id: str
    image: str
    spec: ContainerSpec
    config: Path
    secrets: Path | None = None
    host: str = ""
    """The host's own name, which a webhook is told; the container's name where it isn't known."""


@dataclass(frozen=True)
class Wiring:
    """What only the machine knows: whether GPUs come by CDI, and whether the image brings its own init."""

    cdi: bool
    own_init: bool


@dataclass(frozen=True)
class Running:
    """A container that runs, and its address in Docker's network ("" where it has none)."""

    address: str = ""


def arguments(wanted: Wanted, wiring: Wiring) -> dict[str, Any]:
    """The SDK's arguments: read-only, no capabilities, no new privileges, the image's own user (pure)."""
    spec = wanted.spec
    return {
        "image": wanted.image,
        "name": wanted.name,
        "hostname": wanted.host or wanted.name,
        "labels": {LABEL: wanted.name, f"{OWN}.release": wanted.release_id},
        "user": f"{USER_ID}:{USER_ID}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": not wiring.own_init,
        "restart_policy": {"Name": "no"},  # systemd restarts, nobody else
        "shm_size": spec.shm,
        "mem_limit": spec.memory,
        "ulimits": [Ulimit(name=name, soft=size, hard=size) for name, size in sorted(spec.ulimits.items())],
        "tmpfs": dict(spec.tmpfs),
        "mounts": _mounts(wanted),
        "ports": _ports(spec),
        "environment": dict(spec.env),
        "device_requests": gpu_requests(spec.gpus, wiring.cdi),
        # The journal keeps the log; Docker's copy only bridges a moment in which nobody reads.
        "log_config": LogConfig(type=LogConfig.types.JSON, config={"max-size": "10m", "max-file": "2"}),
    }


def gpu_requests(gpus: str, cdi: bool) -> list[DeviceRequest]:
    """All GPUs, by CDI where the Engine knows such devices: these survive a `systemctl daemon-reload`."""
    if gpus == "none":
        return []
    if cdi:
        return [DeviceRequest(driver="cdi", device_ids=[CDI_ALL])]
    return [DeviceRequest(count=-1, capabilities=[["gpu"]])]


def has_cdi(info: dict[str, Any]) -> bool:
    """Whether the Engine has a CDI description of NVIDIA GPUs: what it lists, or files where it looks."""
    listed = [str(each.get("ID", "")) for each in info.get("DiscoveredDevices") or []]
    folders = [Path(each) for each in info.get("CDISpecDirs") or []]
    return CDI_ALL in listed or any(_describes_gpus(folder) for folder in folders)


def own_init(image_config: dict[str, Any]) -> bool:
    """Whether the image's PID 1 is an init already."""
    first = (image_config.get("Entrypoint") or [""])[0]
    return Path(str(first)).name in ("tini", "docker-init", "dumb-init")


class Containers:
    """Containers of one name in one Engine. Every method raises EngineError or EngineAway."""

    def __init__(self, client: Any, name: str) -> None:
        self._client, self.name = client, name

    def remove_leftover(self) -> bool:
        """Remove what an earlier launcher left. Raises ConfigError for a stranger of the same name."""
        with dockerd.asking():
            try:
                found = self._client.containers.get(self.name)
            except NotFound:
                return False
            if found.labels.get(LABEL) != self.name:
                raise ConfigError(
                    f"container {self.name!r}: exists and isn't Hearth's",
                    "rename it (docker rename), or remove it (docker rm -f)",
                )
            _remove(found)
            return True

    def start(self, wanted: Wanted) -> str:
        """Make and start a container; its id. Raises MissingError for an image that isn't here."""
        with self._or_remove():
            image = self._client.images.get(wanted.image)
            cdi = wanted.spec.gpus != "none" and has_cdi(self._client.info())
            wiring = Wiring(cdi=cdi, own_init=own_init(image.attrs["Config"] or {}))
            made = self._client.containers.create(**arguments(wanted, wiring))
            made.start()
            return str(made.id)

    def state(self, container_id: str) -> Running | Gone:
        """How it is now."""
        with dockerd.asking():
            try:
                found = self._client.api.inspect_container(container_id)
            except NotFound:
                return Gone(None)
        return state_of(found)

    def signal(self, container_id: str, name: str) -> None:
        """Send a signal to its main process; nothing happens when it is gone."""
        with dockerd.asking(), contextlib.suppress(NotFound):
            try:
                self._client.api.kill(container_id, name)
            except APIError as error:
                if error.status_code != HTTPStatus.CONFLICT:  # that is: it doesn't run
                    raise

    def read(self, container_id: str, path: Path) -> tuple[bytes, float] | None:
        """A small file in it, also in a folder of the host that it sees, and its age as Unix seconds.

        None where there is none. Asking Docker needs no right to look into the container user's folders.
        """
        with dockerd.asking(), contextlib.suppress(NotFound):
            chunks, about = self._client.api.get_archive(container_id, str(path))
            if about["size"] > _FILE_LIMIT:
                return None
            return _only_file(b"".join(chunks))
        return None

    def remove(self, container_id: str) -> None:
        """Remove it, running or not."""
        with dockerd.asking(), contextlib.suppress(NotFound):
            _remove(self._client.containers.get(container_id))

    def log(self, container_id: str, since: float | None) -> Iterator[bytes]:
        """Its output from `since` (Unix seconds; None: from the start) on, until it ends."""
        with dockerd.asking(), contextlib.suppress(NotFound):
            yield from self._client.api.logs(
                container_id, stdout=True, stderr=True, stream=True, follow=True, since=since
            )

    @contextlib.contextmanager
    def _or_remove(self) -> Iterator[None]:
        """What can't be started is not left behind."""
        try:
            with dockerd.asking():
                yield
        except ImageNotFound as error:
            raise MissingError(
                f"the release's image isn't in this host's Docker Engine ({error.explanation})",
                "deploy again",
            ) from error
        except BaseException:
            with contextlib.suppress(Exception):
                self.remove_leftover()
            raise


def state_of(inspected: dict[str, Any]) -> Running | Gone:
    """Running or ended, from what `docker inspect` says (pure)."""
    state = inspected.get("State") or {}
    if state.get("Status") == "removing":
        return Gone(None)
    if state.get("Status") in ("exited", "dead"):
        return Gone(int(state.get("ExitCode") or 0), bool(state.get("OOMKilled")))
    networks = (inspected.get("NetworkSettings") or {}).get("Networks") or {}
    return Running(next((str(each["IPAddress"]) for each in networks.values() if each.get("IPAddress")), ""))


def _only_file(archive: bytes) -> tuple[bytes, float] | None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        member = found.next()
        file = found.extractfile(member) if member is not None else None
        return None if member is None or file is None else (file.read(), float(member.mtime))


def _mounts(wanted: Wanted) -> list[Mount]:
    """Mounts of what must exist: `-v` would make an empty folder in place of a missing one."""
    own = [(wanted.config, CONFIG_TARGET, True)]
    own += [(wanted.secrets, SECRETS_TARGET, True)] if wanted.secrets else []
    more = [(bind.source, str(bind.target), bind.read_only) for bind in wanted.spec.binds]
    return [Mount(target, str(source), type="bind", read_only=ro) for source, target, ro in own + more]


def _ports(spec: ContainerSpec) -> dict[str, list[tuple[str, int]]]:
    found: dict[str, list[tuple[str, int]]] = {}
    for port in spec.ports:
        found.setdefault(f"{port.container}/tcp", []).append((port.address, port.host))
    return found


def _describes_gpus(folder: Path) -> bool:
    try:
        files = [path for path in folder.iterdir() if path.suffix in (".yaml", ".yml", ".json")]
        return any("nvidia.com/gpu" in path.read_text("utf-8", "replace") for path in files)
    except OSError:
        return False


def _remove(container: Any) -> None:
    """Remove it; where somebody else is at it already, wait until they are done."""
    ends = time.monotonic() + _REMOVAL
    with contextlib.suppress(NotFound):
        while True:
            try:
                container.remove(force=True, v=True)
            except APIError as error:
                if error.status_code != HTTPStatus.CONFLICT or time.monotonic() > ends:
                    raise
                time.sleep(0.5)
            else:
                return
