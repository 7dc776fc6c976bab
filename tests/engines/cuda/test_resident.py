from __future__ import annotations

import logging

import pytest
import torch

from emdcfl.engines.cuda.resident import ModelCache


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> ModelCache:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    return ModelCache(torch.device("meta"))


def test_tensors_are_moved_wherever_they_are_in_a_request(models: ModelCache) -> None:
    common, inputs = models.moved(({"a": torch.zeros(3), "b": {"c": torch.ones(2)}, "d": 4, "e": [1]}, {"site": {"f": torch.ones(1)}}))
    assert {t.device.type for t in (common["a"], common["b"]["c"], inputs["site"]["f"])} == {"meta"}
    assert (common["d"], common["e"]) == (4, [1])


def test_what_was_moved_is_not_moved_again_until_it_changes_or_all_is_cleared(models: ModelCache) -> None:
    state = torch.zeros(12)
    first = models.moved(state[:8])
    assert models.moved(state[:8]) is first  # another view of the same memory
    assert models.moved(state[:8].view(2, 4)).shape == (2, 4)
    assert models.moved(state).shape == (12,)
    state += 1
    second = models.moved(state[:8])
    assert second is not first
    models.clear()
    assert models.moved(state[:8]) is not second


def test_what_there_is_no_room_for_stays_and_one_line_says_so(models: ModelCache, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "emdcfl")
    large = torch.zeros(200)
    assert models.moved({"x": large})["x"] is large
    assert "stay in host memory" in caplog.text


def test_what_is_there_already_is_not_copied(models: ModelCache) -> None:
    there = torch.zeros(3, device="meta")
    assert models.moved((there, torch.ones(2)))[0] is there
