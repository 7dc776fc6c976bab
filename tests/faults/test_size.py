"""How much travels and how long it takes: a model of 45 MB over four nodes, and growth from 4 to 16 nodes. Run by ``make test-faults``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.apps.trial_runs import config, federation, over_flower
from tests.engines.flower.loopback import bytes_of_run

from emdcfl.apps import deployment
from emdcfl.core.params import Network
from emdcfl.models.recipe import ModelRecipe
from emdcfl.runs.config import Config

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not os.environ.get("EMDCFL_FAULTS"), reason="takes many minutes; run 'make test-faults'"),
]


def measure(folder: Path, given: Config, *, nodes: int) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Run over a federation of its own; return outcome, summary, and the seconds of each round."""
    with federation(folder / "federation", nodes=nodes, deadline=1200.0) as there:
        ends: list[float] = []
        begins: list[float] = []

        def watch(event: dict[str, Any]) -> None:
            if event["event"] == "begin":
                begins.append(event["seconds"])
            elif event["event"] == "end":
                ends.append(event["seconds"])

        started = time.monotonic()
        outcome = deployment.submit(there, over_flower(given), folder / "run", watch=watch)
        summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
        print(f"{nodes} nodes, {time.monotonic() - started:.0f} s in all, rounds {[round(e - b, 1) for b, e in zip(begins, ends)]}")
        print(json.dumps(outcome["traffic"]))
        return outcome, summary, [e - b for b, e in zip(begins, ends)]


def test_a_model_of_45_megabytes_over_four_nodes(tmp_path: Path) -> None:
    options = {"features": 64, "classes": 10, "hidden": [3280, 3280, 64]}
    layout = Network(ModelRecipe("mlp", options)).layout
    assert 44e6 < 4 * layout.size < 46e6
    given = config(run={"rounds": 2, "evaluate_every": 2}, model={"name": "mlp", **options}, training={"local_epochs": 1})
    outcome, summary, _ = measure(tmp_path, given, nodes=4)
    assert summary["finished"] and summary["failures"] == []
    expected = bytes_of_run(
        clients=4, parameters=layout.size, embedding=layout.embedding.stop, width=57, train=512, validation=179, rounds=2, tests=1
    )
    sent = sum(entry["sent"] for entry in outcome["traffic"].values())
    received = sum(entry["received"] for entry in outcome["traffic"].values())
    for what, got, formula in (("sent", sent, expected[0]), ("received", received, expected[1])):
        print(f"{what} {got / 1e6:.1f} MB, by the formula {formula / 1e6:.1f} MB")
    assert (sent, received) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("nodes", [4, 8, 16])
def test_growth(tmp_path: Path, nodes: int) -> None:
    tiny = {"name": "mlp", "features": 64, "classes": 10, "hidden": [16]}
    groups = 2 if nodes == 4 else 4
    given = config(
        run={"rounds": 2, "evaluate_every": 2},
        scenario={"groups": groups, "clients_per_group": nodes // groups},
        model=tiny,
        training={"local_epochs": 1},
    )
    _, summary, _ = measure(tmp_path, given, nodes=nodes)
    assert summary["finished"] and summary["failures"] == []
