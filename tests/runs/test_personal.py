"""Fine-tuning at home: what clients keep, what the server believes, what a run leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.flower import loopback
from tests.tiny import TRAINING, Stop, StopAfter, client, config, contents, federation, same_bits, score, tiny
from tests.trust.liars import LyingFederation
from torch import Tensor

from emdcfl.core import tasks
from emdcfl.core.errors import ClientError
from emdcfl.core.federation import Federation
from emdcfl.data.types import Split
from emdcfl.engines.local.batched import BatchedFederation
from emdcfl.methods.base import Serving
from emdcfl.runs import runner
from emdcfl.runs.config import Config, PersonalizeConfig
from emdcfl.runs.outputs import load_served
from emdcfl.runs.personal import FineTuned, pays, personalize
from emdcfl.runs.result import load
from emdcfl.runs.runner import run
from emdcfl.runs.verdict.advice import BASELINES
from emdcfl.runs.verdict.baselines import run_baselines

pytestmark = pytest.mark.usefixtures("sketches")
ON = PersonalizeConfig("on", epochs=2, lr=0.02)
ONE = torch.ones(1)


def personal(fed: Federation) -> FineTuned:
    """Fine-tune one untrained model at every client."""
    fed.begin(1)
    serving = Serving(fed.initial()[None], torch.ones(len(fed.clients), 1))
    return personalize(fed, serving, score(fed, serving), ON, TRAINING)


@pytest.fixture(scope="module")
def reference() -> FineTuned:
    return personal(federation())


def test_flower_gives_the_bits_of_the_sequential_engine(reference: FineTuned) -> None:
    other = personal(loopback.federation(tiny(), training=TRAINING))
    assert list(other.states) == list(reference.states) == ["site-0", "site-1", "site-2", "site-3"]
    assert all(same_bits(other.states[c], reference.states[c]) for c in reference.states)
    assert other.rows == reference.rows


def test_the_batched_engine_agrees_within_rounding(reference: FineTuned) -> None:
    first, again = (personal(BatchedFederation(tiny(), training=TRAINING, device="cpu")) for _ in range(2))
    for c, theta in reference.states.items():
        torch.testing.assert_close(first.states[c], theta, rtol=1e-4, atol=1e-5)
        assert same_bits(first.states[c], again.states[c])


def test_batches_come_in_another_order_than_in_the_last_round() -> None:
    one = client()
    one.begin(1)
    theta, training = one.network.theta.detach().clone(), replace(TRAINING, local_epochs=ON.epochs)
    trained = tasks.train(one, theta=theta, training=training.as_dict())["theta"]
    tuned = tasks.personalize(one, models=theta[None], weights=ONE, training=training.as_dict(), always=True)["theta"]
    assert not torch.equal(trained, tuned)


def ask(start: Tensor, mixture: tuple[Tensor, Tensor] | None = None, **changed: Any) -> dict[str, Any]:
    one = client()
    one.begin(1)
    models, weights = (start[None], ONE) if mixture is None else mixture
    return tasks.personalize(one, models=models, weights=weights, training=replace(TRAINING, **changed).as_dict())


def test_a_client_says_what_fine_tuning_gains_on_its_validation_data() -> None:
    one = client()
    one.begin(1)
    start = one.network.theta.detach().clone()
    better, m = ask(start, local_epochs=10), len(one.site.val)
    gain, error = tasks.validation_gain(one, start[None], ONE, better["theta"])
    assert (better["m"], better["gain"], better["error"]) == (m, gain, error) and gain > error > 0
    assert tasks.validation_gain(one, better["theta"][None], ONE, start) == (-gain, error)
    assert tasks.validation_gain(one, start[None], ONE, start) == (0.0, 0.0)
    assert ask(start, lr=1e9) == {"m": m, "gain": 0.0, "error": 0.0}, "a training that diverged has no state"


def test_losses_that_overflow_are_no_gain() -> None:
    one = client()
    one.begin(1)
    val = one.site.val
    one.place("val", Split(torch.cat([val.x[1:], torch.full_like(val.x[:1], 3e38)]), val.y))
    start = one.network.theta.detach().clone()
    asked: dict[str, Any] = {"models": start[None], "weights": ONE, "training": replace(TRAINING, local_epochs=10).as_dict()}
    tuned = tasks.personalize(one, **asked, always=True)["theta"]
    assert math.isnan(tasks.validation_gain(one, start[None], ONE, tuned)[0])
    assert "theta" not in tasks.personalize(one, **asked)


def test_of_a_mixture_the_heaviest_component_is_tuned_and_the_mixture_is_the_mark() -> None:
    one = client()
    one.begin(1)
    start = one.network.theta.detach().clone()
    trained = ask(start, local_epochs=20)["theta"]
    both = torch.stack([start, trained])
    assert same_bits(ask(start, (both, torch.tensor([0.9, 0.1])), local_epochs=20)["theta"], trained)
    assert tasks.validation_gain(one, both, torch.tensor([0.1, 0.9]), start)[0] < 0
    assert tasks.validation_gain(one, both, torch.tensor([0.9, 0.1]), trained)[0] > 0


def gains(*found: tuple[float, float, int]) -> dict[str, dict[str, Any]]:
    """Replies: gain, standard error and validation samples by client."""
    return {f"site-{i}": {"gain": gain, "error": error, "m": m} for i, (gain, error, m) in enumerate(found)}


def test_few_samples_follow_the_others_and_many_their_own() -> None:
    sure, unsure = (-0.2, 0.01, 400), (-0.01, 0.2, 10)
    alike = [(0.1 + 0.01 * i, 0.05, 30) for i in range(-3, 4)]
    assert pays(gains(*alike, unsure)) == [f"site-{i}" for i in range(8)], "one of equals"
    assert pays(gains(*alike, sure)) == [f"site-{i}" for i in range(7)], "it knows better"
    assert pays(gains((0.02, 0.05, 20), *[(-0.1 - 0.01 * i, 0.05, 30) for i in range(7)])) == [], "a gain by chance"
    assert pays(gains((0.01, 0.5, 10))) == ["site-0"] and pays(gains((-0.01, 0.5, 10))) == [] and pays({}) == []
    assert pays(gains((0.0, 0.0, 30), (0.0, 0.0, 1))) == [], "where nothing changed there is nothing to keep"
    assert pays(gains((0.0, 0.0, 0), *alike))[0] == "site-0", "without validation samples"


@pytest.mark.parametrize(("m", "others"), [(1, 2000), (20, 8)])
def test_zeros_without_an_error_are_no_proof_that_all_clients_gain_alike(m: int, others: int) -> None:
    clear = [(0.2, 0.01, 30), (-0.1, 0.01, 30), (-0.3, 0.01, 30), (0.3, 0.05, 10), (-0.25, 0.05, 10)]
    kept = pays(gains(*clear, *[(0.0, 0.0, m)] * others))
    assert [c for c in kept if int(c.removeprefix("site-")) < len(clear)] == ["site-0", "site-3"]


@pytest.mark.parametrize("error", [0.0, 1e-9, 0.01, 1.0, 1e6])
@pytest.mark.parametrize("gain", [-1e6, -3.0, -0.3, 0.3, 3.0, 1e6])
@pytest.mark.parametrize("m", [0, 30, 10**9])
def test_a_liar_changes_nobodys_clear_result(gain: float, error: float, m: int) -> None:
    honest = [(0.3, 0.05, 30), (0.25, 0.05, 30), (0.2, 0.05, 30), (-0.3, 0.05, 30), (-0.25, 0.05, 30), (-0.2, 0.05, 30)]
    assert [c for c in pays(gains(*honest, (gain, error, m))) if c != "site-6"] == ["site-0", "site-1", "site-2"]


@pytest.mark.parametrize(
    "lie",
    [
        lambda reply: {**reply, "theta": reply["theta"] * torch.nan},
        lambda reply: {**reply, "theta": reply["theta"] * 1e4},
        lambda reply: {**reply, "theta": reply["theta"][1:]},
        lambda reply: {**reply, "gain": math.nan},
        lambda reply: {**reply, "gain": 1e7},
        lambda reply: {**reply, "error": -0.1},
        lambda reply: {"theta": reply["theta"]},
    ],
)
def test_a_lying_reply_is_refused_and_its_sender_keeps_the_plain_model(reference: FineTuned, lie: Callable[[Any], Any]) -> None:
    def change(fed: Any, task: str, asked: Any, reply: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = lie(reply) if task == "personalize" else reply
        return found

    fed = LyingFederation(tiny(), liar="site-0", lie=change)
    found = personal(fed)
    assert list(found.states) == ["site-1", "site-2", "site-3"]
    assert [f.task for f in fed.failures] == ["personalize"] and fed.guard.ledger.quarantined()[0]["client"] == "site-0"
    assert same_bits(found.states["site-1"], reference.states["site-1"])
    assert found.rows[0]["accuracy"] is not None and found.rows[1:] == reference.rows[1:]


def tuned() -> Config:
    return replace(config(method="fedavg", rounds=1), personalize=PersonalizeConfig("on", epochs=3))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    run(tuned(), out)
    return out


def test_a_run_leaves_the_personal_models_beside_the_plain_ones(finished: Path) -> None:
    result, plain = load(finished), run(config(method="fedavg", rounds=1))
    told = result.summary["personalized"]
    assert same_bits(result.serving.models, plain.serving.models) and result.accuracy == plain.accuracy
    assert "personalized" not in plain.summary and plain.personalized is None
    assert told["mode"] == "on" and told["kept"] == list(result.clients)
    assert result.config.personalize.lr == pytest.approx(0.4 * 0.05)
    after, before = result.personalized, result.accuracy
    assert after.mean == told["accuracy"]["mean"]
    assert told["gain"] == pytest.approx(after.mean - before.mean)
    x = result.predict_proba("site-0", tiny().sites[0].tests["test"].x)
    accuracy = (x.argmax(1) == tiny().sites[0].tests["test"].y).double().mean()
    assert float(accuracy) == after.clients["site-0"]
    assert not torch.equal(x, result.predict_proba("site-0", tiny().sites[0].tests["test"].x, plain=True))
    for use_plain in (False, True):
        states = load_served(finished, "site-0", plain=use_plain).states
        assert same_bits(states, result.model_of("site-0", plain=use_plain).states)


@pytest.mark.parametrize("where", ["personalize", "write_outputs"])
def test_a_kill_after_the_last_round_resumes_to_the_same_bytes(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real = getattr(runner, where)

    def killed(*args: Any, **options: Any) -> Any:
        if where == "personalize" or "personalized" in args[1].summary:
            raise Stop
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(runner, where, killed)
        with pytest.raises(Stop):
            run(tuned(), tmp_path / "run")
    assert load(tmp_path / "run").summary["finished"] is False
    with monkeypatch.context() as patch:
        if where == "write_outputs":  # what clients kept was committed: nobody is asked again
            patch.setattr(runner, "personalize", None)
        run(tuned(), tmp_path / "run", resume=True)
        patch.setattr(runner, "personalize", None)
        run(tuned(), tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(finished)


@pytest.mark.parametrize("participants", [None, 3])
def test_grouping_by_benefit_with_fine_tuning_resumes_to_the_same_bytes(tmp_path: Path, participants: int | None) -> None:
    chosen = config(grouping="benefit", tolerance="auto", participants=participants)
    chosen = replace(chosen, personalize=PersonalizeConfig("if-it-pays", epochs=3))
    whole = run(chosen, tmp_path / "whole")
    assert whole.summary["k"] == 2 and whole.summary["personalized"]["mode"] == "if-it-pays"
    assert whole.serving.distances.splits, "validation losses decided"
    with pytest.raises(Stop):
        run(chosen, tmp_path / "run", observer=StopAfter(1))
    run(chosen, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_a_result_in_memory_saves_its_personal_models(finished: Path, tmp_path: Path) -> None:
    run(tuned()).save(tmp_path / "saved")
    assert contents(tmp_path / "saved") == contents(finished)


def test_one_run_of_fedavg_is_two_baselines() -> None:
    found = run_baselines(run(config(rounds=1)))
    assert list(found) == ["fedavg", "fedavg+ft", "local", "logistic"] and set(found) < set(BASELINES)
    plain, after = found["fedavg"], found["fedavg+ft"]
    assert plain.summary["personalized"]["mode"] == "if-it-pays" and plain.summary["accuracy"]["mean"] == plain.accuracy.mean
    assert after.accuracy == plain.personalized and "personalized" not in found["local"].summary


def test_a_client_that_fails_ends_a_run_that_stops_at_failures() -> None:
    def change(fed: Any, task: str, asked: Any, reply: dict[str, Any]) -> dict[str, Any]:
        return {} if task == "personalize" else reply

    with pytest.raises(ClientError, match="site-0"):
        personal(LyingFederation(tiny(), liar="site-0", lie=change, on_failure="stop"))
