"""The bound on what merging clusters costs, on a finished run."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from emdcfl.core.errors import DataError
from emdcfl.paper import merging, theory
from emdcfl.paper.merging import merging_costs, merging_line, write_merging, write_quick_merging
from emdcfl.report import write_report
from emdcfl.runs import runner
from emdcfl.runs.config import Choice, Config, RunConfig, TrainingConfig
from emdcfl.runs.result import Result, load

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


@pytest.mark.slow
def test_every_pair_of_clusters_respects_its_bound(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "SAMPLES", 96)
    threads, fit_head = set(), theory.fit_head

    def fit(*given: Any, **options: Any) -> theory.Head:
        threads.update(lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas")
        return fit_head(*given, **options)

    monkeypatch.setattr(theory, "fit_head", fit)
    with threadpool_limits(2, user_api="blas"):
        costs = merging_costs(load(run))
    assert threads == {1}  # several wait for each other
    assert {pair.clusters for pair in costs} == {(0, 1), (0, 2), (1, 2)}
    for pair in costs:
        assert pair.cost.merged.holds
        assert 0 < pair.cost.did <= pair.cost.at_most
        assert pair.as_dict()["sentence"].startswith(f"merging cluster {pair.clusters[0]} and cluster {pair.clusters[1]} could raise")
    distances = [pair.cost.distance for pair in costs]
    assert distances == sorted(distances)


@pytest.mark.slow
def test_line_for_the_report(run: Path, tmp_path: Path) -> None:
    assert merging_line(run) is None
    write_merging(load(run))
    line = merging_line(run)
    assert "at most" in line and "W1 =" in line
    page = write_report(run, tmp_path / "report.html").read_text(encoding="utf-8")
    assert line in page
    runner.run(replace(CONFIG, method=Choice("fedavg")), tmp_path / "fedavg")
    write_merging(load(tmp_path / "fedavg"))
    assert merging_line(tmp_path / "fedavg") is None


@pytest.mark.slow
def test_quick_ones_are_evaluated_without_being_asked_for(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    (copied / merging.FILE).unlink(missing_ok=True)
    monkeypatch.setattr(merging, "QUICK_CLUSTERS", 2)  # the run has three
    write_quick_merging(load(copied))
    assert merging_line(copied) is None
    monkeypatch.setattr(merging, "QUICK_CLUSTERS", 3)
    write_quick_merging(load(copied))
    assert merging_line(copied) is not None
    again: list[Result] = []
    monkeypatch.setattr(merging, "write_merging", again.append)
    write_quick_merging(load(copied))
    assert not again
    later = (copied / merging.FILE).stat().st_mtime_ns + 10**9
    os.utime(copied / "summary.json", ns=(later, later))  # another round was played
    write_quick_merging(load(copied))
    assert [result.folder for result in again] == [copied]


def test_a_report_does_not_fail_for_want_of_the_bounds(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from emdcfl.cli import main

    def missing(_: Result) -> None:
        raise DataError("the mnist data are not here")

    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    (copied / merging.FILE).unlink(missing_ok=True)
    monkeypatch.setattr(merging, "write_merging", missing)
    for arguments, code in (([], 0), (["--no-theory"], 0), (["--theory"], 2)):
        with pytest.raises(SystemExit) as stopped:
            main(["report", str(copied), *arguments])
        assert stopped.value.code == code
    assert (copied / "report.html").exists()
