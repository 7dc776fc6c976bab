from __future__ import annotations

import gc
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.methods.toy import CLASSES, FEATURES, TRAINING, play, toy
from tests.tiny import Stop, StopAfter, tiny
from torch import nn

from emdcfl.core.errors import ConfigError
from emdcfl.core.tasks import Training
from emdcfl.data import scenarios
from emdcfl.data.types import Scenario, Split
from emdcfl.engines.cuda.engine import FALLBACKS, CudaFederation, draws
from emdcfl.engines.cuda.streams import StreamTrainer
from emdcfl.engines.local.batched import BatchedFederation
from emdcfl.engines.local.sequential import SequentialFederation
from emdcfl.methods import METHODS, make
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.comparison import Comparison
from emdcfl.models.recipe import ModelRecipe
from emdcfl.runs.config import Choice, Config, EngineConfig, RunConfig
from emdcfl.runs.runner import run

SIZES = [96, 80, 77, 96, 33, 50, 96, 96, 12]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def numbers(world: Scenario) -> Scenario:
    """Sites that predict their first feature and not their class."""

    def of(split: Split) -> Split:
        return Split(split.x, split.x[:, 0].clone())

    sites = [replace(s, train=of(s.train), val=of(s.val), tests={name: of(split) for name, split in s.tests.items()}) for s in world.sites]
    return replace(world, sites=tuple(sites), classes=(), model=ModelRecipe("mlp", {"features": FEATURES, "classes": 1, "hidden": [8]}))


def test_without_a_gpu_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--device cuda"):
        CudaFederation(toy(), training=TRAINING, device="cpu")


def test_networks_that_draw_are_noticed() -> None:
    assert draws(noisy())
    assert not draws(norms())
    assert not draws(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))


@needs_cuda
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in sorted(METHODS)), ("emdcfl", {"grouping": "benefit"})])
def test_every_method_gives_the_models_and_clusters_of_the_reference(name: str, options: dict[str, Any]) -> None:
    served = []
    for engine in (SequentialFederation, CudaFederation, CudaFederation):
        fed = engine(toy(n=SIZES), training=TRAINING, device="cuda")
        served.append(play(fed, make(name, **options), 3)[1])
    reference, fast, again = served
    torch.testing.assert_close(fast.models, reference.models, rtol=1e-3, atol=1e-4)
    if fast.clusters is not None:
        assert torch.equal(fast.clusters, reference.clusters)
    assert torch.equal(fast.models, again.models)


@needs_cuda
def test_the_batched_engine_stacks_on_a_gpu_too(caplog: pytest.LogCaptureFixture) -> None:
    served = [
        play(engine(toy(n=SIZES), training=TRAINING, device="cuda"), make("fedavg"), 3)[1]
        for engine in (SequentialFederation, BatchedFederation)
    ]
    torch.testing.assert_close(served[1].models, served[0].models, rtol=1e-3, atol=1e-4)
    assert not caplog.records


@needs_cuda
def test_garbage_with_graphs_does_not_end_a_capture(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def train() -> CudaFederation:
        fed = CudaFederation(toy(n=SIZES), training=TRAINING, device="cuda")
        fed.begin(1)
        fed.train(dict.fromkeys(fed.clients, fed.initial()))
        return fed

    earlier, step, thresholds = [train()], StreamTrainer.step, gc.get_threshold()

    def littering(self: StreamTrainer, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_current_stream_capturing() and earlier:
            cycle: list[Any] = [earlier.pop()]
            cycle.append(cycle)
            del cycle
            assert len([[] for _ in range(10_000)]) == 10_000  # enough new objects for the collector to start by itself
        step(self, *args, **kwargs)

    monkeypatch.setattr(StreamTrainer, "step", littering)
    gc.set_threshold(100, 1, 1)
    try:
        with caplog.at_level(logging.WARNING, logger="emdcfl"):
            train()
    finally:
        gc.set_threshold(*thresholds)
    assert not earlier, "nothing was captured"
    assert not caplog.records


@needs_cuda
@pytest.mark.parametrize("prox", [None, {"mu": 0.1}])
def test_a_compiled_step_in_bf16_is_as_close_to_float32_as_one_that_is_not(prox: Any, caplog: pytest.LogCaptureFixture) -> None:
    world = scenarios.build("rotated-digits", clients_per_group=1)
    world = replace(world, model=ModelRecipe("cnn", {"channels": 1, "classes": 10, "size": 8}))
    training, moved = Training(local_epochs=1, batch_size=64, lr=0.005, momentum=0.9), []  # few, small steps: rounding grows with them
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        for precision, compile in (("fp32", "no"), ("bf16", "no"), ("bf16", "yes"), ("bf16", "yes")):
            fed = CudaFederation(world, training=training, device="cuda", precision=precision, compile=compile)
            fed.begin(1)
            start = fed.initial()
            moved.append(fed.train(dict.fromkeys(fed.clients, start), prox=prox).stack("theta") - start)
    assert not caplog.records
    exact, plain, compiled, again = moved
    assert torch.equal(compiled, again)
    assert (compiled - exact).norm() < 1.5 * (plain - exact).norm() < 0.5 * exact.norm()


@needs_cuda
def test_a_compiled_step_gives_the_models_of_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    served = []
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        for engine, options in ((SequentialFederation, {}), (CudaFederation, {"compile": "yes"}), (CudaFederation, {"compile": "yes"})):
            fed = engine(toy(n=SIZES), training=TRAINING, device="cuda", **options)
            served.append(play(fed, make("fedavg"), 3)[1].models)
    assert not caplog.records  # a step that cannot be compiled would say so, and train as it is
    torch.testing.assert_close(served[1], served[0], rtol=1e-3, atol=1e-4)
    assert torch.equal(served[1], served[2])


@needs_cuda
@pytest.mark.parametrize("compile", ["no", "yes"])
def test_numbers_are_predicted_as_in_the_reference(compile: str, caplog: pytest.LogCaptureFixture) -> None:
    world, served = numbers(toy(n=SIZES)), []
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        for engine, options in ((SequentialFederation, {}), (CudaFederation, {"compile": compile})):
            fed = engine(world, training=TRAINING, device="cuda", **options)
            served.append(play(fed, make("emdcfl", grouping="benefit"), 3)[1].models)
    assert not [record for record in caplog.records if record.getMessage().startswith(FALLBACKS)]
    torch.testing.assert_close(served[1], served[0], rtol=1e-3, atol=1e-4)


@needs_cuda
def test_pairs_of_images_in_bf16_are_about_as_far_apart_as_in_float32() -> None:
    exact, low = (all_pairs(CudaFederation, "cuda", precision=precision) for precision in ("fp32", "bf16"))
    assert low == pytest.approx(exact, abs=0.01)


@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["emdcfl", "fedavg"])
def test_a_stopped_run_ends_with_the_same_bits(tmp_path: Path, method: str, precision: Any) -> None:
    engine = EngineConfig(name="cuda", device="cuda", precision=precision)
    config = Config(run=RunConfig(rounds=4), scenario=Choice("tiny"), method=Choice(method), engine=engine)
    assert tiny().name == "tiny"  # importing it registers the scenario
    run(config, tmp_path / "whole")
    with pytest.raises(Stop):
        run(config, tmp_path / "broken", observer=StopAfter(2))
    summary = run(config, tmp_path / "broken", resume=True).summary
    assert summary["rounds"] == 4
    assert summary["memory"]["peak"] >= summary["memory"]["allocated"] > 0
    files = sorted(p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").rglob("*.safetensors"))
    assert files
    for path in files:
        assert (tmp_path / "whole" / path).read_bytes() == (tmp_path / "broken" / path).read_bytes()


@needs_cuda
def test_batch_norm_meets_true_batches(caplog: pytest.LogCaptureFixture) -> None:
    world = replace(toy(n=SIZES), model=ModelRecipe(f"{__name__}:norms"))
    trained = []
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        for engine in (SequentialFederation, CudaFederation):
            fed = engine(world, training=TRAINING, device="cuda")
            fed.begin(1)
            trained.append(fed.train({c: fed.initial() for c in fed.clients}).stack("theta"))
    assert not caplog.records
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-3, atol=1e-4)


def all_pairs(engine: type[SequentialFederation], device: str, **options: Any) -> dict[tuple[str, str], float]:
    """W of every ordered pair of clients with images, each under a model of its own."""
    fed = engine(scenarios.build("rotated-digits", clients_per_group=1), training=TRAINING, device=device, **options)
    fed.begin(1)
    local = {c: fed.initial(i) for i, c in enumerate(fed.clients)}
    method = EMDCFL(tolerance="auto", distances="all")
    found = Comparison(method, fed, local).measure([(c, d) for c in fed.clients for d in fed.clients if c != d])
    return {pair: entry.W for pair, entry in found.entries.items()}


@needs_cuda
def test_pairs_of_images_are_as_far_apart_as_in_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        reference, fast = all_pairs(SequentialFederation, "cpu"), all_pairs(CudaFederation, "cuda")
    assert not [record for record in caplog.records if record.getMessage().startswith(FALLBACKS)]
    assert fast == pytest.approx(reference, abs=1e-4)


@needs_cuda
def test_dropout_trains_as_in_the_reference_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    world = replace(toy(n=SIZES), model=ModelRecipe(f"{__name__}:noisy"))
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        fed = CudaFederation(world, training=TRAINING, device="cuda")
        fed.begin(1)
        first = fed.train({c: fed.initial() for c in fed.clients}).stack("theta")
        fed.train({c: fed.initial() for c in fed.clients})
    assert len(caplog.records) == 1
    reference = SequentialFederation(world, training=TRAINING, device="cuda")
    reference.begin(1)
    expected = reference.train({c: reference.initial() for c in reference.clients}).stack("theta")
    torch.testing.assert_close(first, expected, rtol=1e-3, atol=1e-4)
