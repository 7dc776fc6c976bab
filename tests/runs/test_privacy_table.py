"""The ``[privacy]`` table of a config is another way to write a method's privacy options."""

from __future__ import annotations

import pytest
from tests.tiny import config

from emdcfl.core.errors import ConfigError
from emdcfl.runs.config import Choice, Config, dump, loads, override
from emdcfl.runs.plan import plan


def test_the_privacy_table_sets_the_methods_options() -> None:
    read = loads("[privacy]\nepsilon = 4\ndelta = 1e-6\n[method]\nname = 'emdcfl'\ntolerance = 'auto'\n")
    assert read.method == Choice("emdcfl", {"tolerance": "auto", "privacy_epsilon": 4, "privacy_delta": 1e-6})
    assert loads(dump(read)) == read


def test_set_privacy_epsilon_reaches_the_method_and_wins_over_what_was_there() -> None:
    first = plan(override(config(), {"privacy.epsilon": 4}))
    assert first.method.privacy_epsilon == 4.0  # type: ignore[attr-defined]
    again = plan(override(first.config, {"privacy.epsilon": 8}))
    assert again.method.privacy_epsilon == 8.0  # type: ignore[attr-defined]
    assert plan(override(again.config, {"privacy.epsilon": "none"})).method.privacy_epsilon is None  # type: ignore[attr-defined]


def test_a_method_without_noise_refuses_the_table() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.epsilon.*emdcfl.*fedavg"):
        plan(override(config(method="fedavg"), {"privacy.epsilon": 4}))


def test_unknown_keys_and_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="privacy_epsilom.*privacy_epsilon"):
        plan(override(config(), {"privacy.epsilom": 4}))
    with pytest.raises(ConfigError, match="privacy_epsilon.*much"):
        plan(override(config(), {"privacy.epsilon": "much"}))
    with pytest.raises(ConfigError, match="privacy"):
        loads("privacy = 4")
    assert "privacy_epsilon" not in dump(plan(Config()).config)
