"""The real parts around a release on its host: Docker's images, the supervisor's port, the engine's port."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from docker.errors import ImageNotFound

from hearth.config import Config
from hearth.config import parse as parse_config
from hearth.deploy.activate import Say, Tools
from hearth.deploy.downtime import Ask
from hearth.deploy.release import Asked, Draft, Release, problems, secret_names
from hearth.deploy.releases import Store
from hearth.deploy.smoke import Check, Target, smoke
from hearth.deploy.systemctl import Unit, UnitState
from hearth.engine.probe import Probe
from hearth.errors import ConfigError, HearthError, MissingError
from hearth.host import dockerd
from hearth.host.spec import OWN, ContainerSpec
from hearth.yamltext import read

SECRETS = Path("/etc/hearth/secrets")
KEPT_TAG = "hearth-release"
"""Each release's image is tagged hearth-release:ID, so that no `docker image prune` takes it."""
_ASK_TIMEOUT = 10.0
_READY_TIMEOUT = 5.0


class Host:
    """One host's Docker Engine, releases and secrets."""

    def __init__(self, store: Store, secrets: Path = SECRETS) -> None:
        self._store, self._secrets = store, secrets

    def tools(self, unit: Unit, say: Say) -> Tools:
        """How an activation reaches this host."""
        return Tools(unit, self.ready, self.smoke, self.ask, self.preflight, self.stale, say)

    def digest(self, draft: Draft) -> str:
        """The id of the draft's image in this Engine. Raises MissingError, ConfigError or EngineError."""
        wanted = draft.image.digest or draft.image.ref
        with dockerd.engine() as client:
            found = str(_image(client, wanted).id)
        if draft.image.digest and found != draft.image.digest:
            raise ConfigError(f"image.digest: {wanted} is {found} here", "leave digest out")
        return found

    def keep_image(self, release: Release) -> None:
        """Tag the release's image as its own. Raises MissingError or EngineError."""
        with dockerd.engine() as client:
            _image(client, release.image.digest).tag(KEPT_TAG, release.id)

    def drop_images(self) -> list[str]:
        """Remove the images whose release is gone, and Hearth's untagged ones; their ids."""
        wanted = set(self._store.ids())
        with dockerd.engine() as client:
            removed = [
                tag
                for image in client.images.list(name=KEPT_TAG)
                for tag in image.tags
                if tag.startswith(f"{KEPT_TAG}:") and tag.partition(":")[2] not in wanted
            ]
            for tag in removed:
                client.images.remove(tag)
            done = client.images.prune(filters={"dangling": True, "label": f"{OWN}.sbom"})
        gone = [each.get("Deleted") for each in done.get("ImagesDeleted") or [] if each.get("Deleted")]
        return [*removed, *gone]

    def preflight(self, release: Release) -> None:
        """What is sure to fail, before anything is touched. Raises HearthError."""
        for key, path in self._files(release).items():
            if not path.is_file():
                raise MissingError(f"{key}: {path}: no such file", f"deploy with --secret {path.name}=FILE")
        with dockerd.engine() as client:
            _image(client, release.image.digest)
        for bind in release.container.binds:
            if not bind.source.exists():
                raise MissingError(
                    f"container.binds: {bind.source}: no such file or folder", "create it, or deploy again"
                )

    def stale(self, release: Release, state: UnitState) -> bool:
        """Whether the unit or a secret of the release was changed after the running process started."""
        began = time.time() - (time.monotonic() - state.started)
        files = [*self._files(release).values(), *([Path(state.path)] if state.path else [])]
        return any(file.exists() and file.stat().st_ctime > began for file in files)

    def secrets(self) -> list[str]:
        """Names of the secrets that kept releases read; of a damaged one nothing is known."""
        found: set[str] = set()
        for each in self._store.ids():
            with suppress(HearthError):
                found |= {path.name for path in self._files(self._store.read(each)).values()}
        return sorted(found)

    def _files(self, release: Release) -> dict[str, Path]:
        """The release's secrets on this host, by config key. Raises ConfigError or MissingError."""
        names = secret_names(self.config(release))
        return {key: self._secrets / name for key, name in names.items()}

    def config(self, release: Release) -> Config:
        """The release's config, which its container can serve. Raises ConfigError or MissingError."""
        path = self._store.folder(release.id) / release.config.file
        return usable(release.container, read(path), str(path))

    async def ready(self, release: Release) -> bool:
        """Whether the release's supervisor says ready."""
        port = self.config(release).ports.supervisor
        url = f"http://{_reach(release, port)}/readyz"
        timeout = aiohttp.ClientTimeout(total=_READY_TIMEOUT)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
                session.get(url) as answer,
            ):
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def smoke(self, release: Release) -> list[Check]:
        """Ask the release's smoke test. Raises ConfigError or MissingError."""
        config = self.config(release)
        canary = Asked(
            prompt=config.canary.prompt, expect=config.canary.expect, max_tokens=config.canary.max_tokens
        )
        return await smoke(self._target(release, config), release.smoke, canary)

    def ask(self, release: Release) -> Ask:
        """Asks the canary of the release's config and says whether the answer was right."""
        config = self.config(release)
        target, canary = self._target(release, config), config.canary

        async def once() -> bool:
            async with Probe(target.url, target.api_key) as probe:
                result = await probe.canary(
                    target.model, canary.prompt, canary.expect, canary.max_tokens, _ASK_TIMEOUT
                )
            return result.ok

        return once

    def _target(self, release: Release, config: Config) -> Target:
        url = f"http://{_reach(release, config.ports.engine)}"
        return Target(url, config.model.served_name, self._api_key(config))

    def _api_key(self, config: Config) -> str:
        """The clients' key, from the file that the unit hands to the container under the same name."""
        inside = config.secrets.api_key_file
        if inside is None:
            return ""
        path = self._secrets / inside.name
        try:
            return path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            raise MissingError(f"{path}: no such file", "put the API key there") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: can't be read: {error}", "run it as root (sudo)") from error


def usable(container: ContainerSpec, text: str, name: str) -> Config:
    """The config that this container can serve. Raises ConfigError, one line for each problem."""
    config = parse_config(text, name)
    wrong = problems(container, config)
    if wrong:
        raise ConfigError("\n".join(f"{name}: {line}" for line in wrong))
    return config


def _reach(release: Release, port: int) -> str:
    published = release.container.published(port)
    if published is None:
        raise ConfigError(f"port {port} isn't published", "add it to the release's container.ports")
    return published.reach


def _image(client: Any, name: str) -> Any:
    try:
        return client.images.get(name)
    except ImageNotFound:
        raise MissingError(f"{name}: no such image in this host's Docker Engine", "deploy again") from None
