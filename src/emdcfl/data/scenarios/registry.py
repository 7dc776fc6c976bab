"""The registry of scenarios: a name, a one-line description, a function whose keyword arguments are the options."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from emdcfl.core.checks import check_options
from emdcfl.core.errors import ConfigError, nearest
from emdcfl.data.types import Scenario

Maker = Callable[..., Scenario]


@dataclass(frozen=True)
class ScenarioEntry:
    """A registered scenario; ``presets`` are options fixed by its name."""

    maker: Maker
    summary: str
    presets: Mapping[str, Any]

    def options(self) -> dict[str, Any]:
        """Option → default, without those the name fixes."""
        parameters = inspect.signature(self.maker).parameters
        return {name: p.default for name, p in parameters.items() if name not in self.presets}


_ENTRIES: dict[str, ScenarioEntry] = {}


def scenario(name: str, summary: str, **presets: Any) -> Callable[[Maker], Maker]:
    """Register a function under a name; one function may serve several names with different presets, the last decorator's first."""

    def decorate(maker: Maker) -> Maker:
        _ENTRIES[name] = ScenarioEntry(maker, summary, presets)
        return maker

    return decorate


def names() -> tuple[str, ...]:
    """Names of the scenarios in the order in which they were registered: the built-in ones first."""
    return tuple(_ENTRIES)


def describe(name: str) -> str:
    return _entry(name).summary


def options(name: str) -> dict[str, Any]:
    return _entry(name).options()


def is_built_in(name: str) -> bool:
    """Whether a scenario comes with the data of this package; that of a federation's nodes exists at its server alone."""
    return _entry(name).maker.__module__.startswith("emdcfl.data.")


def option_types(name: str) -> dict[str, Any]:
    return typing.get_type_hints(_entry(name).maker)


def build(name: str, **options: Any) -> Scenario:
    """Build a scenario.

    Examples
    --------
    >>> build("rotated-digits", clients_per_group=1).sites[1].name
    'rot90-1'
    """
    entry = _entry(name)
    valid = entry.options()
    for option in options:
        if option not in valid:
            raise ConfigError(f"scenario {name!r} has no option {option!r}: {nearest(option, valid)}")
    missing = [option for option, default in valid.items() if default is inspect.Parameter.empty and option not in options]
    if missing:
        raise ConfigError(f"scenario {name!r} needs the option{'s' if len(missing) > 1 else ''} {', '.join(missing)}")
    plain = {option: str(value) if isinstance(value, Path) else value for option, value in options.items()}
    checked = check_options(entry.maker, plain, "scenario")
    given = {option: None if checked[option] is None else value for option, value in options.items()}  # as given: 90 is not 90.0 in a name
    built = replace(entry.maker(**entry.presets, **given))  # a copy of its own: makers may keep what they return
    object.__setattr__(built, "source", (name, dict(options)))
    return built


def _entry(name: str) -> ScenarioEntry:
    if name not in _ENTRIES:
        raise ConfigError(f"unknown scenario {name!r}: {nearest(name, _ENTRIES)}")
    return _ENTRIES[name]
