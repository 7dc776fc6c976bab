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


def accepts(tables: dict[str, Any]) -> bool:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    return bool(jsonschema.Draft202012Validator(config_schema()).is_valid(tables))


def test_what_runs_is_accepted() -> None:
    assert accepts(tomllib.loads(config.template()))
    for method in (name for name, cls in METHODS.items() if cls.__module__.startswith("emdcfl.")):
        complete = plan(Config(scenario=Choice("rotated-digits", {"groups": 2}), method=Choice(method))).config
        assert accepts(tomllib.loads(config.dump(complete))), method


@pytest.mark.parametrize(
    "text", ["[run]\nround = 3", "[training]\nlr = 'fast'", "[method]\nname = 'fedavg'\ntolerance = 1", "[runs]\nseed = 1"]
)
def test_what_is_refused_is_marked(text: str) -> None:
    assert not accepts(tomllib.loads(text))
    with pytest.raises(ConfigError):
        plan(config.loads(text))
