"""Settings of EMD-CFL: typed, checked on both sides, and one table of what goes with what."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tiny import client
from torch import nn

from emdcfl.core.client import Client
from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.core.params import Network
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.client.projecting import released
from emdcfl.methods.emdcfl.client.tasks import reference
from emdcfl.methods.emdcfl.settings import REFUSED, SWITCHED_OFF, CompareSettings, Options


def test_settings_travel_as_a_dict_and_come_back() -> None:
    for options in (Options(), Options(privacy_epsilon=4.0), Options(exchange="server-samples"), Options(privacy_epsilon=math.inf)):
        settings = CompareSettings.of(options)
        assert CompareSettings.from_dict(settings.as_dict()) == settings
        assert all(isinstance(value, (str, float, int, bool, type(None))) for value in settings.as_dict().values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("projection", "none"),
        ("projection", 1),
        ("projection_ratio", 0.0),
        ("projection_ratio", "0.9"),
        ("max_samples", 1),
        ("max_samples", 5.5),
        ("max_samples", True),
        ("cost", ["cosine"]),
        ("label_weight", math.nan),
        ("sinkhorn_reg", 0.0),
        ("match_classes", 1),
        ("privacy_epsilon", -1.0),
        ("privacy_delta", 1.0),
        ("privacy_delta", None),
    ],
)
def test_a_client_refuses_settings_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(ClientError, match=name):
        CompareSettings.from_dict({**CompareSettings.of(Options()).as_dict(), name: value})


def test_a_client_refuses_missing_and_unknown_settings() -> None:
    sent = CompareSettings.of(Options()).as_dict()
    for wrong in ({}, {k: v for k, v in sent.items() if k != "cost"}, {**sent, "raw": True}):
        with pytest.raises(ClientError, match="expected settings named"):
            CompareSettings.from_dict(wrong)


@pytest.mark.parametrize("rule", REFUSED, ids=lambda rule: f"{rule.first.name}-{rule.second.name}")
def test_what_does_not_go_together_is_a_config_error_with_its_reason(rule: Any) -> None:
    chosen = {c.name: c.values[0] for c in (rule.first, rule.second) if c.name != "noisy"}
    noise = {"privacy_epsilon": 4.0} if "noisy" in (rule.first.name, rule.second.name) else {}
    with pytest.raises(ConfigError) as caught:
        replace(Options(), **chosen, **noise).check()
    assert rule.reason in str(caught.value) and all(name in str(caught.value) for name in chosen)


SENT = CompareSettings.of(Options(match_classes=False)).as_dict()
SEEN = [rule for rule in (*SWITCHED_OFF, *REFUSED) if {rule.first.name, rule.second.name} <= SENT.keys() | {"noisy"}]


@pytest.mark.parametrize("rule", SEEN, ids=lambda rule: f"{rule.first.name}-{rule.second.name}")
def test_a_client_refuses_the_same_wherever_it_can_see_it(rule: Any) -> None:
    values = {c.name: c.values[0] for c in (rule.first, rule.second)}
    if values.pop("noisy", False):
        values["privacy_epsilon"] = 4.0
    with pytest.raises(ClientError) as caught:
        CompareSettings.from_dict({**SENT, **values})
    assert rule.reason in str(caught.value)


def test_a_literal_of_the_wrong_value_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match=r"method\.cost 'cosine' or 'euclidean' or 'label-aware', got manhattan"):
        EMDCFL(cost="manhattan").check()  # type: ignore[arg-type]


def test_a_node_that_withholds_raw_samples_sends_no_raw_embeddings_either() -> None:
    some = client()
    some.withheld = frozenset({"deposit"})
    inputs: dict[str, Any] = {"omega": some.network.theta[some.network.layout.embedding], "partners": {}, "sizes": [70]}
    with pytest.raises(ClientError, match="server-samples"):
        reference(some, settings=CompareSettings.of(Options(exchange="server-samples")).as_dict(), **inputs)
    assert reference(some, settings=CompareSettings.of(Options()).as_dict(), **inputs)["samples"]


class Recipe:
    """A factory that can say what it builds, as models' recipes do."""

    def __init__(self, activation: str, weights: str | None = None) -> None:
        self.activation, self.weights = activation, weights

    def __call__(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), getattr(nn, self.activation)(), nn.Linear(3, 2))

    def as_dict(self) -> dict[str, Any]:
        return {"name": "test", "options": {"activation": self.activation, "weights": self.weights}}


def test_noise_belongs_to_the_layout_and_the_recipe_and_not_to_the_module() -> None:
    """Another network of the same layout gets other noise; the same network gets the same, however an engine rewrote its layers."""
    some = client()
    settings = CompareSettings.of(Options(privacy_epsilon=4.0))

    def noise(recipe: Recipe, *, rewritten: bool = False) -> torch.Tensor:
        network = Network(recipe)
        if rewritten:
            network.module[1] = nn.Sequential(network.module[1])  # type: ignore[index, operator]
        asked = Client(some.site, network, some.preprocess, seed=0, secret=some.secret)
        return released(asked, torch.ones(9), b"seed", 3, [b"record"], torch.ones(1, 3), settings)

    first = noise(Recipe("ReLU"))
    assert torch.equal(first, noise(Recipe("ReLU"), rewritten=True))
    assert torch.equal(first, noise(Recipe("ReLU", weights="imagenet")))
    assert not torch.equal(first, noise(Recipe("Tanh")))
