"""The deployment config: one YAML file, checked to the last key."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hearth.errors import ConfigError, MissingError
from hearth.failure import Phase

Scalar = str | int | float | bool | None
ArgValue = Scalar | list[Scalar] | dict[str, Any]
Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values can't change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Section):
    """Which weights to serve, and under which name."""

    path: Path
    served_name: str = Field(min_length=1)
    revision: str = ""
    """Revision of the weights: part of the fingerprint under which a plan is remembered."""
    architecture: str | None = None
    """Hugging Face architecture, e.g. GlmMoeDsaForCausalLM; read from PATH/config.json where left out."""


class Engine(Section):
    """The SGLang server: version, interpreter, arguments, environment."""

    version: str
    python: str = "python3"
    """Interpreter that has sglang installed."""
    args: dict[str, ArgValue] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    pass_env: list[str] = Field(default_factory=list)
    """Names (or PREFIX_*) of variables handed to the engine besides the built-in allow-list."""

    @field_validator("version", mode="before")
    @classmethod
    def _version_is_text(cls, value: object) -> object:
        if isinstance(value, (int, float)):
            raise ValueError(f'must be text: write version: "{value}"')
        return value


class LadderRules(Section):
    """What may be given up, and how far."""

    enabled: bool = True
    allow_eager: bool = True
    """Whether no graphs at all is better than no service (it costs 9 to 19 times in decode)."""


class Graphs(Section):
    """The wanted graph plan."""

    wanted: str = "piecewise"
    """piecewise, standard, eager, or PREFILL,DECODE[,MAXBS]."""
    decode_max_bs: Annotated[int, Field(ge=1)] | None = None
    """Largest decode batch (sequences) that gets a graph; None leaves the engine's default."""
    ladder: LadderRules = LadderRules()


class PhaseLimit(Section):
    """When a phase has hung: seconds in all, and seconds without a line or other progress."""

    deadline: Seconds | None = None
    silence: Seconds | None = None


def _default_phases() -> dict[Phase, PhaseLimit]:
    """Right for a 440 GB model on 8x RTX PRO 6000: loading may be long, capture may be quiet for minutes."""
    minute = 60.0
    return {
        Phase.SPAWN: PhaseLimit(deadline=10 * minute, silence=5 * minute),
        Phase.INIT: PhaseLimit(deadline=10 * minute, silence=5 * minute),
        Phase.LOAD: PhaseLimit(deadline=60 * minute, silence=10 * minute),
        Phase.MEMORY: PhaseLimit(deadline=10 * minute, silence=5 * minute),
        Phase.WARM: PhaseLimit(deadline=60 * minute, silence=30 * minute),
        Phase.CAPTURE_PREFILL: PhaseLimit(deadline=20 * minute, silence=10 * minute),
        Phase.CAPTURE_DECODE: PhaseLimit(deadline=20 * minute, silence=10 * minute),
        Phase.BIND: PhaseLimit(deadline=5 * minute, silence=3 * minute),
        Phase.WARMUP: PhaseLimit(deadline=15 * minute, silence=10 * minute),
    }


class Limits(Section):
    """Deadlines, restart limits and the pace of looking."""

    phases: dict[Phase, PhaseLimit] = Field(default_factory=dict)
    stall: Seconds = 300.0
    """While serving: seconds with requests running and no token before the engine counts as hung."""
    drain: Seconds = 60.0
    """Seconds that running requests get to finish before a stop becomes a kill."""
    kill: Seconds = 20.0
    """Seconds to wait for the killed processes to be gone."""
    memory_free: Seconds = 120.0
    """Seconds to wait for GPU memory to fall after a kill."""
    restart_window: Seconds = 3600.0
    restart_count: Annotated[int, Field(ge=1)] = 4
    """Deaths within the window before a step down (unknown causes) or giving up."""
    backoff: Seconds = 5.0
    backoff_max: Seconds = 120.0
    poll: Seconds = 5.0
    """Seconds between two looks at the engine's metrics."""

    def phase(self, phase: Phase) -> PhaseLimit:
        """The limits of a phase: the configured one over the default."""
        default = _default_phases().get(phase, PhaseLimit())
        own = self.phases.get(phase)
        if own is None:
            return default
        return PhaseLimit.model_validate({**default.model_dump(), **own.model_dump(exclude_unset=True)})


class Canary(Section):
    """A tiny request with a known answer, sent before READY and now and then."""

    prompt: str = "What is 2 + 2? Answer with the number only."
    expect: str | None = None
    """Regular expression the answer must match; None asks only for some text."""
    max_tokens: Annotated[int, Field(ge=1, le=512)] = 32
    interval: Seconds = 120.0
    timeout: Seconds = 60.0

    @field_validator("expect")
    @classmethod
    def _is_regex(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
        return value


class Ports(Section):
    """Where the engine answers clients and the supervisor answers operators."""

    engine_host: str = "0.0.0.0"
    engine: Port = 30000
    supervisor_host: str = "127.0.0.1"
    supervisor: Port = 9400

    @model_validator(mode="after")
    def _differ(self) -> Ports:
        if self.engine == self.supervisor:
            raise ValueError("engine and supervisor need two different ports")
        return self


class Paths(Section):
    """Where Hearth keeps what outlives a start, and what does not."""

    state: Path = Path("/var/lib/hearth")
    runtime: Path = Path("/run/hearth")
    cache: Path = Path("/var/cache/hearth")


class Secrets(Section):
    """Secrets, each as a file that holds the value alone."""

    api_key_file: Path | None = None
    admin_api_key_file: Path | None = None
    redact_files: list[Path] = Field(default_factory=list)
    """More files whose content must never reach a log or a page."""


class Config(Section):
    """The whole file."""

    model: Model
    engine: Engine
    graphs: Graphs = Graphs()
    limits: Limits = Limits()
    canary: Canary = Canary()
    ports: Ports = Ports()
    paths: Paths = Paths()
    secrets: Secrets = Secrets()
    image_digest: str = ""
    """Set by the image or the deploy: part of the fingerprint."""
    profile: Literal["gpu", "cpu"] = "gpu"
    """cpu: no GPU is expected and no graph plan can take effect (demo and tests)."""


def load(path: Path) -> Config:
    """Read a config file.

    Raises ConfigError (`file: key: what is wrong: what to write`) or MissingError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingError(
            f"{path}: no such file", "copy hearth.example.yaml there, or name another with --config"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from error
    return parse(text, str(path))


def parse(text: str, name: str) -> Config:
    """Read config text; `name` stands for the file in errors. Raises ConfigError."""
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {_yaml_problem(error)}", "fix the YAML there") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: the file must be a mapping with model: and engine:")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(name, e) for e in error.errors())) from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice; YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be plain text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}: {problem}" if mark else str(problem)


def _explain(name: str, error: Any) -> str:
    location = tuple(part for part in error["loc"] if part != "[key]")
    key = ".".join(str(part) for part in location) or "(top level)"
    match error["type"]:
        case "extra_forbidden":
            return f"{name}: {key}: no such key: {_nearest(location)}"
        case "missing":
            return f"{name}: {key}: missing: {_wanted(location)}"
        case _:
            message = str(error["msg"]).removeprefix("Value error, ")
            message = message[:1].lower() + message[1:]
            given = "" if isinstance(error["input"], (dict, list)) else f" (given: {error['input']!r})"
            return f"{name}: {key}: {message}{given}: {_wanted(location)}"


def _section(location: tuple[Any, ...]) -> type[BaseModel] | None:
    """The model class that holds the last key of `location`."""
    current: type[BaseModel] = Config
    for part in location[:-1]:
        field = current.model_fields.get(str(part))
        kind = field.annotation if field else None
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            current = kind
        elif field is not None and "PhaseLimit" in str(kind):
            return PhaseLimit
        else:
            return None
    return current


def _nearest(location: tuple[Any, ...]) -> str:
    section = _section(location)
    known = sorted(section.model_fields) if section else []
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"did you mean {close[0]}?" if close else f"write one of {', '.join(known)}"


def _wanted(location: tuple[Any, ...]) -> str:
    section = _section(location)
    field = section.model_fields.get(str(location[-1])) if section else None
    if field is None:
        return "see hearth.example.yaml"
    default = "" if field.is_required() else f", default {field.get_default(call_default_factory=True)!r}"
    return f"write a value of type {_type_name(field.annotation)}{default}"


def _type_name(annotation: Any) -> str:
    name = getattr(annotation, "__name__", None) if isinstance(annotation, type) else None
    return name or re.sub(r"typing\.|pathlib\.|hearth\.config\.", "", str(annotation))
