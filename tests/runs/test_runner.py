from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.e2e.shell import ROOT, SOURCES
from tests.tiny import Stop, StopAfter, config, contents, tiny

from emdcfl.core.errors import ClientError, ConfigError, StoreError
from emdcfl.data.types import Scenario
from emdcfl.runs import plan as plans
from emdcfl.runs import runner
from emdcfl.runs.config import Choice, Config, EngineConfig, TrainingConfig, load
from emdcfl.runs.plan import plan
from emdcfl.runs.runner import run
from emdcfl.runs.store import RunStore

pytestmark = pytest.mark.usefixtures("sketches")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    run(config(), out)
    return out


@pytest.mark.slow
def test_a_run_leaves_what_the_documents_promise(finished: Path) -> None:
    files = {p.relative_to(finished).as_posix() for p in finished.rglob("*") if p.is_file()}
    expected = {"config.toml", "metrics.jsonl", "summary.json", "distances.npz", "heatmap.png", "models/cluster-0.safetensors"}
    assert expected | {"models/cluster-1.safetensors", "models/index.json"} <= files
    summary = json.loads((finished / "summary.json").read_text())
    assert (summary["method"], summary["scenario"], summary["seed"], summary["k"]) == ("emdcfl", "tiny", 0, 2)
    assert summary["clusters"] == [0, 0, 1, 1] and summary["ari"] == 1.0 and summary["finished"] is True
    assert 0.25 < summary["accuracy"]["worst"] <= summary["accuracy"]["mean"] <= 1.0
    assert set(summary["seconds"]) == {"train", "embed", "transport", "evaluate", "total"}
    parts = sum(v for k, v in summary["seconds"].items() if k != "total")
    assert summary["seconds"]["transport"] > 0 and parts <= summary["seconds"]["total"] + 0.01
    assert {"emdcfl", "torch", "numpy", "python", "POT"} <= set(summary["versions"])
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [(r["round"], r["client"]) for r in rows] == [(t, f"site-{i}") for t in (1, 2, 3) for i in range(4)]
    last = [r["accuracy"]["test"] for r in rows if r["round"] == 3]
    assert summary["accuracy"]["mean"] == pytest.approx(np.mean(last)) and summary["accuracy"]["worst"] == min(last)
    assert all(r["train_loss"] > 0 for r in rows)
    with np.load(finished / "distances.npz") as d:
        assert d["W"].shape == (4, 4) and d["tau"].shape == (4,)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    torch.rand(5)
    run(config(), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(finished)
    run(config(seed=1), tmp_path / "other")
    other, first = contents(tmp_path / "other"), contents(finished)
    assert other["models/cluster-0.safetensors"] != first["models/cluster-0.safetensors"]


@pytest.mark.slow
def test_the_written_config_is_complete_and_runs_again(finished: Path, tmp_path: Path) -> None:
    raw = tomllib.loads((finished / "config.toml").read_text())
    assert raw["training"] == {"local_epochs": 2, "batch_size": 16, "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-6}
    assert raw["run"]["rounds"] == 3 and raw["model"]["name"] == "mlp" and raw["method"]["tolerance"] == 0.08
    assert raw["engine"]["device"] in ("cpu", "cuda")
    run(load(finished / "config.toml"), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(finished)


def test_emdcfl_and_oracle_write_the_same_models(finished: Path, tmp_path: Path) -> None:
    run(config(method="oracle"), tmp_path / "oracle")
    ours, oracle = contents(finished), contents(tmp_path / "oracle")
    models = [name for name in ours if name.startswith("models/")]
    assert len(models) == 3 and all(ours[name] == oracle[name] for name in models)


def test_methods_without_clusters_say_so(tmp_path: Path) -> None:
    average = run(config(method="fedavg", rounds=1), tmp_path / "fedavg").summary
    assert average["clusters"] is None and average["ari"] is None and average["k"] == 1
    assert not (tmp_path / "fedavg" / "heatmap.png").exists()
    run(config(method="local", rounds=1), tmp_path / "local")
    assert sorted(p.name for p in (tmp_path / "local" / "models").glob("client-*")) == [f"client-site-{i}.safetensors" for i in range(4)]


def test_a_run_may_be_evaluated_rarely_but_always_at_the_end(tmp_path: Path) -> None:
    chosen = config(method="fedavg", rounds=3)
    run(replace(chosen, run=replace(chosen.run, evaluate_every=2)), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sorted({r["round"] for r in rows}) == [2, 3]


# --- resuming ---


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_an_interrupted_run_goes_on(finished: Path, tmp_path: Path, rounds: int) -> None:
    out = tmp_path / "run"
    with pytest.raises(Stop):
        run(config(), out, observer=StopAfter(rounds))
    with pytest.raises(StoreError, match="already holds this run; add --resume"):
        run(config(), out)
    run(config(), out, resume=True)
    assert contents(out) == contents(finished)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_more_workers(tmp_path: Path) -> None:
    one, two = (replace(config(), engine=EngineConfig("sequential", workers=n)) for n in (1, 2))
    run(one, tmp_path / "undisturbed")
    with pytest.raises(Stop):
        run(one, tmp_path / "run", observer=StopAfter(1))
    result = run(two, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "undisturbed") and result.config.engine.workers == 1


def test_a_finished_run_is_written_again_from_its_state(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    for name in ("summary.json", "heatmap.png", "distances.npz", "models/cluster-0.safetensors", "models/index.json"):
        (out / name).unlink()
    summary = run(config(), out, resume=True).summary
    assert contents(out) == contents(finished) and summary["finished"]
    assert summary["seconds"] == json.loads((finished / "summary.json").read_text())["seconds"]


def test_a_finished_run_keeps_the_versions_that_made_it(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = json.loads((shutil.copytree(finished, tmp_path / "run") / "summary.json").read_text())["versions"]
    monkeypatch.setattr(runner, "versions", lambda: {"emdcfl": "a later one"})
    assert run(load(finished / "config.toml"), tmp_path / "run", resume=True).summary["versions"] == before
    (tmp_path / "run" / "summary.json").unlink()
    assert run(load(finished / "config.toml"), tmp_path / "run", resume=True).summary["versions"] == {"emdcfl": "a later one"}


def test_a_truncated_state_goes_back_one_round(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    newest = out / "state" / "round-3.json"
    newest.write_bytes(newest.read_bytes()[:-40])
    run(config(), out, resume=True)  # round 2 is still there
    assert contents(out) == contents(finished)


def test_a_kill_right_after_the_last_commit_leaves_no_older_round_behind(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = os.replace

    def dying(source: Path, target: Path) -> None:
        move(source, target)
        if Path(target).name == "round-3.json":
            raise Stop

    monkeypatch.setattr(os, "replace", dying)
    with pytest.raises(Stop):
        run(config(), tmp_path / "run")
    monkeypatch.undo()
    assert (tmp_path / "run" / "state" / "round-1.json").exists()
    run(config(), tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(finished)


@pytest.mark.slow
def test_kill_nine_at_any_moment_then_resume_gives_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.runs.crash", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **SOURCES}, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    for states, said in zip(("small", "large"), done.stdout.splitlines(), strict=True):
        report = json.loads(said)
        assert report["tried"] == 10 and report["killed"] == 10
        expected = contents(tmp_path / states / "reference")
        assert {"metrics.jsonl", "summary.json", "heatmap.png"} <= expected.keys()
        trials = sorted(p for p in (tmp_path / states).iterdir() if p.is_dir() and p.name != "reference")
        assert len(trials) == 11
        for out in trials:
            assert contents(out) == expected, out


# --- failures ---


def with_sites(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the tiny scenario be built with one thing changed."""
    build = plans.scenarios.build
    monkeypatch.setattr(plans.scenarios, "build", lambda name, **options: change(build(name, **options)))


@pytest.mark.slow
def test_clients_that_fail_are_in_the_summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def poison(scenario: Scenario) -> Scenario:
        bad = scenario.sites[1]
        train = type(bad.train)(bad.train.x * float("nan"), bad.train.y)
        sites = (scenario.sites[0], replace(bad, train=train), *scenario.sites[2:])
        return replace(scenario, sites=sites)

    with_sites(monkeypatch, poison)
    with pytest.raises(ClientError, match=r"client 'site-1' failed in round 1 \(train\): the training loss became nan"):
        run(config(rounds=2), tmp_path / "stop")
    lenient = replace(config(rounds=2), engine=EngineConfig(on_failure="continue"))
    summary = run(lenient, tmp_path / "continue").summary
    assert [(f["client"], f["round"], f["task"]) for f in summary["failures"]] == [("site-1", 1, "train"), ("site-1", 2, "train")]
    assert summary["clusters"] == [0, 1, 2, 2] and len(summary["accuracy"]["variants"]) == 1


def test_sites_without_test_samples_do_not_count_as_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def untested(scenario: Scenario) -> Scenario:
        site = scenario.sites[0]
        empty = type(site.val)(site.val.x[:0], site.val.y[:0])
        return replace(scenario, sites=(replace(site, tests={"test": empty}), *scenario.sites[1:]))

    with_sites(monkeypatch, untested)
    summary = run(config(rounds=1), tmp_path / "run").summary
    rows = RunStore.read(tmp_path / "run").read_metrics()
    assert summary["accuracy"]["worst"] == min(r["accuracy"]["test"] for r in rows[1:]) > 0


# --- plans ---


def test_a_plan_fills_in_the_scenarios_defaults_and_flags_win() -> None:
    filled = plan(config(rounds=7))
    assert filled.training.lr == 0.05 and filled.config.run.rounds == 7
    faster = plan(replace(config(), training=TrainingConfig(lr=0.5, local_epochs=1)))
    assert (faster.training.lr, faster.training.local_epochs, faster.training.batch_size) == (0.5, 1, 16)
    assert plan(Config(scenario=Choice("tiny"))).config.run.rounds == 3
    over_flower = plan(replace(config(), engine=EngineConfig(name="flower")))
    assert (filled.config.engine.on_failure, over_flower.config.engine.on_failure) == ("stop", "continue")
    again = plan(filled.config)
    assert again.config == filled.config and again.method == filled.method


def test_a_model_takes_what_it_can_from_the_scenario() -> None:
    chosen = plan(replace(config(), model=Choice("mlp", {"hidden": [5]})))
    assert dict(chosen.scenario.model.options) == {"features": 8, "classes": 4, "hidden": [5]}
    other = plan(Config(scenario=Choice("rotated-digits"), model=Choice("mlp")))  # its own network is for images and knows no features
    assert dict(other.scenario.model.options) == {"features": 64, "classes": 10}
    with pytest.raises(ConfigError, match=r"unknown model 'mpl': did you mean 'mlp'"):
        plan(replace(config(), model=Choice("mpl")))
    with pytest.raises(ConfigError, match=r"model has no key 'hiden': did you mean 'hidden'"):
        plan(replace(config(), model=Choice("mlp", {"hiden": [5]})))


def test_a_preset_wins_over_a_scenarios_defaults_and_own_options_over_both() -> None:
    scenario = replace(tiny(), method_defaults={"fedprox": {"mu": 0.5, "prox": "squared"}})
    wanted = replace(config(), method=Choice("fedprox", {"preset": "reference"}))
    assert plan(wanted, scenario).config.method.options == {"mu": 0.5, "prox": "layer_norm"}
    own = replace(config(), method=Choice("fedprox", {"preset": "reference", "prox": "squared"}))
    assert plan(own, scenario).config.method.options == {"mu": 0.5, "prox": "squared"}


def test_the_reference_preset_is_written_out() -> None:
    options = plan(config(preset="reference")).config.method.options
    assert options["recompute"] == "if-partial" and "preset" not in options
