"""The reference engine: one process, one client after the other, with a fixed number of threads (one by default)."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from emdcfl.core.client import Client, TaskInfo
from emdcfl.core.errors import ConfigError, EmdcflError
from emdcfl.core.federation import Failure, Federation, Inputs
from emdcfl.core.keys import NodeSecret, global_seed
from emdcfl.core.params import Network
from emdcfl.core.schema import Reply
from emdcfl.data.types import Scenario
from emdcfl.engines.local.pooling import pool_first


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Fix the number of threads of torch's operators, on which float sums depend."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def arithmetic(device: torch.device, precision: str) -> Iterator[None]:
    """Compute in the precision asked for: on CUDA, torch runs float32 convolutions in TF32 unless told otherwise."""
    if device.type != "cuda":
        yield
        return
    switches: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


def pick_device(name: str) -> torch.device:
    """Return the device asked for; ``"auto"`` takes CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}; expected auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unsupported device {name!r}; expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(f"device {name!r} not found: torch sees {torch.cuda.device_count()} CUDA devices; use --device cpu")
    return device


def simulated_clients(scenario: Scenario, names: list[str], network: Network, *, seed: int, run: str, precision: str) -> dict[str, Client]:
    """Build the named clients of a scenario around one network, with secrets derived from the seed."""
    if network.device.type == "cpu":
        pool_first(network.module)
    sites = {site.name: site for site in scenario.sites}
    return {
        name: Client(
            sites[name], network, scenario.preprocess, seed=seed, secret=NodeSecret.simulated(seed, name), run=run, precision=precision
        )
        for name in names
    }


def answer(client: Client, info: TaskInfo, round: int, inputs: Mapping[str, Any]) -> Reply | Failure:
    """Run one task of one client; an error becomes a ``Failure`` that names the client and the task."""
    try:
        client.begin(round)
        with arithmetic(client.network.device, client.precision):
            return info.run(client, **inputs)
    except Exception as error:  # a client's bug must not take the server down
        return failure(client, info.name, round, error)


def failure(client: Client, task: str, round: int, error: Exception) -> Failure:
    """Return the ``Failure`` that an error in a task is; one that is not for users is a bug, and named by its type."""
    reason = one_line(error) if isinstance(error, EmdcflError) else f"{type(error).__name__}: {one_line(error)}"
    return Failure(client.name, task, round, reason, "".join(traceback.format_exception(error)))


def one_line(error: BaseException | str) -> str:
    """Return an error's message on one line; torch's run over several."""
    return " ".join(str(error).split())


class SequentialFederation(Federation):
    """Every client in this process, one after the other: the reference that tests compare the other engines with."""

    def __init__(
        self, scenario: Scenario, *, device: str = "auto", threads: int = 1, run: str = "run", precision: str = "fp32", **options: Any
    ) -> None:
        super().__init__([s.name for s in scenario.sites], scenario.model, truth=scenario.groups, k=scenario.k, **options)
        self.threads = threads
        with global_seed(0):
            network = Network(scenario.model, pick_device(device))
        self._clients = simulated_clients(scenario, list(self.clients), network, seed=self.seed, run=run, precision=precision)
        self.device = network.device

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        for name, own in inputs.items():
            with intra_op_threads(self.threads):
                reply = answer(self._clients[name], info, self.index, {**common, **own})
            yield name, reply

    def memory(self) -> dict[str, float]:
        """Return GiB of GPU memory in use and at most in use so far, where there is a GPU."""
        if self.device.type != "cuda":
            return {}
        allocated, peak = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        return {"allocated": allocated / 2**30, "peak": peak / 2**30}
