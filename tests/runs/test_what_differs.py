"""What sets groups apart: planted differences are named and others are not, and nothing is asked beside privacy noise."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import client, federation, tiny

from emdcfl.core.errors import ClientError
from emdcfl.core.learning.profile import IMAGE_FEATURES, image_features, profile
from emdcfl.data.own import from_arrays
from emdcfl.data.types import Scenario, Split
from emdcfl.report.page import render
from emdcfl.runs.config import Choice, Config, override
from emdcfl.runs.plan import IN_MEMORY, plan
from emdcfl.runs.runner import run
from emdcfl.runs.verdict.what_differs import in_words, what_differs

COLUMNS = {"columns": [{"name": "age", "mean": 50.0, "std": 10.0, "gaps": True}, {"name": "sex", "words": ["f", "m"]}]}


def table(shift: float = 0.0, men: float = 0.5, n: int = 400) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Columns age (standardised), whether it is missing, sex as two columns."""
    rng = np.random.default_rng([n, int(10 * shift), int(10 * men)])
    man = rng.random(n) < men
    return np.stack([rng.normal(shift, 1, n), np.zeros(n), ~man, man], 1).astype(np.float32), rng.integers(0, 2, n)


def told(scenario: Scenario, clusters: list[int]) -> dict[str, str]:
    with federation(scenario) as fed:
        fed.begin(1)
        found = what_differs(fed, scenario, clusters)
    return {one["who"]: text for one, text in zip(found, in_words({"what_differs": found}), strict=True)}


def test_the_columns_that_were_shifted_are_named_in_their_own_units() -> None:
    sites = {"a": table(), "b": table(), "c": table(1.3, 0.9), "d": table(1.3, 0.9)}
    scenario = replace(from_arrays(sites), encoding={"kind": "table", "label": "y", **COLUMNS})
    found = told(scenario, [0, 0, 1, 1])
    assert "column 'age' is higher: 63 against 50" in found["cluster 1"] and "'m' is more frequent: 89% against 50%" in found["cluster 1"]
    assert "'f'" not in found["cluster 1"], "a column is named once"
    assert "column 'age' is lower: 50 against 63" in found["cluster 0"] and "missing" not in found["cluster 1"]
    one = told(replace(scenario, sites=scenario.sites[:3]), [0, 0, 0])
    assert list(one) == ["c"], "with one group, the site that stands out is named, and no other for its sake"


def test_nothing_is_named_where_nothing_differs() -> None:
    names = [f"site-{i}" for i in range(6)]
    alike = from_arrays({name: (np.random.default_rng(i).normal(size=(200, 300)), np.arange(200) % 2) for i, name in enumerate(names)})
    assert told(alike, [0] * 6) == {}
    both = told(alike, [0, 0, 0, 1, 1, 1])
    assert len(both) == 2 and all("labels" in text for text in both.values())


def test_numbers_to_predict_have_no_classes() -> None:
    alike = [{"who": "cluster 0", "members": ["a", "b"], "found": []}]
    (classes,), (numbers,) = (in_words({"what_differs": alike, metric: {}}) for metric in ("accuracy", "r2"))
    assert "class" in classes and "class" not in numbers and "labels" not in numbers


def test_images_are_told_apart_by_brightness_and_by_how_they_are_turned() -> None:
    x = torch.rand(50, 1, 12, 12, generator=torch.Generator().manual_seed(0)) * 0.1
    x[:, :, 2:4] += 0.8
    shown = (image_features(one).mean(0).tolist() for one in (x, x.rot90(2, (2, 3)), x.transpose(2, 3), 1 - x))
    at, turned, aside, negative = (dict(zip(IMAGE_FEATURES, values, strict=True)) for values in shown)
    assert at["low"] < -0.3 and turned["low"] > 0.3 and at["upright"] < 0.3 < 0.7 < aside["upright"]
    assert negative["brightness"] == pytest.approx(1 - at["brightness"]) and negative["low"] == pytest.approx(at["low"], abs=1e-4)


def test_a_grey_scanner_among_coloured_photos_has_less_colour() -> None:
    photos = np.random.default_rng(0).integers(0, 256, (120, 12, 12, 3)).astype(np.uint8)
    photos[..., 2] //= 2
    grey = np.repeat(photos[:60].mean(-1, keepdims=True).astype(np.uint8), 3, axis=-1)
    found = told(from_arrays({"a": (grey, np.arange(60) % 2), "b": (photos[60:], np.arange(60) % 2)}), [0, 1])
    assert "less colour: 0%" in found["cluster 0"] and "blue" not in found["cluster 0"], "grey images have no tint"


def test_the_group_with_more_edges_of_a_kind_has_the_larger_share() -> None:
    level = np.random.default_rng(0).integers(0, 25, (60, 12, 12)).astype(np.uint8)
    level[:, 2:4] += 200
    found = told(from_arrays({"a": (level, np.arange(60) % 2), "b": (level.swapaxes(1, 2), np.arange(60) % 2)}), [0, 1])
    said = [part for text in found.values() for part in text.split("; ") if "edges" in part]
    shares = {part: [int(share) for share in re.findall(r"(\d+)%", part)] for part in said}
    assert len(said) == 2 and all((here > there) == ("more" in part) for part, (here, there) in shares.items())


def test_a_local_run_says_and_draws_it_and_one_with_noise_does_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def images(high: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        y = rng.integers(0, 2, 60)
        return (rng.integers(0, 60, (60, 8, 8)) + high * y[:, None, None] // 2 + high).astype(np.uint8), y

    scenario = from_arrays({"a": images(20), "b": images(20), "c": images(150)})
    quick = override(Config(scenario=Choice(IN_MEMORY)), {"run.rounds": 1, "training.local_epochs": 1, "personalize.mode": "off"})
    result = run(quick, tmp_path / "run", scenario=scenario)
    assert "brighter" in " ".join(in_words(result.summary)) and (tmp_path / "run/what-differs-0.png").is_file()
    page = render(tmp_path / "run")
    assert "brighter" in page and "data:image/png;base64," in page
    noisy = override(quick, {"privacy.epsilon": 64.0})
    assert not plan(noisy, scenario).says_what_differs and plan(quick, scenario).says_what_differs
    assert not plan(override(quick, {"run.what_differs": False}), scenario).says_what_differs
    assert not plan(Config(scenario=Choice("tiny")), tiny()).says_what_differs


def test_a_client_with_noise_or_few_samples_does_not_answer() -> None:
    one = client()
    assert profile(one, classes=3)["n"] == len(one.site.train)
    one.most_epsilon = 8.0
    with pytest.raises(ClientError, match="noise"):
        profile(one, classes=3)
    one.most_epsilon = None
    one.site = replace(one.site, train=Split(one.site.train.x[:4], one.site.train.y[:4]))
    with pytest.raises(ClientError, match="4 training samples"):
        profile(one, classes=3)
