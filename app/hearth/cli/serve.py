"""`hearth serve`: run and supervise the engine."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from hearth.config import Config, load
from hearth.errors import ConfigError, MissingError
from hearth.supervisor import Supervisor


def serve(
    config: Annotated[
        Path, typer.Option("--config", "-c", help="Deployment config.", envvar="HEARTH_CONFIG")
    ] = Path("/etc/hearth/hearth.yaml"),
) -> None:
    """Run the engine and keep it serving.

    Starts SGLang with the wanted graph plan (or the remembered one), names what goes wrong, steps down where
    that helps, and answers operators on the supervisor port: /livez /readyz /metrics /status and a page at /.
    SIGTERM or Ctrl-C drains and stops; a second one kills.
    """
    settings = load(config)
    _log_to_stderr()
    supervisor = Supervisor(settings, _architecture(settings), _secrets(settings))
    raise typer.Exit(int(asyncio.run(supervisor.run())))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(asctime)s hearth] %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.getLogger("hearth").addHandler(handler)
    logging.getLogger("hearth").setLevel(logging.INFO)


def _architecture(config: Config) -> str | None:
    """The model's architecture, from the config or from the model's own config.json."""
    model = config.model
    if not model.path.is_dir():
        raise MissingError(
            f"model.path: {model.path}: no such directory", "fetch the weights there (hearth fetch)"
        )
    if model.architecture is not None:
        return model.architecture
    described = model.path / "config.json"
    try:
        names = json.loads(described.read_text(encoding="utf-8")).get("architectures") or [None]
    except FileNotFoundError:
        raise MissingError(
            f"{described}: no such file", "model.path must hold a Hugging Face model"
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise MissingError(f"{described}: can't be read: {error}", "fetch the model again") from error
    return str(names[0]) if names[0] else None


def _secrets(config: Config) -> dict[str, str]:
    """Secret values by name; files that are only to be redacted come under their path."""
    named = {"api_key": config.secrets.api_key_file, "admin_api_key": config.secrets.admin_api_key_file}
    files = {name: path for name, path in named.items() if path is not None}
    files |= {str(path): path for path in config.secrets.redact_files}
    return {name: _read_secret(name, path) for name, path in files.items()}


def _read_secret(name: str, path: Path) -> str:
    try:
        value = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise MissingError(f"secrets.{name}: {path}: no such file", "put the secret there") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"secrets.{name}: {path}: can't be read: {error}") from error
    if not value:
        raise ConfigError(f"secrets.{name}: {path}: is empty", "put the secret there, or remove the key")
    return value
