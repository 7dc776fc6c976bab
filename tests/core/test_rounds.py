"""Bytes of a run: what the formulas say, and what a real run counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import tests.tiny
import torch

from emdcfl.core.client import Divisible
from emdcfl.core.rounds import Traffic, payload
from emdcfl.runs import runner
from emdcfl.runs.config import Choice
from emdcfl.runs.plan import plan


def test_tensors_count_wherever_they_are() -> None:
    assert payload([torch.zeros(3), {"a": (torch.zeros(2, dtype=torch.int64),)}, "text", 5, None]) == 12 + 16


def test_what_all_share_is_sent_to_each_and_items_to_those_who_name_them() -> None:
    traffic = Traffic()
    common = {"models": torch.zeros(5), "omegas": {"a": torch.zeros(10), "b": torch.zeros(20)}, "split": "val"}
    traffic.sent("embed", {"a": {"rows": ["b"]}, "b": {"rows": []}}, common, Divisible("rows", ("omegas",)))
    assert traffic.bytes == {"embed": {"to_clients": 2 * 20 + 80, "to_server": 0}}
    traffic.sent("embed", {"c": {"theta": torch.zeros(1)}}, common)
    assert traffic.bytes["embed"]["to_clients"] == 120 + 4 + 20 + 120
    traffic.received("embed", {"samples": {"a": torch.zeros(2, 2)}})
    assert traffic.bytes["embed"]["to_server"] == 16


def test_a_run_counts_models_up_and_down_in_every_round(tmp_path: Path) -> None:
    config = replace(tests.tiny.config(rounds=3), method=Choice("fedavg"))
    summary = runner.run(config, tmp_path).summary
    with plan(config).federation() as fed:
        theta, clients = 4 * fed.layout.size, len(fed.clients)
    trained = summary["bytes"]["train"]
    assert trained["to_server"] == 3 * clients * theta
    assert trained["to_clients"] == 3 * clients * theta
    assert summary["bytes"]["evaluate"]["to_clients"] >= 3 * clients * theta  # the model served, to be tested
    assert "embed" not in summary["bytes"]
