"""The Flower session of a run: the grid, how requests are sent, which key is whose. The ``ServerApp`` enters it, the runner uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emdcfl.core.errors import ConfigError
from emdcfl.data import scenarios
from emdcfl.data.types import Scenario
from emdcfl.engines.flower.connected import ConnectedNodes
from emdcfl.engines.flower.federation import FlowerFederation
from emdcfl.engines.flower.messages import MessageSettings, Messenger
from emdcfl.engines.flower.survey import FILE, Survey
from emdcfl.privacy.keylist import KeyList

if TYPE_CHECKING:
    from flwr.serverapp import Grid


class Session:
    """The connection of a ``ServerApp`` to its nodes, and the federations that used it.

    A survey that is stored in ``state``, a folder of the run directory, is not made again.
    """

    def __init__(self, grid: Grid, settings: MessageSettings, keys: KeyList, state: Path | None = None) -> None:
        self.connected = ConnectedNodes(Messenger(grid, settings), keys)
        self._file = None if state is None else state / FILE
        self.stored = self._file is not None and self._file.exists()
        self.survey = Survey.read(self._file) if self._file is not None and self.stored else None
        self.federations: list[FlowerFederation] = []

    def keep_survey(self) -> None:
        """Store the survey with the run, before its first round."""
        if self.survey is not None and self._file is not None and not self._file.exists():
            self.survey.write(self._file)

    def traffic(self) -> dict[str, dict[str, int]]:
        """Bytes sent and received, and requests, by task."""
        total: dict[str, Counter[str]] = {}
        for fed in self.federations:
            for task, (sent, received, requests) in fed.task_traffic.items():
                total.setdefault(task, Counter()).update(sent=sent, received=received, requests=requests)
        return {task: dict(count) for task, count in total.items()}


_CURRENT: ContextVar[Session | None] = ContextVar("flower session", default=None)


@contextmanager
def session(entered: Session) -> Iterator[Session]:
    """Make a session the current one for a block."""
    token = _CURRENT.set(entered)
    try:
        yield entered
    finally:
        _CURRENT.reset(token)


def current() -> Session:
    found = _CURRENT.get()
    if found is None:
        raise ConfigError("engine 'flower' runs inside a federation; start it with: emdcfl run --engine flower --federation DIR")
    return found


def connect(
    scenario: Scenario, source: tuple[str, Mapping[str, Any]], *, run: str, threads: int, precision: str, seed: int, **options: Any
) -> FlowerFederation:
    """Return the federation of the nodes that hold a scenario's sites.

    The server knows names, network and preprocessing of the scenario; its samples, if it has any, are not used. ``source``, the scenario's
    name and options, is how a node finds its data. ``options`` are those of ``Federation``.
    """
    here = current()
    job = {
        "run": run,
        "seed": seed,
        "precision": precision,
        "threads": threads,
        "model": scenario.model.as_dict(),
        "preprocess": scenario.preprocess.as_dict(),
        "data": _data(scenario, *source),
    }
    about = {"truth": scenario.groups, "k": scenario.k, "seed": seed, **options}
    clients = [site.name for site in scenario.sites]
    fed = FlowerFederation(here.connected, clients, scenario.model, job=job, **about)
    fed.wait_for_clients()
    here.federations.append(fed)
    return fed


def _data(scenario: Scenario, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if not any(len(site.train) for site in scenario.sites):  # surveyed: only the nodes have the samples
        return {"encoding": dict(scenario.encoding), "classes": list(scenario.classes), "seed": int(options.get("data_seed", 0))}
    given = dict(options)
    if "model" in scenarios.options(name):
        given.setdefault("model", scenario.model.name)
    return {"scenario": name, "options": given}
