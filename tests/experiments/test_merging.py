"""The bound on what merging clusters costs, on a finished run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from emdcfl.experiments import runner
from emdcfl.experiments.config import Choice, Config, RunConfig, TrainingConfig
from emdcfl.experiments.merging import merging_costs, merging_line, write_merging
from emdcfl.report import write_report

CONFIG = Config(
    run=RunConfig(rounds=1),
    scenario=Choice("rotated-digits", {"groups": 3, "clients_per_group": 1}),
    method=Choice("oracle"),
    training=TrainingConfig(local_epochs=3),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "oracle"
    runner.run(CONFIG, folder)
    return folder


def test_every_pair_of_clusters_respects_its_bound(run: Path) -> None:
    costs = merging_costs(run, samples=96)
    assert {pair.clusters for pair in costs} == {(0, 1), (0, 2), (1, 2)}
    for pair in costs:
        assert pair.cost.merged.holds
        assert 0 < pair.cost.did <= pair.cost.at_most
        assert pair.as_dict()["sentence"].startswith(f"merging cluster {pair.clusters[0]} and cluster {pair.clusters[1]} could raise")
    distances = [pair.cost.distance for pair in costs]
    assert distances == sorted(distances)
    assert [p.clusters for p in merging_costs(run, samples=32, pairs=[(0, 2)])] == [(0, 2)]


def test_line_for_the_report(run: Path, tmp_path: Path) -> None:
    assert merging_line(run) is None
    write_merging(run)
    line = merging_line(run)
    assert line is not None and "at most" in line and "W1 =" in line
    page = write_report(run, tmp_path / "report.html").read_text(encoding="utf-8")
    assert line in page
    runner.run(replace(CONFIG, method=Choice("fedavg")), tmp_path / "fedavg")
    write_merging(tmp_path / "fedavg")
    assert merging_line(tmp_path / "fedavg") is None
