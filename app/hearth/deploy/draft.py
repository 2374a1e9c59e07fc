"""What a release is besides image and config: its container and its smoke test, from config and inventory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hearth.config import Config
from hearth.deploy.release import problems
from hearth.errors import ConfigError
from hearth.host.spec import ContainerSpec

STATE, CACHE, FAILURES = "/var/lib/hearth/state", "/var/cache/hearth", "/var/lib/hearth/failures"


def draft(config: Config, variables: Mapping[str, Any], made_by: str) -> dict[str, Any]:
    """The release's draft without its image. `variables` are the host's, from the inventory.

    hearth_container overrides single keys of the container, hearth_smoke is the smoke test,
    hearth_ready_within the seconds to READY. Raises ConfigError for a container that can't serve this config.
    """
    said = container(config, variables) | dict(variables.get("hearth_container") or {})
    try:
        checked = ContainerSpec.model_validate(said)
    except ValueError as error:
        raise ConfigError(
            f"hearth_container: {str(error).splitlines()[-2].strip()}", "fix the inventory"
        ) from error
    found = problems(checked, config)
    if found:
        raise ConfigError("\n".join(found))
    whole: dict[str, Any] = {"container": checked.model_dump(mode="json"), "made_by": made_by}
    if variables.get("hearth_smoke") is not None:
        whole["smoke"] = variables["hearth_smoke"]
    if variables.get("hearth_ready_within") is not None:
        whole["ready_within"] = variables["hearth_ready_within"]
    return whole


def container(config: Config, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The container as the config needs it: model, state, cache, ports."""
    gpus = str(variables.get("gpu", "nvidia")) != "none"
    return {
        "gpus": "all" if gpus else "none",
        "shm": "32g" if gpus else "1g",
        "binds": binds(config, model_folder(config, variables)),
        "ports": ports(config, variables),
    }


def model_folder(config: Config, variables: Mapping[str, Any]) -> str:
    """Where the weights are on the host: model_path of the inventory, else where the config has them."""
    return str(variables.get("model_path") or config.model.path)


def binds(config: Config, model: str) -> list[dict[str, Any]]:
    """Folders of the host, and where the config expects them."""
    paths = config.paths
    return [
        {"source": model, "target": str(config.model.path), "read_only": True},
        {"source": STATE, "target": str(paths.state), "read_only": False},
        {"source": FAILURES, "target": str(paths.state / "failures"), "read_only": False},
        {"source": CACHE, "target": str(paths.cache), "read_only": False},
    ]


def ports(config: Config, variables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The engine for clients; the supervisor, which has no password, for the host alone."""
    return [
        {
            "container": config.ports.engine,
            "host": int(variables.get("hearth_engine_port") or config.ports.engine),
            "address": str(variables.get("hearth_engine_address") or "0.0.0.0"),
        },
        {
            "container": config.ports.supervisor,
            "host": int(variables.get("hearth_supervisor_port") or config.ports.supervisor),
            "address": str(variables.get("hearth_supervisor_address") or "127.0.0.1"),
        },
    ]
