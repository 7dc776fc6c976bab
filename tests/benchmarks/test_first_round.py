"""Methods that share the trainings of the first round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tests.tiny
from benchmarks.first_round import NOTE, first_round

from emdcfl.core.federation import Federation
from emdcfl.runs.config import override
from emdcfl.studies.compare import execute, parse_methods
from emdcfl.studies.results import read_results

BASE = override(tests.tiny.config(), {"engine.device": "cpu", "engine.name": "sequential"})
METHODS = "emdcfl:tolerance=auto,oracle,fedavg,emdcfl:tolerance=0.025"


def test_rows_are_those_of_runs_of_their_own_and_clients_train_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    plain = Federation.run

    def run(fed: Federation, task: object, inputs: dict[str, object], **options: object) -> object:
        asked.extend(inputs if getattr(task, "__name__", "") == "train" else ())
        return plain(fed, task, inputs, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Federation, "run", run)
    rows = list(first_round(BASE, METHODS, tmp_path))
    assert len(asked) == 4 and len(set(asked)) == 4
    assert list(first_round(BASE, METHODS, tmp_path)) == rows and len(asked) == 4  # what is there is not played again
    assert [row["config"] for row in read_results(tmp_path)] == [row["config"] for row in rows]
    for row, method in zip(rows, parse_methods(METHODS), strict=True):
        alone = execute(override(replace(BASE, method=method), {"run.rounds": 1}))
        same = ("config", "ari", "accuracy", "k", "bytes", "failures")
        assert {k: row[k] for k in same} == {k: alone[k] for k in same}
        assert NOTE in row["notes"]
        assert row["seconds"]["total"] >= row["seconds"]["train"] > 0
    assert Federation.train.__module__ == "emdcfl.core.federation"


def test_a_method_with_trainings_of_its_own_says_nothing_of_shared_ones(tmp_path: Path) -> None:
    fedavg, fedsac = first_round(BASE, "fedavg,fedsac", tmp_path)
    assert NOTE in fedavg["notes"] and NOTE not in fedsac["notes"]
