"""Whose updates a model holds: the same in summary, model files and words, for every method that says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.core.test_federation import Tampering, lost
from tests.methods.toy import toy

from emdcfl.methods import make
from emdcfl.methods.base import Serving
from emdcfl.runs.config import Choice, Config, override
from emdcfl.runs.loop import play
from emdcfl.runs.plan import IN_MEMORY
from emdcfl.runs.runner import run
from emdcfl.runs.scoring import model_names
from emdcfl.runs.store.files import read_tensors
from emdcfl.runs.verdict.advice import all_alone, what_to_do
from emdcfl.runs.verdict.findings import in_brief, sentences
from emdcfl.runs.verdict.structure import structure
from emdcfl.runs.verdict.trained_with import in_words, origins, untrained


def test_the_words_name_neighbours_earlier_members_and_who_only_uses_a_model() -> None:
    reached = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 0]], dtype=torch.bool)
    shares = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 1, 0]])
    serving = Serving(torch.zeros(2, 1), torch.tensor([[1.0, 0], [0, 1], [0, 1], [1, 0]]), reached=reached, shares=shares)
    found = origins(serving, ["aachen", "bonn", "celle", "dresden"], ["cluster-0", "cluster-1"])
    assert found[0]["shares"] == {"aachen": 0.5, "bonn": 0.5}
    first, second = in_words({"trained_with": found})
    assert "also of bonn" in first and "earlier rounds or through others, of celle" in first and "none of dresden" in first
    assert "none of bonn" in second
    (plain,) = in_words({"trained_with": [{"model": "m", "serves": ["a"], "sites": ["a"]}]})
    (unknown,) = in_words({"trained_with": None})
    assert plain != unknown and "may have" in unknown


@pytest.mark.parametrize("grouping", ["neighbourhoods", "benefit"])
def test_a_site_that_never_trained_is_no_group(grouping: str, tmp_path: Path) -> None:
    fed = Tampering({"site-3": lost}, on_failure="continue")
    *_, last = play(fed, make("emdcfl", grouping=grouping), rounds=2)
    clusters, clients = last.serving.clusters, list(fed.clients)
    assert clusters is not None and len(set(clusters.tolist())) == last.serving.k + 1
    trained_with = origins(last.serving, clients, model_names(last.serving, clients))
    score = {"mean": 0.5, "worst": 0.1, "low": 0.4, "high": 0.6, "samples": 9, "variants": {"test": {}}}
    summary = {"method": "emdcfl", "clients": clients, "clusters": clusters.tolist(), "k": last.serving.k, "trained_with": trained_with}
    summary |= {"accuracy": score, "groups": None, "ari": None, "scored": None}
    assert untrained(summary) == ["site-3"] and structure(summary, None).endswith("1 client not compared")
    assert dict(in_brief(summary, None, {}))["Look at"].endswith("model to use: site-3.")
    assert not any("no group fits" in said for _, said in sentences(summary, None, {}))
    assert what_to_do({**summary, "k": 1}) == "Train all 3 sites together" and all_alone({**summary, "k": 3})
    assert "nobody trained" in in_words(summary)[0]


@pytest.mark.parametrize(("method", "whose"), [("local", None), ("fedavg", "all"), ("ifca", "unknown")])
def test_model_files_name_the_sites_whose_updates_they_hold(method: str, whose: str | None, tmp_path: Path) -> None:
    config = override(Config(scenario=Choice(IN_MEMORY), method=Choice(method)), {"run.rounds": 1, "training.local_epochs": 1})
    result = run(config, tmp_path / "run", scenario=toy())
    for path in sorted((tmp_path / "run/models").glob("*.safetensors")):
        metadata = read_tensors(path)[1]
        if whose == "unknown":
            assert "trained_with" not in metadata and result.summary["trained_with"] is None
        else:
            sites = json.loads(metadata["trained_with"])
            assert sites == (list(result.clients) if whose == "all" else [path.stem.removeprefix("client-")])
