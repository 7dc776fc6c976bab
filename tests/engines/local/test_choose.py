from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.methods.toy import TRAINING, toy
from tests.tiny import Stop, StopAfter, contents, tiny

from emdcfl.core.errors import ConfigError
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.engines import ENGINES, choose, make_federation, multiply_adds, resolve
from emdcfl.engines.local.batched import BatchedFederation
from emdcfl.engines.local.processes import ProcessFederation
from emdcfl.engines.local.sequential import SequentialFederation
from emdcfl.models.recipe import ModelRecipe
from emdcfl.runs.config import Choice, Config, EngineConfig, RunConfig
from emdcfl.runs.plan import plan
from emdcfl.runs.runner import run

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def images(model: str, size: int, n: int = 64) -> Scenario:
    split = Split(torch.zeros(n, 1, size, size, dtype=torch.uint8), torch.zeros(n, dtype=torch.int64))
    sites = tuple(Site(f"site-{i}", split, split, {"test": split}) for i in range(8))
    return Scenario("images", sites, tuple("0123456789"), Preprocess(scale=1 / 255), ModelRecipe(model, {"size": size}))


def test_multiply_adds_are_counted_per_sample() -> None:
    assert multiply_adds(toy()) == 8 * 8 + 8 * 4
    paper = 28 * 28 * 9 * (64 + 64 * 128) + 128 * 14 * 14 * 128 + 128 * 10
    assert multiply_adds(images("cnn", 28)) == paper


def test_small_steps_are_stacked_and_large_ones_are_not() -> None:
    assert choose(toy(), device=CPU, batch_size=64) == "batched"
    assert choose(images("cnn", 28), device=CPU, batch_size=64) == "sequential"


def test_the_batch_counts_no_more_than_the_data() -> None:
    assert choose(images("small_cnn", 8, n=16), device=CPU, batch_size=64) == "batched"
    assert choose(images("small_cnn", 8, n=500), device=CPU, batch_size=64) == "sequential"


def test_a_gpu_takes_the_cuda_engine_and_workers_take_the_reference() -> None:
    assert choose(images("cnn", 28), device=GPU, batch_size=64) == "cuda"
    assert choose(toy(), device=CPU, batch_size=64, workers=2) == "sequential"


def test_few_clients_are_not_stacked() -> None:
    assert choose(toy(groups=1, per_group=3), device=CPU, batch_size=64) == "sequential"
    assert choose(toy(), device=CPU, batch_size=64, participants=2) == "sequential"


@pytest.mark.slow
def test_names_lead_to_engines() -> None:
    for name, cls in {"sequential": SequentialFederation, "batched": BatchedFederation}.items():
        assert type(make_federation(toy(), engine=name, training=TRAINING, device="cpu")) is cls
    assert resolve("auto", toy(), device="cpu", batch_size=16) == "batched"
    with make_federation(toy(), engine="sequential", workers=2, training=TRAINING, device="cpu") as fed:
        assert type(fed) is ProcessFederation


@pytest.mark.parametrize(
    ("engine", "workers", "message"),
    [("bached", 1, "batched"), ("batched", 2, "one process"), ("cuda", 1, "CUDA device")],
)
def test_what_cannot_be_is_refused_with_advice(engine: str, workers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(engine, toy(), device="cpu", batch_size=16, workers=workers)


def test_the_config_of_a_run_names_the_engine_that_ran() -> None:
    assert tiny().name == "tiny"  # importing it registers the scenario
    base = Config(run=RunConfig(rounds=2), scenario=Choice("tiny"), method=Choice("fedavg"), engine=EngineConfig(device="cpu"))
    assert plan(base).config.engine.name == "batched"
    assert plan(plan(base).config).config == plan(base).config
    for name in set(ENGINES) - {"auto", "cuda", "flower"}:
        assert plan(replace(base, engine=replace(base.engine, name=name))).config.engine.name == name


@pytest.mark.slow
def test_a_stopped_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = Config(
        run=RunConfig(rounds=3), scenario=Choice("tiny"), method=Choice("emdcfl"), engine=EngineConfig(name="batched", device="cpu")
    )

    run(config, tmp_path / "whole")
    with pytest.raises(Stop):
        run(config, tmp_path / "broken", observer=StopAfter(2))
    run(config, tmp_path / "broken", resume=True)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
