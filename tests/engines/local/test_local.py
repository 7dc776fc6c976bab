from __future__ import annotations

import copy
import os
import pickle
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.methods.toy import history
from tests.tiny import TRAINING, same, same_bits, tiny
from torch import Tensor, nn

from emdcfl.core import tasks
from emdcfl.core.client import Client, task
from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.core.schema import Field, Reply
from emdcfl.data.scenarios import build
from emdcfl.data.types import Split
from emdcfl.engines.cuda.layers import pool_first as pool_with_bias_first
from emdcfl.engines.local import ProcessFederation, SequentialFederation, pooling, processes, sequential
from emdcfl.engines.local.processes import from_wire, to_wire
from emdcfl.engines.local.sequential import arithmetic, intra_op_threads, pick_device
from emdcfl.methods import make
from emdcfl.models.recipe import recipe_of

OPTIONS: dict[str, Any] = {"training": TRAINING, "device": "cpu"}


@task(phase="evaluate", returns={"value": Field(int), "optional": Field(str, optional=True)})
def misbehave(client: Client, *, how: str) -> Reply:
    """Answer, or do something that no client should."""
    if client.name == "site-1":
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise Unpicklable("two\nlines")
        if how == "send":
            return {"value": 1, "optional": lambda: None}
    return {"value": torch.get_num_threads()}


@task(phase="evaluate", returns={"seen": Field(int)})
def sign(client: Client, *, book: str, wait_for: int) -> Reply:
    """Leave one's name in a folder, and wait until so many have done the same; a minute is long enough for any machine."""
    (Path(book) / client.name).touch()
    end = time.monotonic() + 60
    while (seen := len(list(Path(book).iterdir()))) < wait_for and time.monotonic() < end:
        time.sleep(0.01)
    return {"seen": seen}


@task(phase="evaluate", returns={"value": Field(int)})
def misplaced(client: Client) -> Reply:
    """Claim to be in a module that does not exist."""
    return {"value": 1}


misplaced.__module__ = "no_such_module"


class Unpicklable(Exception):
    """An error that cannot travel between processes."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.hook = lambda: None

    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


def play(fed: Any, name: str, rounds: int, **options: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """Return the last state, test scores of its first model, and that model fine-tuned at every client."""
    state = history(fed, make(name, **options), rounds)[-1]
    everybody: dict[str, dict[str, Any]] = {c: {} for c in fed.clients}
    served = {"models": state.models[:1], "weights": torch.ones(1)}
    tuned = fed.run(tasks.personalize, everybody, training=TRAINING.as_dict(), always=True, **served)
    return state, fed.run(tasks.test, everybody, **served).valid, tuned.column("theta")


@pytest.mark.slow
def test_worker_processes_give_the_same_bits() -> None:
    scenario = build("tiny", model="tests.tiny:tiny_bn", clients_per_group=2, n=(80, 49), val=(70, 20))
    with (
        SequentialFederation(scenario, number=3, **OPTIONS) as here,
        ProcessFederation(scenario, workers=2, number=3, **OPTIONS) as there,
    ):
        for options in ({}, {"grouping": "benefit"}):
            expected, got = (play(fed, "emdcfl", 3, **options) for fed in (here, there))
            assert same(expected, got)
            assert torch.isfinite(expected[0].W).any()


@pytest.mark.slow
def test_a_worker_may_be_ahead_of_another_and_its_trouble_has_a_name(tmp_path: Path) -> None:
    with ProcessFederation(tiny(clients_per_group=6), workers=2, on_failure="continue", threads=2, **OPTIONS) as fed:
        fed.begin(2)
        everybody: dict[str, dict[str, Any]] = {c: {} for c in fed.clients}
        others = tuple(c for c in fed.clients if c != "site-1")
        unknown = fed.run(misplaced, everybody)
        assert list(unknown.failures) == list(fed.clients)
        assert all("no_such_module" in failure.reason for failure in unknown.failures.values())

        # site-1, on the other worker than site-0, stays until site-0, -2, -4 and -6 have been there
        signed = fed.run(sign, {c: {"book": str(tmp_path), "wait_for": 5 if c == "site-1" else 0} for c in fed.clients})
        assert signed["site-1"]["seen"] >= 5
        assert signed.clients == fed.clients  # and are handed on in order

        assert fed.run(misbehave, everybody, how="well").column("value") == dict.fromkeys(fed.clients, 2)  # threads

        raised = fed.run(misbehave, everybody, how="raise")
        assert raised.clients == others
        assert str(raised.failures["site-1"]) == "client 'site-1' failed in round 2 (misbehave): Unpicklable: two lines"

        unsent = fed.run(misbehave, everybody, how="send")
        assert unsent.clients == others
        assert "its reply cannot be sent" in unsent.failures["site-1"].reason

        for _ in range(2):  # when it dies, and when it is dead
            dead = fed.run(misbehave, everybody, how="die")
            assert dead.clients == fed.clients[::2]
            assert tuple(dead.failures) == fed.clients[1::2]  # those that lived there
            assert all("worker process died" in f.reason for f in dead.failures.values())
        fed.on_failure = "stop"
        with pytest.raises(ClientError, match="client 'site-1' failed"):
            fed.run(misbehave, everybody, how="die")
    assert fed._workers == []


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    message = r"client 'site-0' failed .* its worker could not start: ModelError: unknown model 'tiny_bn'"
    fed = ProcessFederation(tiny(model="tiny_bn"), workers=1, **OPTIONS)  # the name is registered in this process alone
    with fed, pytest.raises(ClientError, match=message):
        fed.train({"site-0": fed.initial()})
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_busy_workers_are_waited_for_together(tmp_path: Path) -> None:
    fed = ProcessFederation(tiny(), workers=3, **OPTIONS)
    fed.run(tasks.describe, {c: {} for c in fed.clients})  # all have started
    for pipe, client in zip(fed._pipes, fed.clients, strict=False):
        pipe.send((sign.__name__, sign.__module__, 1, {"book": str(tmp_path), "wait_for": 99}, {client: {}}))
    while len(list(tmp_path.iterdir())) < 3:
        time.sleep(0.05)
    workers, began = list(fed._workers), time.monotonic()
    fed.close(patience=1.0)
    assert time.monotonic() - began < 2.5, "as long as for one"
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.slow
def test_workers_that_die_at_once_are_told_as_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script without ``if __name__ == "__main__":``, whose workers start the script again."""
    monkeypatch.setattr(processes, "_serve", len)  # takes no two arguments: the process ends
    world = tiny()
    split = world.sites[0].train
    large = Split(split.x.repeat(2000, *[1] * (split.x.dim() - 1)), split.y.repeat(2000))  # more than a pipe holds
    world = replace(world, sites=tuple(replace(site, train=large) for site in world.sites))
    with ProcessFederation(world, workers=2, on_failure="continue", **OPTIONS) as fed:
        said = fed.run(tasks.describe, {c: {} for c in fed.clients})
    assert not said.valid and all("__main__" in failure.reason for failure in said.failures.values())


def test_a_model_that_no_worker_can_import_is_refused_before_any_starts() -> None:
    scenario = replace(tiny(), model=recipe_of(lambda: nn.Linear(2, 3)))
    with pytest.raises(ConfigError, match=r"expected a model that worker processes can import.*leave workers at 1"):
        ProcessFederation(scenario, workers=2, **OPTIONS)


def test_sequential_tasks_use_the_threads_asked_for_and_give_them_back() -> None:
    fed = SequentialFederation(tiny(), threads=2, **OPTIONS)
    assert fed.run(misbehave, {"site-0": {}}, how="well")["site-0"]["value"] == 2
    assert torch.get_num_threads() == 1
    with intra_op_threads(2):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", False), ("bf16", False), ("tf32", True)])
def test_on_cuda_the_precision_asked_for_decides_about_tf32(precision: str, tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    with arithmetic(torch.device("cuda"), precision):
        assert [switch.allow_tf32 for switch in switches] == [tf32, tf32]
    assert [switch.allow_tf32 for switch in switches] == before
    with arithmetic(torch.device("cpu"), precision):
        assert [switch.allow_tf32 for switch in switches] == before
    asked: list[tuple[torch.device, str]] = []

    def noted(device: torch.device, precision: str) -> AbstractContextManager[None]:
        asked.append((device, precision))
        return nullcontext()

    monkeypatch.setattr(sequential, "arithmetic", noted)
    fed = SequentialFederation(tiny(), precision=precision, **OPTIONS)
    fed.run(misbehave, {"site-0": {}}, how="well")
    assert asked == [(torch.device("cpu"), precision)]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_pooling_before_relu_changes_no_bit(low: bool, stride: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2, stride), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randint(-2, 3, (16, 2, 9, 9)).float()  # with ties
    plain(x)
    exchanged = copy.deepcopy(plain)
    pooling.pool_first(exchanged)
    assert type(exchanged[1]) is nn.MaxPool2d
    assert exchanged.state_dict().keys() == plain.state_dict().keys()
    for module in (plain, exchanged):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            module(x).float().square().sum().backward()
    for a, b in zip(plain.parameters(), exchanged.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) and bool(a.grad.any())
    with torch.no_grad():
        assert torch.equal(plain(x), exchanged(x))


def test_layers_are_left_alone_where_a_network_may_use_what_lies_between() -> None:
    class Tapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            before = self.body[:2](x)
            y: Tensor = self.head(torch.cat([before.mean((2, 3)), self.body[2](before).mean((2, 3))], 1))
            return y

    module, x = Tapped(), torch.randn(4, 1, 6, 6)
    expected = module(x)
    pooling.pool_first(module)
    assert pool_with_bias_first(module) == 0
    assert torch.equal(module(x), expected)


def test_what_several_clients_are_given_travels_once_and_arrives_as_it_was() -> None:
    model, other = torch.arange(100_000.0), torch.arange(100_000.0) + 1
    requests = {f"c{i}": {"theta": model, "rows": [model[:50_000], other]} for i in range(20)}
    wire = to_wire(requests)
    message = pickle.dumps(wire)
    assert len(message) < 3 * model.nbytes  # model, half of it, other; not twenty of each
    arrived = from_wire(pickle.loads(message))  # noqa: S301
    for request in arrived.values():
        assert same_bits(request["theta"], model) and same_bits(request["rows"][0], model[:50_000]) and same_bits(request["rows"][1], other)
    views = from_wire(pickle.loads(pickle.dumps(to_wire([model, model.view(100, 1000), model.view(100, 1000).T]))))  # noqa: S301
    assert [tuple(v.shape) for v in views] == [(100_000,), (100, 1000), (1000, 100)]
    assert same_bits(views[2].contiguous(), model.view(100, 1000).T.contiguous())


def test_devices_that_are_not_there_are_named() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda")
    for name, message in (
        ("gpu", "unknown device 'gpu'; expected auto, cpu, cuda or cuda:N"),
        ("meta", "unsupported device 'meta'"),
        ("cuda:99", r"device 'cuda:99' not found: torch sees \d+ CUDA devices; use --device cpu"),
    ):
        with pytest.raises(ConfigError, match=message):
            pick_device(name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_runs_partial_participation_and_agrees_with_the_cpu() -> None:
    results = {}
    for device in ("cpu", "cuda"):
        with SequentialFederation(tiny(clients_per_group=3), training=TRAINING, device=device, number=2) as fed:
            state, _, _ = play(fed, "emdcfl", 3)
            results[device] = state
            assert make("emdcfl").serve(state).models.device.type == "cpu"
    assert results["cpu"].labels == results["cuda"].labels
    torch.testing.assert_close(results["cpu"].models, results["cuda"].models, rtol=1e-3, atol=1e-4)
