"""The deployment config: one YAML file, checked to the last key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hearth import yamltext
from hearth.config_explain import Says, bare, explain
from hearth.config_types import (
    ArgName,
    ArgValue,
    Command,
    Count,
    EnvName,
    EnvValue,
    FilePath,
    HeaderName,
    PassedName,
    Port,
    Scalar,
    Seconds,
    Text,
    WebAddress,
    argument_name,
)
from hearth.errors import ConfigError
from hearth.failure import Phase

__all__ = ["ArgValue", "Config", "Scalar", "load", "parse"]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values can't change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, data: Any) -> Any:
        """A section, list or mapping whose every line is commented out has its defaults."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or not cls._holds_more(key)}

    @classmethod
    def _holds_more(cls, key: object) -> bool:
        field = cls.model_fields.get(str(key))
        if field is None or field.is_required():
            return False
        kind = bare(field.annotation)
        return get_origin(kind) in (dict, list) or (isinstance(kind, type) and issubclass(kind, BaseModel))


class Model(Section):
    """Which weights to serve, and under which name."""

    path: FilePath
    """Folder with the weights and config.json; `~` is the home folder."""
    served_name: Text
    """The name that clients ask for."""
    revision: str = ""
    """Revision of the weights: part of the fingerprint under which a plan is remembered."""
    architecture: str | None = None
    """Hugging Face architecture, e.g. GlmMoeDsaForCausalLM; read from PATH/config.json where left out."""


class Engine(Section):
    """The SGLang server: version, interpreter, arguments, environment."""

    version: Text
    """SGLang's version: decides how a graph plan is spelled."""
    python: Command = "python3"
    """Interpreter that has sglang installed."""
    args: dict[ArgName, ArgValue] = Field(default_factory=dict)
    """Arguments of the server, without the leading dashes. What Hearth sets itself is refused here."""
    env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    """Variables of the engine; a number is taken as it is written. Secrets are refused here."""
    pass_env: list[PassedName] = Field(default_factory=list)
    """Variables (NAME or PREFIX_*) handed on from Hearth's own environment, besides the allow-list."""
    verify_kernels: bool = False
    """Check the baked kernels before each start (`hearth kernels verify --self-test`); images turn it on."""

    @field_validator("args")
    @classmethod
    def _named_once(cls, value: dict[str, ArgValue]) -> dict[str, ArgValue]:
        plain = [argument_name(name) for name in value]
        twice = sorted({name for name in plain if plain.count(name) > 1})
        if twice:
            raise ValueError(f"{twice[0]} is written twice, in two spellings: remove one")
        return value


class LadderRules(Section):
    """What may be given up, and how far."""

    enabled: bool = True
    """Whether a failing plan is stepped down at all; if not, Hearth stops and says why."""
    allow_eager: bool = True
    """Whether no graphs at all is better than no service (it costs 9 to 19 times in decode)."""


class Graphs(Section):
    """The wanted graph plan."""

    wanted: Annotated[str, Says("piecewise, standard, eager, or PREFILL,DECODE[,MAXBS]")] = "piecewise"
    """The plan to start with: piecewise, standard, eager, or PREFILL,DECODE[,MAXBS]."""
    decode_max_bs: Count | None = None
    """Largest decode batch (sequences) that gets a graph; null leaves the engine's default."""
    ladder: LadderRules = LadderRules()

    @field_validator("wanted")
    @classmethod
    def _is_plan(cls, value: str) -> str:
        plain = re.sub(r"\s", "", value)
        if not re.fullmatch(r"piecewise|standard|eager|[a-z_]+,[a-z_]+(,[1-9][0-9]{0,5})?", plain):
            raise ValueError(
                f"no graph plan {value[:60]!r}: write piecewise, standard, eager, or PREFILL,DECODE[,MAXBS]"
            )
        return plain

    @model_validator(mode="after")
    def _one_size(self) -> Graphs:
        size = self.wanted.split(",")[2:]
        if size and self.decode_max_bs not in (None, int(size[0])):
            raise ValueError(f"wanted says {size[0]} and decode_max_bs {self.decode_max_bs}: write it once")
        return self


class PhaseLimit(Section):
    """When a phase has hung: seconds in all, and seconds without a line or other progress."""

    deadline: Seconds | None = None
    """Seconds that the phase may take in all; null for no limit."""
    silence: Seconds | None = None
    """Seconds without a log line or other progress; null for no limit."""


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
    """Limits of a start-up phase, over the defaults below."""
    stall: Seconds = 120.0
    """While serving: seconds with requests running and no token before the engine counts as hung."""
    drain: Seconds = 60.0
    """Seconds that running requests get to finish before a stop becomes a kill."""
    kill: Seconds = 20.0
    """Seconds to wait for the killed processes to be gone."""
    memory_free: Seconds = 120.0
    """Seconds to wait for GPU memory to fall after a kill."""
    restart_window: Seconds = 3600.0
    """Seconds that a failure counts against its plan."""
    restart_count: Count = 4
    """Deaths within the window before a step down (unknown causes) or giving up."""
    backoff: Seconds = 5.0
    """Seconds before the first restart after an unexplained death; doubles with each one in the window."""
    backoff_max: Seconds = 120.0
    """Seconds that the wait grows to at most."""
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

    prompt: Text = "What is 2 + 2? Answer with the number only."
    """Text to complete, at temperature 0."""
    expect: str | None = None
    """Regular expression that must be found in the answer; null asks only for some text."""
    max_tokens: Annotated[Count, Field(le=512), Says("a whole number, 1 to 512")] = 32
    """Length of the answer in tokens."""
    interval: Seconds = 120.0
    """Seconds between two canaries while serving."""
    timeout: Seconds = 60.0
    """Seconds that an answer may take."""

    @field_validator("expect")
    @classmethod
    def _is_regex(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(
                    f"not a regular expression ({error}): write one as in Python's re"
                ) from error
        return value


class Ports(Section):
    """Where the engine answers clients and the supervisor answers operators."""

    engine_host: Text = "0.0.0.0"
    """Address that the engine listens on."""
    engine: Port = 30000
    """Port that the engine listens on."""
    supervisor_host: Text = "127.0.0.1"
    """Address of the supervisor's own port."""
    supervisor: Port = 9400
    """Port of the status page, /metrics, /livez and /readyz."""

    @model_validator(mode="after")
    def _differ(self) -> Ports:
        if self.engine == self.supervisor:
            raise ValueError("engine and supervisor have the same port: write two different ones")
        return self


class Paths(Section):
    """Where Hearth keeps what outlives a start, and what does not."""

    state: FilePath = Path("/var/lib/hearth")
    """What must outlive a restart: the remembered plan and the failure bundles."""
    runtime: FilePath = Path("/run/hearth")
    """What belongs to one start, such as the engine's metrics files."""
    cache: FilePath = Path("/var/cache/hearth")
    """Compiled kernels and other caches: can be lost, at the price of a slow start."""


class Secrets(Section):
    """Secrets, each as a file that holds the value alone."""

    api_key_file: FilePath | None = None
    """The key that clients must send."""
    admin_api_key_file: FilePath | None = None
    """The key for administrative requests."""
    redact_files: list[FilePath] = Field(default_factory=list)
    """More files whose content must never reach a log or a page."""


class Failures(Section):
    """How many failure bundles stay in `paths.state`/failures; the newest one always does."""

    keep: Count = 50
    """Failure bundles kept; the oldest go first."""
    max_mb: Count = 500
    """Megabytes that all failure bundles together may take."""


class Notify(Section):
    """A webhook that is told when the engine steps down, is given up, or serves again."""

    url_file: FilePath | None = None
    """File with the webhook's address, for one that holds a token; null for no webhook."""
    url: WebAddress | None = None
    """The webhook's address, where it is no secret."""
    header_files: dict[HeaderName, FilePath] = Field(default_factory=dict)
    """Headers to send, each with a file that holds its value alone, e.g. Authorization."""
    events: list[Literal["step_down", "give_up", "ready_again"]] = Field(
        default=["step_down", "give_up", "ready_again"]
    )
    """What is told. docs/operations.md has the document that is sent."""
    timeout: Seconds = 10.0
    """Seconds that the webhook has to answer a try, and that an exit waits at most for what is unsent."""

    @model_validator(mode="after")
    def _one_address(self) -> Notify:
        if self.url is not None and self.url_file is not None:
            raise ValueError("url and url_file are both there: write one of them")
        return self


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
    failures: Failures = Failures()
    notify: Notify = Notify()
    image_digest: str = ""
    """Set by the image or the deploy: part of the fingerprint."""
    profile: Literal["gpu", "cpu"] = "gpu"
    """cpu: no GPU is expected and no graph plan can take effect (demo and tests)."""


def load(path: Path) -> Config:
    """Read a config file.

    Raises ConfigError (`file: key: what is wrong: what to write`, a line for each problem) or MissingError.
    """
    return parse(yamltext.read(path), str(path))


def parse(text: str, name: str) -> Config:
    """Read config text; `name` stands for the file in errors. Raises ConfigError."""
    tree = yamltext.compose(text.removeprefix("\ufeff"), name)
    _keep_text(tree, Config)
    data = yamltext.construct(tree, name)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(name, e, Config) for e in error.errors())) from error


def _keep_text(node: yaml.Node, kind: Any) -> None:
    """Where text is wanted, a number is text as it is written: version 0.10 isn't 0.1."""
    if kind in (str, Path):
        yamltext.as_text(node)
    elif isinstance(node, yaml.SequenceNode) and get_origin(kind) is list:
        for item in node.value:
            _keep_text(item, bare(kind.__args__[0]))
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _keep_text(value, _kind_of(key.value, kind))


def _kind_of(key: str, owner: Any) -> Any:
    """The type of a key's value in a section or mapping; None where it has none."""
    if get_origin(owner) is dict:
        return bare(owner.__args__[1])
    field = owner.model_fields.get(key) if isinstance(owner, type) and issubclass(owner, BaseModel) else None
    return bare(field.annotation) if field else None
