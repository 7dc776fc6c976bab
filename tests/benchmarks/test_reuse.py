"""Benchmarks that go on where they were stopped: which finished runs are taken again."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.rows import append, key, read

from benchmarks import benefit, precision, privacy, tolerance, trust
from emdcfl.data import scenarios


def test_a_row_after_one_that_a_kill_cut_off_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "new/rows.jsonl"
    assert read(path) == []
    append(path, {"seed": 0})
    with path.open("a") as file:
        file.write('{"seed": 1, "acc')
    assert read(path) == [{"seed": 0}]
    append(path, {"seed": 2, "said": "line\u2028separator"})
    append(path, {"seed": 3})
    assert [row["seed"] for row in read(path)] == [0, 2, 3]


def test_runs_of_other_rounds_or_devices_are_not_taken_for_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []
    monkeypatch.setattr(precision, "play", lambda *wanted: {"run": played.append(wanted)})
    for device, rounds in (("cpu", None), ("cpu", 2), ("cuda", 2), ("cpu", 2)):
        precision.settle(tmp_path, "rotated-digits", "fedavg", 0, "bf16", device, rounds)
    assert [wanted[4:] for wanted in played] == [("cpu", None), ("cpu", 2), ("cuda", 2)]


def test_lines_of_other_epochs_or_precision_are_not_taken_for_finished() -> None:
    scenario = scenarios.build("rotated-digits", groups=2)

    def about(**changed: Any) -> str:
        options: Any = SimpleNamespace(**{"epochs": None, "scale": "small", "precision": "fp32", "alpha": 0.005, **changed})
        return key(tolerance.described("rotated-digits", scenario, options, 2, 0), tolerance.KEY)

    assert len({about(), about(epochs=1), about(precision="bf16"), about(alpha=0.01)}) == 4
    assert about(epochs=scenario.defaults["local_epochs"]) == about()


def test_liars_of_other_options_are_not_taken_for_finished(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"what": "liars", "out": tmp_path / "liars.jsonl", "seeds": "0", "kinds": ["absent"], "policies": ["median"]}
    asked |= dict.fromkeys(trust.OPTIONS)
    ran = []
    for further in ({}, {"rounds": 1}, {"train": 9}, {"precision": "bf16"}, {"tolerance": 0.1}, {}):
        options = SimpleNamespace(**asked | further)
        for job in (jobs := trust.missing(options)):
            append(options.out, trust.described(*job, options))
        ran.append(len(jobs))
    assert ran == [1, 1, 1, 1, 1, 0]


def test_noise_on_another_network_or_of_other_trials_is_not_taken_for_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = replace(scenarios.build("rotated-digits", groups=1, clients_per_group=2), defaults={"local_epochs": 1})
    monkeypatch.setattr(privacy.scenarios, "build", lambda *_, **__: scenario)
    monkeypatch.setattr(privacy, "measured", lambda *_: {"ari_auto": 1.0, "ari_fixed": 1.0})
    monkeypatch.setattr(privacy, "null_line", lambda ratio, epsilon, trials: {"ratio": ratio, "epsilon": epsilon, "trials": trials})

    def rows(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["privacy", "--epsilons", "inf", "--ratios", "0.9", *arguments])
        privacy.main()
        return len(read(tmp_path / "rows.jsonl"))

    of = ["--out", str(tmp_path / "rows.jsonl"), "--scenarios", "any", "--seeds", "0"]
    assert [rows(*of), rows(*of, "--model", "cnn"), rows(*of)] == [1, 2, 2]
    (tmp_path / "rows.jsonl").unlink()
    of = ["--null", str(tmp_path / "rows.jsonl"), "--samples", "512,256"]
    assert [rows(*of, "--trials", "2"), rows(*of, "--trials", "3"), rows(*of, "--trials", "2")] == [1, 2, 2]


def test_sites_that_are_placed_already_are_not_trained_without_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, file, trained = "4 rotations × 3 sites", tmp_path / "placed.jsonl", []
    folds = [held for _, _, held in benefit.left_out(case, 0)]
    for site in chain(*folds[:-1], folds[-1][:1]):
        append(file, {"case": case, "seed": 0, "site": site})

    def stop(found: Any) -> None:
        trained.append([site.name for site in found.scenario.sites])
        raise KeyboardInterrupt

    monkeypatch.setattr(benefit, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        benefit.place(file, [case], [0])
    assert [set(names) for names in trained] == [set(chain(*folds[:-1]))]
