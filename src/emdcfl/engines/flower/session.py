"""The Flower session of a run: the grid, how requests travel, whose key is whose. Set by the ``ServerApp``, used by the runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from emdcfl.core.errors import ConfigError
from emdcfl.data import scenarios
from emdcfl.data.types import Scenario
from emdcfl.engines.flower.federation import FlowerFederation
from emdcfl.engines.flower.post import Wire
from emdcfl.privacy.keylist import KeyList

if TYPE_CHECKING:
    from flwr.serverapp import Grid

NODES = "nodes"
"""The scenario in which every client is a node with files of its own."""


@dataclass
class Session:
    """What a ``ServerApp`` was given. ``federations`` collects what was connected, for the account at the end."""

    grid: Grid
    wire: Wire
    keys: KeyList
    federations: list[FlowerFederation] = field(default_factory=list)


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
    """Return the session this code runs in."""
    found = _CURRENT.get()
    if found is None:
        raise ConfigError("engine 'flower' runs inside a federation; start it with: emdcfl run --engine flower --federation DIR")
    return found


def connect(
    scenario: Scenario, source: tuple[str, Mapping[str, Any]], *, run: str, threads: int, precision: str, seed: int, **options: Any
) -> FlowerFederation:
    """Return the federation of the nodes that hold a scenario's sites.

    Parameters
    ----------
    scenario : Scenario
        What the server knows: names, network, preprocessing. Its samples, if it has any, are not used.
    source : (name, options)
        How a node finds its data: the scenario's name and options.
    run, threads, precision, seed
        What every client needs to know.
    **options
        Those of ``Federation``.
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
    fed = FlowerFederation(
        here.grid, [site.name for site in scenario.sites], scenario.model, job=job, wire=here.wire, keys=here.keys, **about
    )
    fed.gather()
    here.federations.append(fed)
    return fed


def _data(scenario: Scenario, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if name == NODES:
        return {"encoding": dict(scenario.encoding), "classes": list(scenario.classes), "seed": int(options.get("data_seed", 0))}
    given = dict(options)
    if "model" in scenarios.options(name):
        given.setdefault("model", scenario.model.name)
    return {"scenario": name, "options": given}
