"""A release: one image with one config on one host, as it stands in `release.json`.

A draft is what `hearth release add` takes: the same without what only the host can know (id, time, checksum,
the release before). Pure: text in, values out.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError, field_validator

from hearth import __version__
from hearth.config import Config
from hearth.config import parse as parse_config
from hearth.config_explain import Says, explain
from hearth.config_types import Count, FilePath, Seconds, Text
from hearth.errors import ConfigError
from hearth.host.spec import SECRETS_TARGET, ContainerSpec, Part

RELEASE_FILE, CONFIG_FILE = "release.json", "hearth.yaml"
ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
Model = TypeVar("Model", bound=Part)


class Image(Part):
    """The image: a name for people, and the digest that is run."""

    ref: Text
    """Name in the host's Docker Engine."""
    digest: Annotated[str, Says("sha256:... (the image's id in this host's Docker Engine)")] = ""
    """The image's id in this host's Docker Engine; `hearth release add` looks it up where it is empty."""

    @field_validator("digest")
    @classmethod
    def _is_digest(cls, value: str) -> str:
        if value and not _DIGEST.fullmatch(value):
            raise ValueError(f"not a digest: {value[:80]!r}: write sha256:..., or leave it out")
        return value


class ConfigRef(Part):
    """The deployment config that lies beside `release.json`."""

    file: Text = CONFIG_FILE
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$"), Says("a SHA-256 in hex")]


class Asked(Part):
    """One question with a known answer, asked at temperature 0."""

    prompt: Text
    expect: str | None = None
    """Regular expression that must be found in the answer; null asks only for some text."""
    max_tokens: Count = 32
    chat: bool = False
    """Whether to ask as a chat (with the model's template) or to have the text completed."""

    @field_validator("expect")
    @classmethod
    def _is_regex(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"not a regular expression ({error}): write one as in Python's re") from error
        return value


class Streamed(Part):
    """A streamed answer: that it comes in pieces, without a long gap, and ends cleanly."""

    prompt: Text = "Count from one to ten."
    chat: bool = True
    max_tokens: Count = 48
    min_chunks: Count = 3
    max_gap: Seconds = 30.0
    """Seconds between two chunks (and before the first) at most."""


class ToolCall(Part):
    """A question that the model must answer with a call of one tool."""

    prompt: Text = "What is the weather in Paris? Use the tool."
    name: Text = "get_weather"
    argument: Text = "city"
    """Name of the tool's one argument, text."""
    expect: str = "Paris"
    """Regular expression for the argument's value."""
    max_tokens: Count = 256


class LongPrompt(Part):
    """A prompt of many words with a number hidden in it that has to be found."""

    chat: bool = True
    words: Annotated[int, Field(ge=10, le=1_000_000), Says("a whole number, 10 or more")] = 6000
    expect: str | None = r"7391"
    """Regular expression for the answer; the hidden number is 7391. null asks only for some text."""
    max_tokens: Count = 32


class SmokeSpec(Part):
    """What a release must answer before it counts as good. An absent part isn't asked."""

    prompts: list[Asked] = Field(default_factory=list)
    """Questions with known answers; where there is none, the canary of the config is asked."""
    stream: Streamed | None = Streamed()
    tool: ToolCall | None = None
    long_prompt: LongPrompt | None = LongPrompt()
    chat_body: dict[str, Any] = Field(default_factory=dict)
    """More keys for the body of chat requests, e.g. {"chat_template_kwargs": {"enable_thinking": false}}."""
    timeout: Seconds = 300.0
    """Seconds that one check may take."""


class Draft(Part):
    """What a deploy hands over."""

    image: Image
    container: ContainerSpec = ContainerSpec()
    smoke: SmokeSpec = SmokeSpec()
    ready_within: Seconds = 5400.0
    """Seconds from the restart to READY before the release counts as failed."""
    made_by: Text = "unknown"
    """Who deployed: user@machine."""
    hearth_version: Text = __version__


class Release(Draft):
    """A release as the host keeps it."""

    id: Text
    """UTC time and six random hex digits: sorts by age."""
    made_at: Text
    """When it was added, ISO 8601 in UTC."""
    config: ConfigRef
    previous: str | None = None
    """The release that was in use when this one was added."""

    @field_validator("id")
    @classmethod
    def _is_id(cls, value: str) -> str:
        if not ID.fullmatch(value):
            raise ValueError(f"not a release id: {value[:60]!r}: it looks like 20261129T215500Z-3fa91c")
        return value

    @property
    def content(self) -> str:
        """A short name for what would run: equal contents need no new release."""
        said = self.model_dump(mode="json", exclude={"id", "made_at", "made_by", "previous"})
        said["image"].pop("ref")
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The text of `release.json`."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"


def parse(text: str, name: str, kind: type[Model]) -> Model:
    """A draft or release from JSON; `name` stands for the file in errors. Raises ConfigError."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not JSON: {error}", "write the file again") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: must be a mapping of keys and values", "see docs/operations.md, Releases")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(name, each, kind) for each in error.errors())) from error


def sha256(text: str) -> str:
    """The checksum of a config's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def with_digest(text: str, digest: str, name: str) -> str:
    """The config with `image_digest` set, which a remembered plan depends on. Raises ConfigError."""
    said = parse_config(text, name).image_digest
    if said == digest:
        return text
    if said:
        raise ConfigError(f"{name}: image_digest: {said} is not the image of this release: remove the key")
    added = f"{text.rstrip()}\n\n# Set by `hearth release add`.\nimage_digest: {digest}\n"
    try:
        if parse_config(added, name).image_digest == digest:
            return added
    except ConfigError:
        pass
    raise ConfigError(f"{name}: image_digest can't be added: write the file in block style, without that key")


def problems(container: ContainerSpec, config: Config) -> list[str]:
    """Why this container could never serve this config: one line each, empty if it can."""
    ports = config.ports
    found = []
    for key, host, port in (
        ("engine", ports.engine_host, ports.engine),
        ("supervisor", ports.supervisor_host, ports.supervisor),
    ):
        if container.published(port) is None:
            found.append(f"ports.{key}: {port} isn't published: add it to the release's container.ports")
        if host in ("localhost", "::1") or host.startswith("127."):
            found.append(
                f"ports.{key}_host: {host} can't be reached from outside the container: write 0.0.0.0 (the "
                "address that the host listens on is the release's container.ports)"
            )
    return found + [f"{where}: {why}" for where, why in _wrong_secrets(config)]


def secret_names(config: Config) -> dict[str, str]:
    """Name of each secret that the config reads from the mounted folder, by config key."""
    paths = _secret_paths(config)
    return {key: path.name for key, path in paths.items() if str(path.parent) == SECRETS_TARGET}


def _wrong_secrets(config: Config) -> list[tuple[str, str]]:
    return [
        (key, f"{path}: not in the container: write {SECRETS_TARGET}/{path.name}")
        for key, path in _secret_paths(config).items()
        if str(path.parent) != SECRETS_TARGET
    ]


def _secret_paths(config: Config) -> dict[str, FilePath]:
    said = config.secrets
    named = {"api_key_file": said.api_key_file, "admin_api_key_file": said.admin_api_key_file}
    found = {f"secrets.{key}": path for key, path in named.items() if path is not None}
    if config.notify.url_file is not None:
        found["notify.url_file"] = config.notify.url_file
    found |= {f"notify.header_files.{name}": path for name, path in config.notify.header_files.items()}
    return found | {f"secrets.redact_files.{i}": path for i, path in enumerate(said.redact_files)}
