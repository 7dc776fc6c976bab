"""The same method file over messages and in one process: the same bits."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.engines.flower import loopback
from tests.methods import toy
from torch import Tensor

from emdcfl.core.codec import raw
from emdcfl.data.types import Scenario, Split
from emdcfl.engines.flower.messages import MessageSettings
from emdcfl.methods import METHODS, make
from emdcfl.report import render
from emdcfl.runs.config import EngineConfig, PersonalizeConfig
from emdcfl.runs.plan import RunPlan
from emdcfl.runs.runner import run

SCENARIO = toy.toy(groups=2, per_group=2, n=48)
TRAINING = toy.Training(local_epochs=1, batch_size=16, lr=0.05)


def identical(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and all(identical(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    if hasattr(a, "tobytes"):
        return bool(a.tobytes() == b.tobytes())
    return type(a) is type(b) and (a == b or (a != a and b != b))


def both(
    name: str,
    *,
    scenario: Scenario = SCENARIO,
    settings: MessageSettings = loopback.QUICK,
    participants: int | None = None,
    rounds: int = 3,
    **options: Any,
) -> None:
    method = make(name, **options)
    local = toy.federation(scenario, training=TRAINING, participants=participants)
    flower = loopback.federation(scenario, training=TRAINING, number=participants, settings=settings)
    first, second = (toy.play(fed, method, rounds) for fed in (local, flower))
    assert identical(first, second)
    assert torch.equal(first[1].models, second[1].models)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_gives_the_same_bits(name: str) -> None:
    both(name)


@pytest.mark.parametrize(("name", "options"), [("emdcfl", {}), ("emdcfl", {"grouping": "benefit"}), ("fedem", {}), ("ifca", {})])
def test_the_same_bits_where_some_sit_out_and_join_later(name: str, options: dict[str, Any]) -> None:
    both(name, participants=3, **options)


def test_the_same_bits_where_a_site_lacks_a_class_and_another_is_too_small() -> None:
    """``recalibrate`` and the scoring of clusters' models travel too."""
    lacking, small, *others = SCENARIO.sites
    parts = {name: getattr(lacking, name) for name in ("train", "val")}
    lacking = replace(lacking, **{name: Split(part.x[part.y > 0], part.y[part.y > 0]) for name, part in parts.items()})
    small = replace(small, val=Split(small.val.x[:8], small.val.y[:8]))
    both("emdcfl", scenario=replace(SCENARIO, sites=(lacking, small, *others)), rounds=2)


WAYS = (
    {"projection": "pair"},
    {"preset": "reference"},
    {"cost": "label-aware"},
    {"tolerance": "auto"},
    {"privacy_epsilon": 64.0},
    {"grouping": "benefit"},
)


@pytest.mark.parametrize("options", WAYS)
def test_every_way_of_comparing_gives_the_same_bits_in_requests_of_many_parts(options: dict[str, Any]) -> None:
    """Requests in one part: every method, above."""
    both("emdcfl", rounds=2, settings=MessageSettings(deadline=5, poll=0.001, wait=0, part_mb=1e-4), **options)


def test_a_run_over_messages_leaves_the_models_of_a_local_one_plain_and_fine_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = replace(tiny.config(rounds=2, grouping="benefit", tolerance="auto"), personalize=PersonalizeConfig("on", epochs=2))
    chosen = replace(chosen, engine=EngineConfig("sequential", device="cpu"))
    local = run(chosen, tmp_path / "local")
    monkeypatch.setattr(RunPlan, "federation", lambda planned: loopback.federation(planned.scenario, training=planned.training))
    flower = run(chosen, tmp_path / "flower")
    assert flower.summary["clusters"] == local.summary["clusters"] == [0, 0, 1, 1]
    assert flower.summary["personalized"] == local.summary["personalized"] and len(flower.summary["personalized"]["kept"]) == 4
    both = [tiny.contents(tmp_path / name) for name in ("local", "flower")]
    files = [name for name in both[0] if name.startswith(("models/", "personal/"))]
    assert len(files) == 2 + 1 + 4 + 1, "clusters, fine-tuned models, and an index of each"
    assert all(both[0][name] == both[1][name] for name in files)
    x = tiny.tiny().sites[0].tests["test"].x
    assert not torch.equal(flower.predict_proba("site-0", x), flower.predict_proba("site-0", x, plain=True))
    assert "fine-tuned at home" in render(tmp_path / "flower")
