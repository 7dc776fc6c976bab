"""The real thing on loopback: a SuperLink, four SuperNodes, TLS, node authentication; and the models of the local engine, byte for byte."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.apps.trial_runs import config, federation, log_of, over_flower

from emdcfl.apps import deployment
from emdcfl.apps.deployment.certificates import make_node_key
from emdcfl.apps.deployment.check import attacks
from emdcfl.apps.deployment.processes import start
from emdcfl.apps.deployment.report import metrics
from emdcfl.runs import runner

pytestmark = pytest.mark.slow


def add_unregistered(there: deployment.Deployment) -> deployment.Deployment:
    """Add a node with a key of its own that the SuperLink was never told of; it claims a client's name."""
    home = there.home("intruder")
    home.mkdir()
    make_node_key(home)
    for file in ("ca.crt", "trusted.yaml", "node.toml"):
        shutil.copyfile(there.home("rot0-1") / file, home / file)
    return replace(there, nodes=[*there.nodes, "intruder"])


def test_four_nodes_find_two_clusters_with_the_bytes_of_the_local_engine(tmp_path: Path) -> None:
    given = config(run={"rounds": 2, "evaluate_every": 2}, training={"local_epochs": 2})
    with federation(tmp_path / "federation") as there:
        wider = add_unregistered(there)
        start(wider, "intruder")
        events: list[dict[str, object]] = []
        outcome = deployment.submit(there, over_flower(given), tmp_path / "flower", watch=events.append)
        end = time.monotonic() + 60
        while deployment.report(wider)["nodes"]["intruder"]["process"] == "running" and time.monotonic() < end:
            time.sleep(1)
        refused = log_of(there, "intruder")
        assert deployment.report(wider)["nodes"]["intruder"]["process"] == "ended by itself", refused
        assert "Failed to activate SuperNode" in refused
        assert [attack for attack in attacks(there) if not attack.held] == [], "a foreign bundle among them"
        found = deployment.report(there)
        assert found["ok"] and set(found["nodes"]) == set(there.nodes), "the registered ones are online all the while"
        assert (found["run"]["state"], found["run"]["round"], found["run"]["rounds"]) == ("finished", 2, 2)
        assert 'emdcfl_node_online{node="rot0-1"} 1\n' in metrics(found)
    local = runner.run(given, tmp_path / "local")
    summary = json.loads((tmp_path / "flower" / "summary.json").read_text())
    assert summary["clusters"] == local.summary["clusters"] == [0, 0, 1, 1]
    assert summary["ari"] == 1.0
    assert summary["failures"] == []
    models = sorted(p.name for p in (tmp_path / "local" / "models").iterdir())
    assert models == ["cluster-0.safetensors", "cluster-1.safetensors", "index.json"]
    for name in models:
        assert (tmp_path / "flower" / "models" / name).read_bytes() == (tmp_path / "local" / "models" / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "flower").iterdir()) == sorted(p.name for p in (tmp_path / "local").iterdir())
    assert [e["round"] for e in events if e["event"] == "end"] == [1, 2]
    assert outcome["traffic"]["train"]["requests"] == 8
    assert set((tmp_path / "federation" / "server" / "clients.toml").read_text().split()) >= {"rot0-1", "rot90-2"}
