"""An honest server: every method runs on a trial federation's nodes; on default nodes those that ask for too much name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.attacks.hostile import digits
from tests.engines.flower import loopback
from tests.engines.flower.loopback import LoopbackGrid

from emdcfl.apps import deployment
from emdcfl.core.errors import ConfigError, QuorumError
from emdcfl.core.tasks import Training
from emdcfl.data import scenarios
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.node.home import HomeNode
from emdcfl.engines.flower.node.policy import Policy, read_policy
from emdcfl.engines.flower.node.serve import make_app
from emdcfl.methods import METHODS, make

NODES = 4
REFUSED = {"fedce": "reductions", "fedem": "tasks", "fedrc": "tasks", "fedsac": "tasks", "fedsoft": "tasks", "pacfl": "tasks"}
"""Method → the key of the policy that must allow more."""


class Homes(LoopbackGrid):
    """Nodes with homes; every message opens its node anew."""

    def __init__(self, homes: dict[str, Path]) -> None:
        super().__init__({})
        self.online = set(range(1, len(homes) + 1))
        for i, (name, home) in enumerate(homes.items(), start=1):
            self._apps[i] = make_app(lambda context, name=name, home=home: HomeNode(name, home))


def play(method: str, homes: dict[str, Path], **options: Any) -> tuple[set[str], int]:
    """Run two rounds; returns the reasons of all refusals, and how many tasks were answered."""
    scenario = scenarios.build("rotated-digits", groups=2, clients_per_group=2)
    grid = Homes(homes)
    fed = loopback.federation(scenario, grid, training=Training(local_epochs=1), on_failure="continue")
    fed.job["data"] = {"scenario": "rotated-digits", "options": {"groups": 2, "clients_per_group": 2}}
    playing = make(method, **options)
    try:
        state = playing.init(fed, fed.begin(0))
        for index in (1, 2):
            state = playing.step(fed, state, fed.begin(index))
    except QuorumError:
        pass
    said = [codec.decode(reply.content) for _, reply in grid.log if reply is not None]
    return {answer["failure"] for answer in said if "failure" in answer}, sum("reply" in answer for answer in said)


@pytest.fixture(scope="module")
def trial_homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    there = deployment.create(tmp_path_factory.mktemp("trial") / "federation", nodes=NODES)
    return {name: there.home(name) for name in there.nodes}


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_runs_on_a_trial_federation(trial_homes: dict[str, Path], method: str) -> None:
    reasons, answered = play(method, trial_homes)
    assert reasons == set()
    assert answered >= 2 * NODES, "each node trains in each round"


def test_every_method_can_be_named_in_a_policy() -> None:
    assert "em_step" in Policy(methods=["fedavg", "fedem"]).tasks
    assert all(len(Policy(methods=[name]).tasks) >= 3 for name in METHODS)
    with pytest.raises(ConfigError, match="fedavg"):
        Policy(methods=["fedagv"])


@pytest.mark.parametrize("key", ["tasks", "reductions"])
def test_a_policy_names_methods_or_what_they_need(key: str) -> None:
    with pytest.raises(ConfigError, match=f"methods and {key}.*leave one of the two out"):
        read_policy({"methods": ["fedavg"], key: []}, "node.toml: policy")


@pytest.mark.slow
@pytest.mark.parametrize("method", [*sorted(REFUSED), "ifca", "fedprox"])
def test_a_node_takes_part_in_the_methods_that_its_owner_names_and_in_no_others(tmp_path: Path, method: str) -> None:
    reasons, answered = play(method, default_homes(tmp_path, f"[policy]\nmethods = [{method!r}]"))
    assert (reasons, answered >= 2 * NODES) == (set(), True)
    reasons, _ = play("emdcfl", {name: tmp_path / name for name in (site.name for site in digits().sites)})
    assert all("policy.methods in node.toml" in reason for reason in reasons) and reasons


@pytest.mark.slow
@pytest.mark.parametrize("wide", [True, False])
def test_groups_by_benefit_are_found_on_trial_and_on_default_nodes(trial_homes: dict[str, Path], tmp_path: Path, wide: bool) -> None:
    reasons, answered = play("emdcfl", trial_homes if wide else default_homes(tmp_path), grouping="benefit")
    assert reasons == set()
    assert answered >= 4 * NODES, "each node trains and scores averages in each round"


def default_homes(tmp_path: Path, toml: str = "") -> dict[str, Path]:
    homes = {site.name: tmp_path / site.name for site in digits().sites}
    for home in homes.values():
        home.mkdir(exist_ok=True)
        (home / "node.toml").write_text(f'trust = "first-use"\nenrol = true\n{toml}')
    return homes


@pytest.mark.slow
@pytest.mark.parametrize("method", ["emdcfl", "fedavg", "ifca", *sorted(REFUSED)])
def test_a_default_node_answers_what_its_policy_allows_and_names_the_key_otherwise(tmp_path: Path, method: str) -> None:
    reasons, answered = play(method, default_homes(tmp_path))
    assert bool(reasons) == (method in REFUSED), reasons
    assert method in REFUSED or answered >= 2 * NODES
    assert all(f"policy.{REFUSED[method]} in node.toml" in reason for reason in reasons)
