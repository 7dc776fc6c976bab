from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.methods.toy import CLASSES, FEATURES, toy
from tests.tiny import tamper
from torch import Tensor, nn

from emdcfl.core import tasks
from emdcfl.core.errors import ClientError
from emdcfl.core.federation import Replies
from emdcfl.core.keys import global_seed
from emdcfl.core.params import Network
from emdcfl.core.tasks import Training
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.engines.local import batched
from emdcfl.engines.local.batched import BatchedFederation
from emdcfl.engines.local.sequential import SequentialFederation
from emdcfl.engines.local.stack import find_chain
from emdcfl.models.recipe import ModelRecipe

SIZES = [50, 33, 16, 17, 50, 3]
TRAINING = Training(local_epochs=2, batch_size=16, lr=0.05, momentum=0.9, weight_decay=1e-6)
TIGHT = {"rtol": 1e-4, "atol": 1e-5}


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def untracked() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), nn.Linear(8, CLASSES))


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, CLASSES))


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    module[0].requires_grad_(False)
    return module


class Scaled(nn.Module):
    """Has a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scale * self.head(self.first(x).relu())
        return y


class Named(Scaled):
    """Has a parameter whose name the engine uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta * super().forward(x)


class Residual(nn.Module):
    """Looks like a chain of layers, and is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.head = nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x + self.act(self.first(x)))
        return y


class Capped(Residual):
    """A chain of layers, but for a bound between them that few samples reach."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.act(self.first(x)).clamp(max=20.0))
        return y


class Forgetful(nn.Module):
    """A chain of layers, but for a dropout between them that is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.head = nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(nn.functional.dropout(self.act(self.first(x)), 0.5, self.training))
        return y


def scenario(model: str, sizes: list[int] = SIZES) -> Scenario:
    base = toy(groups=1, per_group=len(sizes), n=sizes)
    return base if model == "mlp" else replace(base, model=ModelRecipe(f"{__name__}:{model}"))


def train(engine: type[SequentialFederation], world: Scenario, options: Mapping[str, Any], **settings: Any) -> tuple[Any, Replies]:
    fed = engine(world, training=settings.pop("training", TRAINING), device="cpu", **settings)
    fed.begin(3)
    thetas = {c: fed.initial(i) for i, c in enumerate(fed.clients)}
    made = {name: make(fed, thetas) for name, make in options.items() if callable(make)}
    own = {c: {name: values[c] for name, values in made.items() if isinstance(values, dict) and c in values} for c in fed.clients}
    common = {name: made.get(name, value) for name, value in options.items() if not isinstance(made.get(name), dict)}
    return fed, fed.train(thetas, own=own, **common)


TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prox": {"prox": {"mu": 0.5}},
    "layers": {"prox": {"mu": 0.1, "kind": "layer_norm"}},
    "anchored": {"prox": lambda fed, thetas: {c: {"mu": 0.1 * i, "anchor": 0.5 * t} for i, (c, t) in enumerate(thetas.items())}},
    "cosine": {"cosine": {"mu": 0.7}},
    "weights": {
        "sample_weights": lambda fed, thetas: {c: torch.linspace(0, 2, len(fed._clients[c].site.train)) for c in thetas},
    },
    "all": {"prox": {"mu": 0.5}, "cosine": lambda fed, thetas: {c: {"mu": 0.3, "anchor": t + 1} for c, t in thetas.items()}},
}


@pytest.mark.parametrize(
    ("model", "terms"),
    [("mlp", terms) for terms in sorted(TERMS)]
    + [
        (model, terms)
        for model in ("norms", "untracked", "smooth", "frozen", "Residual", "Scaled")
        for terms in ("plain", "weights", "all")
    ],
)
def test_every_client_takes_its_own_steps(model: str, terms: str, caplog: pytest.LogCaptureFixture) -> None:
    world = scenario(model)
    _, slow = train(SequentialFederation, world, TERMS[terms])
    with caplog.at_level(logging.WARNING):
        fed, fast = train(BatchedFederation, world, TERMS[terms])
    assert fed._stackable
    assert not caplog.records
    for client, reply in slow.valid.items():
        torch.testing.assert_close(fast[client]["theta"], reply["theta"], **TIGHT)
        assert (fast[client]["n"], fast[client]["steps"]) == (reply["n"], reply["steps"])
        assert fast[client]["loss"] == pytest.approx(reply["loss"], rel=1e-4)


@pytest.mark.parametrize("training", [replace(TRAINING, momentum=0.0), replace(TRAINING, local_epochs=1, batch_size=100)])
def test_without_momentum_and_in_a_single_step(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    _, slow = train(SequentialFederation, scenario("mlp"), {}, training=training)
    with caplog.at_level(logging.WARNING):
        fed, fast = train(BatchedFederation, scenario("mlp"), {}, training=training)
    assert fed._stackable and not caplog.records
    torch.testing.assert_close(fast.stack("theta"), slow.stack("theta"), **TIGHT)


def test_splitting_a_stack_changes_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = train(BatchedFederation, scenario("mlp"), {})
    monkeypatch.setattr(batched, "STACKED", 2 * 108)
    _, parts = train(BatchedFederation, scenario("mlp"), {})
    torch.testing.assert_close(parts.stack("theta"), whole.stack("theta"), **TIGHT)


def test_inputs_made_batch_by_batch_are_the_prepared_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    sites = []
    for i, n in enumerate((20, 9, 13)):
        split = Split(torch.from_numpy(rng.integers(0, 256, (n, 1, 6, 6), dtype=np.uint8)), torch.from_numpy(rng.integers(0, 3, n)))
        sites.append(Site(f"site-{i}", split, split, {"test": split}))
    recipe = ModelRecipe("small_cnn", {"channels": 1, "classes": 3, "size": 8})
    world = Scenario("images", tuple(sites), ("a", "b", "c"), Preprocess((0.5,), (0.25,), 1 / 255, 8), recipe)
    _, slow = train(SequentialFederation, world, {})
    _, ready = train(BatchedFederation, world, {})
    monkeypatch.setattr(batched, "PREPARED", 0)
    _, made = train(BatchedFederation, world, {})
    assert torch.equal(made.stack("theta"), ready.stack("theta"))
    torch.testing.assert_close(made.stack("theta"), slow.stack("theta"), **TIGHT)


def test_dropout_falls_back_to_the_reference_bit_for_bit_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    _, slow = train(SequentialFederation, scenario("noisy"), {})
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        fed, fast = train(BatchedFederation, scenario("noisy"), {})
        fed.train({c: fed.initial() for c in fed.clients})
    assert torch.equal(fast.stack("theta"), slow.stack("theta"))
    assert len(caplog.records) == 1
    assert "one after the other: the network has dropout, whose draws belong to one client" in caplog.text


def test_a_client_that_diverges_fails_alone_and_by_name() -> None:
    world = scenario("mlp")
    huge = world.sites[1].train
    sites = list(world.sites)
    sites[1] = replace(sites[1], train=Split(huge.x * 1e30, huge.y))
    bad = replace(world, sites=tuple(sites))
    _, slow = train(SequentialFederation, bad, {}, on_failure="continue")
    _, fast = train(BatchedFederation, bad, {}, on_failure="continue")
    assert set(fast.failures) == set(slow.failures) == {"site-1"}
    assert "learning rate" in fast.failures["site-1"].reason
    for client in slow.clients:
        torch.testing.assert_close(fast[client]["theta"], slow[client]["theta"], **TIGHT)


def test_a_client_batch_norm_cannot_train_fails_alone() -> None:
    world = scenario("norms", [20, 1, 30])
    _, fast = train(BatchedFederation, world, {}, on_failure="continue")
    assert set(fast.failures) == {"site-1"}
    assert "BatchNorm" in fast.failures["site-1"].reason
    assert fast.clients == ("site-0", "site-2")


@pytest.mark.parametrize("model", ["norms", "untracked"])
def test_a_last_batch_of_one_joins_its_predecessor_under_batch_norm(model: str) -> None:
    world = scenario(model, [33, 17, 32])
    _, slow = train(SequentialFederation, world, {})
    _, fast = train(BatchedFederation, world, {})
    assert fast.column("steps") == slow.column("steps") == {"site-0": 4, "site-1": 2, "site-2": 4}
    torch.testing.assert_close(fast.stack("theta"), slow.stack("theta"), **TIGHT)


def test_low_precision_follows_the_reference_loosely() -> None:
    _, full = train(SequentialFederation, scenario("mlp"), {})
    _, slow = train(SequentialFederation, scenario("mlp"), {}, precision="bf16")
    fed, fast = train(BatchedFederation, scenario("mlp"), {}, precision="bf16")
    assert fed._stackable
    torch.testing.assert_close(fast.stack("theta"), slow.stack("theta"), rtol=0.1, atol=0.02)
    torch.testing.assert_close(slow.stack("theta"), full.stack("theta"), rtol=0.1, atol=0.02)  # weights are cast anew at every step
    assert not torch.equal(slow.stack("theta"), full.stack("theta"))


def test_tasks_without_stages_run_as_in_the_reference() -> None:
    answers = []
    for engine in (SequentialFederation, BatchedFederation):
        fed = engine(scenario("mlp"), training=TRAINING, device="cpu")
        models = torch.stack([fed.initial(0), fed.initial(1)])
        answers.append(fed.evaluate(fed.clients, models, reduction="per_sample").stack("table"))
    assert torch.equal(*answers)


def test_the_second_round_of_a_network_with_a_parameter_called_theta_is_right_too() -> None:
    answers = []
    for engine in (SequentialFederation, BatchedFederation):
        fed, first = train(engine, scenario("Named"), {})
        fed.begin(4)
        answers.append(fed.train(first.column("theta")).stack("theta"))
    torch.testing.assert_close(*answers, **TIGHT)


def test_replies_do_not_share_memory_with_the_next_round() -> None:
    fed, first = train(BatchedFederation, scenario("mlp"), {})
    before = first.stack("theta").clone()
    fed.begin(4)
    fed.train({c: fed.initial() for c in fed.clients})
    assert torch.equal(first.stack("theta"), before)


@pytest.mark.parametrize(
    ("model", "is_chain"),
    [("mlp", True), ("Residual", False), ("smooth", False), ("frozen", False), ("Forgetful", False), ("Capped", False)],
)
def test_only_true_chains_are_taken_for_one(model: str, is_chain: bool) -> None:
    with global_seed(0):
        network = Network(scenario(model).model)
    network.module.eval()  # as a method leaves it that scores models before it trains any
    assert (find_chain(network, torch.randn(8, FEATURES)) is not None) == is_chain


def test_sites_with_samples_of_different_sizes_are_scored_one_after_the_other() -> None:
    from emdcfl.methods.emdcfl.client.losses import loss_moments

    def site(name: str, side: int) -> Site:
        split = Split(torch.randint(0, 256, (20, 1, side, side), dtype=torch.uint8), torch.arange(20) % CLASSES)
        return Site(name, split, split, {"test": split})

    world = scenario("mlp", [20] * 4)
    recipe = ModelRecipe("mlp", {"features": 16, "classes": CLASSES})
    sites = tuple(site(s.name, 4 + 4 * (i % 2)) for i, s in enumerate(world.sites))
    world = replace(world, sites=sites, preprocess=Preprocess(scale=1 / 255, size=4), model=recipe)
    found = []
    for engine in (SequentialFederation, BatchedFederation):
        fed = engine(world, training=TRAINING, device="cpu")
        fed.begin(1)
        models = torch.stack([fed.initial(i) for i in range(2)])
        found.append(fed.run(loss_moments, {c: {"models": models} for c in fed.clients}))
    for client in found[0].clients:
        torch.testing.assert_close(found[1][client], found[0][client], **TIGHT)


def test_different_settings_are_not_stacked_together() -> None:
    fed = BatchedFederation(scenario("mlp"), training=TRAINING, device="cpu")
    other = Training(local_epochs=1, batch_size=8, lr=0.1)
    inputs = {c: {"theta": fed.initial(), "training": (other if i % 2 else TRAINING).as_dict()} for i, c in enumerate(fed.clients)}
    steps = fed.run(tasks.train, inputs).column("steps")
    assert steps == {c: (-(-n // 8) if i % 2 else 2 * -(-n // 16)) for i, (c, n) in enumerate(zip(fed.clients, SIZES, strict=True))}


@pytest.mark.parametrize("model", ["mlp", "untracked", "smooth"])
def test_embeddings_and_losses_of_many_clients_at_once_are_those_of_each(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from emdcfl.methods.emdcfl.algorithm import EMDCFL
    from emdcfl.methods.emdcfl.client.losses import loss_moments
    from emdcfl.methods.emdcfl.comparison import measure

    world = scenario(model, [40, 33, 25, 40])
    alone: list[str] = []
    monkeypatch.setattr(batched, "attempt", lambda client, work: alone.append(type(work).__name__) or work(client))
    found = []
    for engine in (SequentialFederation, BatchedFederation):
        fed = engine(world, training=TRAINING, device="cpu")
        fed.begin(1)
        local = {c: fed.initial(i) for i, c in enumerate(fed.clients)}
        pairs = [(c, d) for c in fed.clients for d in fed.clients if c != d]
        W = measure(EMDCFL(tolerance=0.1, distances="all"), fed, pairs, local)
        models = torch.stack(list(local.values()))
        votes = fed.run(loss_moments, {c: {"models": models[: 2 + i % 2]} for i, c in enumerate(fed.clients)})
        found.append((W, votes))
    (slow, slow_votes), (fast, fast_votes) = found
    assert {pair: entry.W for pair, entry in fast.entries.items()} == pytest.approx({p: e.W for p, e in slow.entries.items()}, abs=1e-5)
    for client, reply in slow_votes.valid.items():
        torch.testing.assert_close(fast_votes[client], reply, **TIGHT)
    assert ("Embed" in alone, "Score" in alone) == {"mlp": (False, False), "untracked": (True, True), "smooth": (False, True)}[model]


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [("theta", torch.nan, "not finite"), ("theta", 1e9, "expected a state of norm"), ("n", -1, "expected n >= 1")],
)
def test_replies_are_checked_together_and_the_one_at_fault_is_named(name: str, wrong: float, message: str) -> None:
    fed = BatchedFederation(scenario("mlp"), training=TRAINING, device="cpu")
    assert fed.checked > len(fed.clients) * fed.layout.size
    tamper(fed, lambda _, client, reply: {**reply, name: wrong * reply[name]} if client == "site-3" else reply)
    with pytest.raises(ClientError, match=f"client 'site-3' failed .*{message}"):
        fed.train(dict.fromkeys(fed.clients, fed.initial()))


def test_a_schedule_serves_no_other_clients_weights_or_settings() -> None:
    world, once = scenario("mlp"), replace(TRAINING, batch_size=64)  # one batch per epoch, the same in every round
    slow, fast = (engine(world, training=once, device="cpu") for engine in (SequentialFederation, BatchedFederation))
    weights = {c: {"sample_weights": torch.linspace(0, 2, n)} for c, n in zip(fast.clients, SIZES, strict=True)}
    for clients, options, epochs in [(6, {}, 2), (6, {}, 2), (6, {"own": weights}, 2), (6, {}, 2), (4, {}, 2), (4, {}, 1)]:
        for fed in (slow, fast):
            fed.training = replace(once, local_epochs=epochs)
        starts = dict.fromkeys(fast.clients[-clients:], fast.initial())
        expected, got = slow.train(starts, **options), fast.train(starts, **options)
        assert torch.allclose(got.stack("theta"), expected.stack("theta"), **TIGHT), (clients, options, epochs)


def test_every_stack_of_a_round_finds_its_schedule_again(monkeypatch: pytest.MonkeyPatch) -> None:
    laid: list[list[str]] = []
    lay = batched.schedule

    def counted(fits: Any, **options: Any) -> Any:
        laid.append([client.name for client, _ in fits])
        return lay(fits, **options)

    fed = BatchedFederation(scenario("mlp"), training=replace(TRAINING, batch_size=64), device="cpu")
    monkeypatch.setattr(batched, "schedule", counted)
    monkeypatch.setattr(batched, "STACKED", 2 * fed.layout.size)
    start = fed.initial()
    everyone, others = fed.clients, fed.clients[1:]
    expected = [list(clients[i : i + 2]) for clients in (everyone, others) for i in range(0, len(clients), 2)]
    for clients in (everyone, everyone, others, others):
        fed.train(dict.fromkeys(clients, start))
    assert [names for names in laid if len(names) > 1] == [names for names in expected if len(names) > 1]


def test_bytes_are_counted_as_in_the_reference() -> None:
    slow, fast = (train(engine, scenario("mlp"), {})[0] for engine in (SequentialFederation, BatchedFederation))
    assert fast.traffic.bytes == slow.traffic.bytes
    assert fast.traffic.bytes["train"] == dict.fromkeys(("to_clients", "to_server"), 4 * fast.layout.size * len(fast.clients))
