"""The configuration of a run: dataclasses, and the TOML they are read from and written to.

Eight tables: ``[run] [scenario] [method] [model] [training] [personalize] [engine] [trust]``. In ``[scenario]``, ``[method]`` and
``[model]`` there is a ``name``, and every other key is an option of that scenario, method or model; ``check_options`` compares the options
with what it declares. A key that is left out has its default; where the default is ``None``, the scenario decides (participants: all). A
ninth, ``[privacy]``, is another way to write the method's ``privacy_`` options: ``privacy.epsilon`` is ``method.privacy_epsilon``, and wins
over it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w

from emdcfl.core.checks import NONE, check_options, check_size, read_toml
from emdcfl.core.errors import ConfigError, nearest
from emdcfl.trust.policy import TRUST_RANGES, Trust

OWN_FILES, AT_NODES = "folder", "nodes"
"""Scenarios of people's own files: on this machine, and at the nodes of a federation."""


@dataclass(frozen=True)
class RunConfig:
    """How long, with whom, from which seed."""

    seed: int = 0
    rounds: int | None = None
    participants: int | None = None
    evaluate_every: int = 1
    hold_out: tuple[str, ...] | None = None
    what_differs: bool | None = None


@dataclass(frozen=True)
class Choice:
    """A scenario, method or model: its name and its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingConfig:
    """Local training. ``None`` is the scenario's default."""

    local_epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    momentum: float = 0.9
    weight_decay: float = 1e-6


@dataclass(frozen=True)
class PersonalizeConfig:
    """Fine-tuning at home after the last round. ``mode`` of ``None`` is the scenario's, ``lr`` of ``None`` 0.4 times ``training.lr``."""

    mode: Literal["off", "on", "if-it-pays"] | None = None
    epochs: int = 30
    lr: float | None = None

    @property
    def wanted(self) -> bool:
        """Whether anybody fine-tunes."""
        return self.mode not in (None, "off")


@dataclass(frozen=True)
class EngineConfig:
    """Where client tasks run, and what happens when one fails."""

    name: str = "auto"
    workers: int = 1
    device: str = "auto"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    threads: int = 1
    streams: int | None = None
    deterministic: bool = True
    compile: Literal["auto", "yes", "no"] = "auto"
    on_failure: Literal["auto", "stop", "continue"] = "auto"
    quorum: float = 0.5
    retries: int = 2
    phase_deadline: float | None = None


@dataclass(frozen=True)
class Config:
    """Everything a run depends on."""

    run: RunConfig = field(default_factory=RunConfig)
    scenario: Choice = field(default_factory=lambda: Choice("rotated-digits"))
    method: Choice = field(default_factory=lambda: Choice("emdcfl"))
    model: Choice | None = None
    training: TrainingConfig = field(default_factory=TrainingConfig)
    personalize: PersonalizeConfig = field(default_factory=PersonalizeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    trust: Trust = field(default_factory=Trust)


TABLES = tuple(f.name for f in dataclasses.fields(Config))
CHOICES = ("scenario", "method", "model")
PRIVACY = "privacy"

RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "run.seed": (lambda v: 0 <= v < 2**63, "from 0 to 2^63 - 1"),
    "run.hold_out": (lambda v: len(v) > 0 and len(set(v)) == len(v), "a list of different sites"),
    "training.momentum": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "engine.device": (lambda v: re.fullmatch(r"auto|cpu|cuda(:\d+)?", v) is not None, "'auto', 'cpu', 'cuda' or 'cuda:<number>'"),
    "engine.quorum": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    **dict.fromkeys(("training.weight_decay", "engine.retries"), (lambda v: v >= 0, "at least 0")),
    **dict.fromkeys(("training.lr", "personalize.lr", "engine.phase_deadline"), (lambda v: v > 0, "above 0")),
    **dict.fromkeys(("run.rounds", "run.participants", "run.evaluate_every"), (lambda v: v >= 1, "at least 1")),
    **dict.fromkeys(("training.local_epochs", "training.batch_size", "personalize.epochs"), (lambda v: v >= 1, "at least 1")),
    **dict.fromkeys(("engine.workers", "engine.threads", "engine.streams"), (lambda v: v >= 1, "at least 1")),
    **TRUST_RANGES,
}


def from_dict(raw: Mapping[str, Any], where: str = "config") -> Config:
    """Build and check a config from its tables. ``where`` (a file name, say) begins the error messages."""
    for table, values in raw.items():
        if table not in (*TABLES, PRIVACY):
            raise ConfigError(f"{where}: unknown table [{table}]: {nearest(table, (*TABLES, PRIVACY))}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: {table} must be a table, [{table}], got {values!r} ({type(values).__name__})")
    if PRIVACY in raw:
        raw = {**raw, "method": {**raw.get("method", {}), **{f"{PRIVACY}_{key}": value for key, value in raw[PRIVACY].items()}}}
    usual = Config()
    return Config(
        scenario=_choice("scenario", raw, where, usual.scenario.name),
        method=_choice("method", raw, where, usual.method.name),
        model=_choice("model", raw, where, None) if raw.get("model") else None,
        **{table: _table(type(getattr(usual, table)), table, raw, where) for table in TABLES if table not in CHOICES},
    )


def _table(cls: Callable[..., Any], table: str, raw: Mapping[str, Any], where: str) -> Any:
    values = check_options(cls, raw.get(table, {}), f"{where}: {table}")
    for key, value in values.items():
        holds, expected = RANGES.get(f"{table}.{key}", (lambda _: True, ""))
        if value is not None and not holds(value):
            raise ConfigError(f"{where}: {table}.{key} must be {expected}, got {value!r}")
    return cls(**values)


def _choice(table: str, raw: Mapping[str, Any], where: str, default: str | None) -> Choice:
    values = raw.get(table, {})
    name = values.get("name", default)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: {table}.name must be the name of a {table}, got {'nothing' if name is None else repr(name)}")
    options = {key: _plain(value, f"{where}: {table}.{key}") for key, value in values.items() if key != "name"}
    return Choice(name, options)


def _plain(value: Any, where: str) -> Any:
    """Refuse what JSON cannot carry: dates, NaN, infinities, objects."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    check_size(value, where)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(f"{where} must be a number, string, boolean, list or table, got {value!r} ({type(value).__name__})")


def as_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The tables of the config, in order. Unset keys are left out; an option that is ``None`` becomes ``"none"``.

    ``[personalize]`` is left out while nobody asks for it: the rounds do not depend on it, and runs without it keep their hash.
    """
    tables: dict[str, dict[str, Any]] = {}
    for table in TABLES:
        part = getattr(config, table)
        if isinstance(part, Choice):
            tables[table] = {"name": part.name} | {key: _written(part.options[key]) for key in sorted(part.options)}
        elif part is not None and part != PersonalizeConfig():
            tables[table] = {key: value for key, value in dataclasses.asdict(part).items() if value is not None}
    return tables


def _written(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _written(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_written(item) for item in value]
    return NONE if value is None else value


def loads(text: str, where: str = "config") -> Config:
    try:
        raw = read_toml(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    return from_dict(raw, where)


def load(path: str | Path) -> Config:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot read the config: {reason}; 'emdcfl init' writes one to start from") from error
    return loads(text, str(path))


def own_files(path: str | Path) -> dict[str, Any]:
    """Return the options of the own files that a config names (``[scenario]``, name = "folder"); ``path`` is among them."""
    chosen = load(path).scenario
    if chosen.name != OWN_FILES or not isinstance(chosen.options.get("path"), str):
        raise ConfigError(f'{path}: expected a config of own files ([scenario] with name = "folder" and path), got {chosen.name!r}')
    return dict(chosen.options)


def dump(config: Config) -> str:
    """The config as TOML that can be run as it is: same config, same text."""
    return tomli_w.dumps(as_dict(config))


def template() -> str:
    """Return the commented config that ``emdcfl init`` writes. As it stands, it is the defaults."""
    return Path(__file__).with_name("template.toml").read_text(encoding="utf-8")


def with_workers(config: Config, workers: int) -> Config:
    """Return the config with another number of workers, which changes no bit of a run."""
    return replace(config, engine=replace(config.engine, workers=workers))


def config_hash(config: Config) -> str:
    """SHA-256 (hex) of the config as canonical JSON: equal for equal settings, whatever the order of their keys."""
    text = json.dumps(as_dict(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Read ``--set table.key=value`` arguments: values as TOML, or as text where they are not TOML.

    Examples
    --------
    >>> parse_settings(["method.tolerance=0.03", "scenario.path=my data"])
    {'method.tolerance': 0.03, 'scenario.path': 'my data'}
    """
    found = {}
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign:
            raise ConfigError(f"--set {setting}: expected table.key=value, as in --set method.tolerance=0.03")
        found[key.strip()] = _value(value.strip())
    return found


SHORT = {"method": "method", "engine": "engine.name", "personalize": "personalize.mode"} | {
    name: f"{table}.{name}"
    for table, names in {
        "run": ("rounds", "seed", "participants", "hold_out"),
        "training": ("local_epochs", "batch_size", "lr"),
        "engine": ("device", "workers"),
        "scenario": ("scale", "task", "label", "client"),
    }.items()
    for name in names
}
"""Argument of a function, or flag → key of a config."""


def config_keys(**arguments: Any) -> dict[str, Any]:
    """Return arguments under the keys of a config that they stand for."""
    return {SHORT[name]: value for name, value in arguments.items()}


def _with_options(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write a method's options, which follow its name after colons, as settings of their own."""
    text = settings.get("method")
    if not isinstance(text, str) or ":" not in text:
        return settings
    name, *options = text.split(":")
    wrong = next((option for option in options if not all(option.partition("="))), None)
    if wrong is not None:
        raise ConfigError(f"method {text}: expected {name}:option=value, got {wrong!r}")
    return {**parse_settings([f"method.{option}" for option in options]), **settings, "method": name}


def override(config: Config, settings: Mapping[str, Any], where: str = "--set") -> Config:
    """Return the config with some settings changed, given by dotted keys; a scenario, method or model by its name alone.

    Examples
    --------
    >>> changed = override(Config(), {"method": "fedavg", "method.tolerance": 0.03, "run.rounds": 5})
    >>> changed.method, changed.run.rounds
    (Choice(name='fedavg', options={'tolerance': 0.03}), 5)
    >>> override(Config(), {"method": "ifca:k=2"}).method
    Choice(name='ifca', options={'k': 2})
    """
    raw, settings = as_dict(config), _with_options(settings)
    names = [f"{table}{end}" for table in CHOICES for end in ("", ".name")]
    for key, value in sorted(settings.items(), key=lambda item: item[0] not in names):  # a name before its options
        table, *path = key.split(".")
        if table not in (*TABLES, PRIVACY):
            raise ConfigError(f"{where} {key}: unknown table {table!r}: {nearest(table, (*TABLES, PRIVACY))}")
        if not path and table in CHOICES:
            path = ["name"]
        if not path or not all(path):
            raise ConfigError(f"{where} {key}: expected table.key=value, as in run.rounds=10")
        if table in CHOICES and path == ["name"] and raw.get(table, {}).get("name") != value:
            raw[table] = {}  # another scenario, method or model: the options of the one before are not its own
        target = raw.setdefault(table, {})
        for step in path[:-1]:
            target = target.setdefault(step, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{where} {key}: {step!r} is a value, not a table")
        target[path[-1]] = str(value) if path == ["name"] else value
    return from_dict(raw, where)


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed["value"]
    # more keys: the text had a line break in it; a date has no meaning here
    return value if len(parsed) == 1 and isinstance(value, (bool, int, float, str, list, dict)) else text
