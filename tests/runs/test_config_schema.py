"""The schema for editors accepts what a run accepts, and the one in the docs is today's."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from emdcfl.core.errors import ConfigError
from emdcfl.methods import METHODS
from emdcfl.runs import config
from emdcfl.runs.config import Choice, Config
from emdcfl.runs.config_schema import config_schema
from emdcfl.runs.plan import plan

COMMITTED = Path(__file__).parents[2] / "docs" / "reference" / "config.schema.json"


def test_the_committed_schema_is_todays() -> None:
    assert json.loads(COMMITTED.read_text(encoding="utf-8")) == config_schema(), "emdcfl init --schema > docs/reference/config.schema.json"


KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "integer": (int,), "number": (int, float),
}  # fmt: skip
WORDS = {"title", "description", "default", "examples", "$schema", "$id"}
"""Keywords that refuse nothing."""


def fits(value: Any, schema: Any) -> bool:
    """Whether a value is valid, by the few keywords that the schema uses."""
    if isinstance(schema, bool):
        return schema
    fields = value if isinstance(value, dict) else {}
    known = schema.get("properties", {})
    rules = {
        "type": lambda kind: isinstance(value, KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool)),
        "const": lambda wanted: value == wanted,
        "enum": lambda choices: value in choices,
        "anyOf": lambda parts: any(fits(value, part) for part in parts),
        "allOf": lambda parts: all(fits(value, part) for part in parts),
        "if": lambda condition: not fits(value, condition) or fits(value, schema["then"]),
        "then": lambda _: "if" in schema,
        "items": lambda item: not isinstance(value, list) or all(fits(one, item) for one in value),
        "required": lambda names: all(name in fields for name in names),
        "properties": lambda _: all(fits(fields[name], known[name]) for name in fields.keys() & known.keys()),
        "additionalProperties": lambda other: all(fits(fields[name], other) for name in fields.keys() - known.keys()),
    }
    assert schema.keys() <= rules.keys() | WORDS, "a keyword that this function does not know"
    return all(rules[word](said) for word, said in schema.items() if word in rules)


def accepts(tables: dict[str, Any]) -> bool:
    return fits(tables, config_schema())


def test_what_runs_is_accepted_and_runs_again_as_it_was() -> None:
    assert accepts(tomllib.loads(config.template()))
    for method in (name for name, cls in METHODS.items() if cls.__module__.startswith("emdcfl.")):
        for options in ({}, {"preset": "reference"}):
            complete = plan(Config(scenario=Choice("rotated-digits", {"groups": 2}), method=Choice(method, options)))
            written = config.dump(complete.config)
            assert accepts(tomllib.loads(written)), method
            again = plan(config.loads(written))  # as --resume, and whoever runs a run's config.toml
            assert (again.key, again.method) == (complete.key, complete.method)


@pytest.mark.parametrize(
    "text", ["[run]\nround = 3", "[training]\nlr = 'fast'", "[method]\nname = 'fedavg'\ntolerance = 1", "[runs]\nseed = 1"]
)
def test_what_is_refused_is_marked(text: str) -> None:
    assert not accepts(tomllib.loads(text))
    with pytest.raises(ConfigError):
        plan(config.loads(text))
