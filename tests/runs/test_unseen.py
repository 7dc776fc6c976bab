"""Sites held out of training: they change nothing, are placed without labels, and are tested with their group's model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from tests import tiny
from tests.methods.toy import CLASSES, FEATURES
from torch import nn
from typer.testing import CliRunner

import emdcfl
import emdcfl.cli.use  # registers the command
from emdcfl.cli.app import app
from emdcfl.cli.show import show_result
from emdcfl.core.errors import ConfigError, DataError
from emdcfl.core.units import percent
from emdcfl.data import scenarios
from emdcfl.data.own.site import read_unlabelled
from emdcfl.data.types import Scenario, Site, Split
from emdcfl.report.page import render
from emdcfl.runs.config import Config, RunConfig, loads, override
from emdcfl.runs.new_sites.nearest import NearestCluster, mixture, relative, unlabelled
from emdcfl.runs.new_sites.unseen import mean_scores, unseen_sentence
from emdcfl.runs.plan import plan
from emdcfl.runs.runner import run
from emdcfl.runs.served import ModelInfo, Served
from emdcfl.runs.verdict.baselines import run_baselines
from emdcfl.runs.watching.progress import Live
from emdcfl.runs.watching.trackers import Tracking
from emdcfl.studies.compare import compare, configs, folds_of, parse_methods
from emdcfl.studies.results import checked, read_results
from emdcfl.studies.table_files import write_tables
from emdcfl.studies.tables import build, unseen_rows

HELD = ("site-1", "site-4")


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return scenarios.build("tiny", clients_per_group=3)


@pytest.fixture(scope="module")
def result(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> emdcfl.Result:
    return emdcfl.fit(scenario, method="oracle", rounds=3, hold_out=HELD, out=tmp_path_factory.mktemp("runs") / "one")


def test_held_out_sites_do_not_take_part(scenario: Scenario, result: emdcfl.Result) -> None:
    assert result.clients == ("site-0", "site-2", "site-3", "site-5")
    less = replace(
        scenario,
        sites=tuple(s for s in scenario.sites if s.name not in HELD),
        groups={name: g for name, g in (scenario.groups or {}).items() if name not in HELD},
    )
    assert torch.equal(emdcfl.fit(less, method="oracle", rounds=3).serving.models, result.serving.models)


def test_classes_that_no_site_trained_on_are_named() -> None:
    """No model can predict them, so the low accuracy does not tell how well the site was placed."""
    rng = np.random.default_rng(0)
    sites = {name: (rng.normal(size=(40, 3)).astype("float32"), np.arange(40) % 2 + (name == "c")) for name in "abc"}
    runs = (emdcfl.fit(sites, method="fedavg", rounds=1, local_epochs=1, hold_out=site) for site in "cb")
    (note,), none = ([note for note in run.summary["notes"] if "held-out" in note] for run in runs)
    assert "4 of 8 test samples" in note and "'c'" in note and "('2')" in note and none == []


def test_each_is_placed_with_its_true_group_and_tested(result: emdcfl.Result) -> None:
    unseen = result.summary["unseen"]
    assert [(one["site"], one["group"], one["alike"]) for one in unseen["sites"]] == [
        ("site-1", "group-0", 1.0),
        ("site-4", "group-1", 1.0),
    ]
    clusters = result.clusters
    assert [one["cluster"] for one in unseen["sites"]] == [clusters["site-0"], clusters["site-3"]]
    for one in unseen["sites"]:
        accuracy = one["accuracy"]
        assert accuracy["worst"] <= accuracy["placed"] <= accuracy["best"]
        own = result.model_of("site-0" if one["site"] == "site-1" else "site-3")
        data = next(s for s in (result.scenario or pytest.fail("no data")).sites if s.name == one["site"]).tests["test"]
        assert accuracy["placed"] == pytest.approx(float((own.probabilities(data.x).argmax(1) == data.y).double().mean()))
    assert unseen["accuracy"] == mean_scores(unseen["sites"])
    assert "2 sites held out" in unseen_sentence(unseen)


def test_one_model_for_all_is_that_of_the_run_not_of_the_last_one(scenario: Scenario) -> None:
    for width in (8, 4):  # two functions of one name

        def network(width: int = width) -> nn.Module:
            return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))

        found = emdcfl.fit(scenario, network, method="oracle", rounds=1, hold_out=HELD)
        assert all(site["accuracy"]["one"] is not None for site in found.summary["unseen"]["sites"])


def test_members_without_validation_data_do_not_end_a_finished_run(scenario: Scenario) -> None:
    sites = tuple(replace(site, val=Split(site.val.x[:0], site.val.y[:0])) for site in scenario.sites)
    unseen = emdcfl.fit(replace(scenario, sites=sites), method="oracle", rounds=3, hold_out=HELD).summary["unseen"]
    assert [one["alike"] for one in unseen["sites"]] == [1.0, 1.0]


def test_no_group_is_the_right_one_of_a_site_whose_group_did_not_train(scenario: Scenario) -> None:
    groups = {"site-1": "elsewhere", **{s.name: "here" for s in scenario.sites if s.name != "site-1"}}
    unseen = emdcfl.fit(replace(scenario, groups=groups), method="oracle", rounds=1, hold_out=HELD).summary["unseen"]
    assert [one["alike"] for one in unseen["sites"]] == [None, 1.0]


def test_it_is_stored_with_one_model_for_all_and_shown(result: emdcfl.Result) -> None:
    loaded = emdcfl.load(result.folder)
    assert loaded.summary["unseen"] == result.summary["unseen"]
    assert loaded.config.run.hold_out == HELD
    one = emdcfl.load(result.folder / "baselines" / "fedavg").summary
    assert one["unseen"]["accuracy"]["one"] == result.summary["unseen"]["accuracy"]["one"]
    assert one["unseen"]["accuracy"]["placed"] is None
    assert "Sites held out of training" in render(result.folder)


def test_baselines_find_that_model_again(result: emdcfl.Result) -> None:
    state = result.folder / "baselines" / "fedavg" / "metrics.jsonl"
    before = state.stat().st_mtime_ns
    found = run_baselines(result)
    assert state.stat().st_mtime_ns == before  # it was finished already
    assert found["local"].clients == result.clients


def test_a_finished_run_that_is_resumed_trains_no_model_for_all_again(scenario: Scenario, tmp_path: Path) -> None:
    asked = {"clients": scenario, "method": "oracle", "rounds": 1, "hold_out": HELD, "out": tmp_path / "run"}
    first = emdcfl.fit(**asked)
    run_baselines(first)
    again = emdcfl.fit(**asked, resume=True)
    assert again.summary["unseen"] == json.loads((tmp_path / "run" / "summary.json").read_text())["unseen"] == first.summary["unseen"]
    assert not list((tmp_path / "run" / "baselines" / "fedavg").glob("models/*"))


def test_labels_of_a_held_out_site_are_not_used(scenario: Scenario, result: emdcfl.Result) -> None:
    def spoiled(site: Site) -> Site:
        return Site(site.name, *(Split(s.x, (s.y + 1) % 2) for s in (site.train, site.val)), site.tests)

    other = replace(scenario, sites=tuple(spoiled(s) if s.name in HELD else s for s in scenario.sites))
    assert emdcfl.fit(other, method="oracle", rounds=3, hold_out=HELD).summary["unseen"] == result.summary["unseen"]
    assert int(unlabelled(scenario.sites[0]).train.y.sum()) == 0


def test_a_site_without_labels_is_placed_from_python(result: emdcfl.Result, scenario: Scenario) -> None:
    x = scenario.sites[4].train.x.numpy()
    found = result.place_unlabelled(x, name="more")
    assert found.cluster == (result.clusters or {})["site-3"]
    assert found.candidates[0][2].misfit < found.candidates[1][2].misfit and "tensor" not in repr(found)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["cluster"] == found.cluster
    with pytest.raises(DataError, match="already"):
        result.place_unlabelled(x, name="site-0")
    with pytest.raises(DataError, match="expected samples of shape"):
        result.place_unlabelled(np.zeros((4, 1)))
    with pytest.raises(DataError, match="samples of nobody .* got none"):
        result.place_unlabelled(x[:0], name="nobody")


def test_the_command_reads_a_table_without_labels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c", "d", "new"):
        sign = -1 if name in "cd" else 1
        x = rng.normal(size=(150, 4)) + 2 * sign
        rows = ["p,q,r,s" + ("" if name == "new" else ",label")]
        rows += [",".join(f"{v:.4f}" for v in row) + ("" if name == "new" else f",{int(sign * row[0] > 2)}") for row in x]
        place = tmp_path / ("new.csv" if name == "new" else f"sites/{name}.csv")
        place.parent.mkdir(exist_ok=True)
        place.write_text("\n".join(rows) + "\n")
    out = str(tmp_path / "run")
    done = emdcfl.fit(tmp_path / "sites", rounds=1, out=out)
    answer = CliRunner().invoke(app, ["place", "--unlabelled", out, str(tmp_path / "new.csv"), "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.output)["cluster"] == (done.clusters or {})["a"]
    rows = [str(tmp_path / "new.csv"), "--json"]
    answer = CliRunner().invoke(app, ["predict", out, "--new-site", *rows])
    shown = torch.tensor([list(row["probabilities"].values()) for row in json.loads(answer.output)])
    x = read_unlabelled(tmp_path / "new.csv", encoding=done.about.encoding)
    assert torch.equal(shown, done.place_unlabelled(tmp_path / "new.csv").model.probabilities(x))
    for whose in ([], ["--new-site", "--client", "a"]):
        answer = CliRunner().invoke(app, ["predict", out, *whose, *rows])
        assert isinstance(answer.exception, ConfigError) and "expected --client or --new-site" in str(answer.exception)


def test_methods_without_clusters_place_nobody(scenario: Scenario) -> None:
    assert "unseen" not in emdcfl.fit(scenario, method="local", rounds=1, hold_out=HELD).summary
    alone = emdcfl.fit(scenario, method="fedavg", rounds=1, hold_out=HELD)
    assert alone.summary["unseen"]["sites"][0]["cluster"] is None
    with pytest.raises(ConfigError, match="no clusters"):
        alone.place_unlabelled(scenario.sites[0].train.x.numpy())


@pytest.mark.parametrize(
    ("hold_out", "engine", "message"),
    [
        (["site-9"], "auto", "no site 'site-9'"),
        (["site-0", "site-1", "site-2"], "auto", "at least two sites to train with, got 1"),
        (["site-0"], "flower", "on one machine"),
    ],
)
def test_sites_that_cannot_be_held_out(hold_out: list[str], engine: str, message: str) -> None:
    config = override(tiny.config(), {"run.hold_out": hold_out, "engine.name": engine})
    with pytest.raises(ConfigError, match=message):
        plan(config)


def test_the_key_is_checked_and_left_out_by_default() -> None:
    assert loads('[run]\nhold_out = ["a"]\n').run.hold_out == ("a",)
    for wrong in ("[]", '["a", "a"]'):
        with pytest.raises(ConfigError, match="a list of different sites"):
            loads(f"[run]\nhold_out = {wrong}\n")
    assert plan(tiny.config()).held == ()


def test_leave_one_out_tests_every_site_once(tmp_path: Path) -> None:
    base = replace(Config(scenario=tiny.config().scenario), run=RunConfig(rounds=1))
    assert [fold.run.hold_out for fold in folds_of(base, 2)] == [("site-0", "site-1"), ("site-2", "site-3")]
    assert len(folds_of(base, None)) == 4
    with pytest.raises(ConfigError, match="expected 2 to 4"):
        folds_of(base, 5)
    wanted = [one for fold in folds_of(base, None) for one in configs(fold, parse_methods("oracle"), [0])]
    outcome = compare(wanted, tmp_path)
    assert (outcome.ran, outcome.failed) == (4, [])
    rows = read_results(tmp_path)
    assert len(list(checked(rows, "here"))) == 4
    (row,) = unseen_rows(rows)
    assert (row["tested"], row["right"]) == (4, 1.0)
    assert row["worst"] <= row["placed"] <= row["best"]
    assert build(rows).columns == ()  # what was trained without a site is no result of the whole scenario
    write_tables(rows, tmp_path)
    assert "| tiny | Oracle | 4 |" in (tmp_path / "unseen.md").read_text()
    assert "Sites held out of training" in render(tmp_path)


def test_misfits_add_what_each_measure_says(scenario: Scenario) -> None:
    near = relative({0: (0.1, 0.02, 0.5, 1.0), 1: (0.3, 0.2, 1.5, 3.0)}, {0: 1, 1: 1})
    assert near[0].misfit == pytest.approx(0.02 / 0.2 + 0.5)
    assert near[1].misfit == pytest.approx(0.2 / 0.2 + 1.5)
    assert relative({}, {}) == {}
    assert [near[k].weight for k in near] == [1.0, 0.0]  # the other is clearly farther
    model = Served(ModelInfo.of(scenario), torch.zeros(1, 1), (1.0,))
    doubted = [NearestCluster("new", [(k, ["a"], near[k])], model).verdict() for k in near]
    assert ["3.0 times as unsure" in said for said in doubted] == [False, True]


def test_distances_decide_where_all_models_are_sure_of_a_site() -> None:
    """Here the larger group's model is the surest, and right for a tenth of the samples: digits that are turned for it."""
    near = relative({0: (0.42, 0.35, 0.04, 0.8), 1: (0.06, 0.03, 0.15, 3.1)}, {0: 3, 1: 1})
    assert near[1].misfit < near[0].misfit and near[1].weight > 0.8


def test_groups_that_are_as_near_predict_together_and_larger_ones_count_more() -> None:
    as_near = (0.2, 0.1, 0.5, 1.0)
    near = relative({0: as_near, 1: as_near, 2: (2.0, 1.9, 0.5, 1.0)}, {0: 1, 1: 3, 2: 9})
    assert [near[k].weight for k in near] == pytest.approx([0.25, 0.75, 0.0], abs=1e-12)
    models, weights = mixture({k: (torch.full((2,), float(k)), ["a"]) for k in near}, near)
    assert models.tolist() == [[0.0, 0.0], [1.0, 1.0]] and weights.tolist() == pytest.approx([0.25, 0.75])


def test_a_site_between_two_groups_is_tested_with_both(scenario: Scenario) -> None:
    """Two clusters with the same members' law: neither is clearly nearer, and both predict."""
    halves = {"site-0": "x", "site-2": "y", "site-1": "x", "site-3": "y"}
    sites = tuple(site for name, site in named(scenario) if name in ("site-0", "site-1", "site-2"))
    twice = (*sites, replace(sites[2], name="site-3"))
    result = emdcfl.fit(replace(scenario, sites=twice, groups=halves), method="oracle", rounds=1, hold_out=["site-1"])
    (one,) = result.summary["unseen"]["sites"]
    assert 0 < one["alike"] < 1
    found = result.place_unlabelled(np.concatenate([sites[1].train.x, sites[1].val.x]))
    assert one["alike"] == pytest.approx(sum(fit.weight for _, members, fit in found.candidates if "site-0" in members), abs=1e-6)
    data = sites[1].tests["test"]
    assert one["accuracy"]["placed"] == pytest.approx(float((found.model.probabilities(data.x).argmax(1) == data.y).double().mean()))
    each = [fit.weight * result.model_of(members[0]).probabilities(data.x) for _, members, fit in found.candidates]
    assert torch.allclose(found.model.probabilities(data.x), sum(each, torch.zeros(())))
    assert "2 models predict together" in found.verdict()


def test_a_site_without_test_samples_does_not_count_as_one_that_is_always_wrong(scenario: Scenario, tmp_path: Path) -> None:
    silent = ("site-1", "site-2")
    empty = {
        name: replace(site, tests={"test": Split(site.tests["test"].x[:0], site.tests["test"].y[:0])}) for name, site in named(scenario)
    }
    less = replace(scenario, sites=tuple(empty[name] if name in silent else site for name, site in named(scenario)))
    seen: dict[int, dict[str, float]] = {}
    tracker = Tracking(SimpleNamespace(log=lambda step, values: seen.update({step: dict(values)}), close=lambda: None))
    settings = {"run.rounds": 1, "run.hold_out": ["site-1"], "method": "oracle", "personalize.mode": "on", "personalize.epochs": 1}
    out = tmp_path / "run"
    result = run(plan(override(tiny.config(), settings), less), out, observer=Live(console := Console(record=True, width=200)))
    run(plan(override(tiny.config(), settings), less), observer=tracker)
    own = result.summary["accuracy"]
    assert "site-2" not in {**result.plain.clients, **result.personalized.clients}
    assert emdcfl.Result.of(result).accuracies()["accuracy"].isna().tolist() == [name == "site-2" for name in result.clients]
    assert seen[1]["test/worst"] == own["worst"] > 0 and seen[1]["test/mean"] == pytest.approx(own["mean"])
    show_result(console, result.summary, result.history, out)
    assert f"worst {percent(own['worst'])}" in (said := console.export_text()) and " 0.0%" not in said
    unseen = result.summary["unseen"]
    assert set(unseen["accuracy"].values()) == set(unseen["sites"][0]["accuracy"].values()) == {None}


def named(scenario: Scenario) -> list[tuple[str, Site]]:
    return [(site.name, site) for site in scenario.sites]
