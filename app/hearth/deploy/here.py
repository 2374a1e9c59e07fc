"""What is deployed on this host, for the verbs that run beside the service.

The paths and ports in a release's config hold in its container; the release says where the host has them.
A config on its own is taken as it stands: so it is in the container, and where `hearth serve` runs by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hearth.config import Config, load
from hearth.deploy import releases
from hearth.deploy.release import RELEASE_FILE
from hearth.errors import ConfigError
from hearth.host.spec import CONFIG_TARGET, ContainerSpec

CONFIG = Path(CONFIG_TARGET)
CURRENT = releases.ROOT / releases.CURRENT


@dataclass(frozen=True)
class Here:
    """A config, its file, and the container that it is for, where there is one."""

    config: Config
    file: Path
    container: ContainerSpec | None = None

    def on_host(self, inside: Path) -> Path | None:
        """Where a path of the config lies on this host; None for one that only the container has."""
        return inside if self.container is None else self.container.on_host(inside)

    def path(self, inside: Path) -> Path:
        """As `on_host`. Raises ConfigError in place of None."""
        found = self.on_host(inside)
        if found is None:
            raise ConfigError(f"{self.file}: {inside} is in no folder of this host", "ask in the container")
        return found

    @property
    def supervisor(self) -> str:
        """The supervisor's address on this host. Raises ConfigError for a port that isn't published."""
        ports = self.config.ports
        if self.container is None:
            host = "127.0.0.1" if ports.supervisor_host == "0.0.0.0" else ports.supervisor_host
            return f"http://{host}:{ports.supervisor}"
        published = self.container.published(ports.supervisor)
        if published is None:
            raise ConfigError(f"{self.file}: ports.supervisor: {ports.supervisor} isn't published")
        return f"http://{published.reach}"

    @property
    def outside(self) -> Config:
        """The config with the weights and the cache where this host has them."""
        model, paths = self.config.model, self.config.paths
        weights, cache = self.on_host(model.path) or model.path, self.on_host(paths.cache) or paths.cache
        own = {
            "model": model.model_copy(update={"path": weights}),
            "paths": paths.model_copy(update={"cache": cache}),
        }
        return self.config.model_copy(update=own)


def find(config: Path | None = None, release: Path | None = None) -> Here | None:
    """The release or config that is named; else the config at its usual place; else the current release.

    None where this host has neither. A config that lies beside its `release.json` stands for that release.
    Raises ConfigError or MissingError.
    """
    if config is None and release is None and CONFIG.exists():
        config = CONFIG
    if config is not None and release is None:
        if not (config.parent / RELEASE_FILE).is_file():
            return Here(load(config), config)
        release = config.parent
    if release is None and not CURRENT.exists():
        return None
    return _release(release or CURRENT)


def _release(folder: Path) -> Here:
    release = releases.load(folder)
    file = folder / release.config.file
    return Here(load(file), file, release.container)
