"""What a node has released, counted on disk: under how many models, in how many runs, with how many requests.

A model chosen for it shows a row of a projection R; as many as R has rows show all of it. So counts hold for all requests of a run and
for all runs, across rounds, processes and restarts. Files below the node's ``state``::

    released.json             runs the node took part in, and models it embedded its data with, in all
    <run>/releases.json       models of this run, by task and client; its requests; partners' projections
    <run>/run.key             secret of this run (``privacy.exchange``); without it the run is over at this node
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emdcfl.core.files import locked, replace_text
from emdcfl.core.keys import NodeSecret, digest
from emdcfl.core.replies import brief
from emdcfl.engines.flower.node.policy import Policy, PolicyError
from emdcfl.privacy.exchange import load_secret

ALL, KEY = "released.json", "run.key"

OWN = "*"
"""Whose model ``reference`` embeds with."""

DAY = 86400.0


class Releases:
    """The counts of one run, whose name the server chose, and those of all runs, in the folder ``state`` of the node's home."""

    def __init__(self, state: Path, run: str) -> None:
        self.state, self.run = state, run
        self.folder = state / digest(run).hex()[:16]
        self._key, self._all, self._here = self.folder / KEY, state / ALL, self.folder / "releases.json"

    def admit(self, policy: Policy, task: str, round: int, job: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Count a request, or raise ``PolicyError`` if it is one too many."""
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(self._all):  # messages may be separate processes
            total, here = _read(self._all), _read(self._here)
            runs = total.setdefault("runs", {})
            _expire(self.state, policy)
            self._open(policy, runs)
            if here.setdefault("seed", job["seed"]) != job["seed"]:
                raise PolicyError(f"this run has the seed {here['seed']}, which orders the samples, got {job['seed']}; start another run")
            here["requests"] = here.get("requests", 0) + 1
            _limit(here["requests"], "answers at most {most} requests of a run", "requests_per_run", policy.requests_per_run)
            counted = "reference" if task == "recalibrate" else task  # the same samples under the client's own model
            added = _add(here.setdefault("models", {}).setdefault(counted, {}), _wanted(task, job, inputs), round, policy)
            total["models"] = total.get("models", 0) + added
            _limit(total["models"], "embeds its data with at most {most} models in all runs", "models_in_all", policy.models_in_all)
            load_secret(self._key)
            os.utime(self._key)
            replace_text(self._all, json.dumps(total))
            replace_text(self._here, json.dumps(here))

    def _open(self, policy: Policy, runs: dict[str, Any]) -> None:
        """Enter the run in the list of all, if it is new and the policy allows another."""
        if policy.run_names and self.run not in policy.run_names:
            raise PolicyError(f"this node takes part in the runs of policy.run_names alone, got {brief(repr(self.run), 80)}")
        if self.folder.name in runs:
            if not self._key.exists():
                raise PolicyError(
                    f"this run is over at this node: it was not used for {policy.run_days} days (policy.run_days in node.toml), "
                    "and its key is deleted; start a run with another run.seed"
                )
            return
        _limit(len(runs) + 1, "takes part in at most {most} runs", "runs", policy.runs)
        runs[self.folder.name] = {"run": brief(self.run, 80), "since": time.strftime("%Y-%m-%d")}

    def projections(self) -> dict[str, str]:
        """Return a digest of the seed that each partner has sealed for this node in this run."""
        return dict(_read(self._here).get("projections", {}))

    def keep_projections(self, found: Mapping[str, str]) -> None:
        """Remember the partners' seeds, before anything is released under them.

        Raises ``PolicyError`` if a request that was answered meanwhile came with another seed of the same partner.
        """
        if self.projections() == found:
            return
        with locked(self._all):
            known = self.projections()
            if any(known.get(whose, seed) != seed for whose, seed in found.items()):
                raise PolicyError("a partner has one projection in a run, got two in requests at the same time; check the server")
            replace_text(self._here, json.dumps({**_read(self._here), "projections": {**known, **found}}))

    def session(self) -> NodeSecret:
        """Return the secret of this run."""
        return load_secret(self._key)


def expire(state: Path, policy: Policy) -> None:
    """Delete the keys of runs that were not used for long: what was sealed for them cannot be opened any more."""
    if state.is_dir():
        with locked(state / ALL):
            _expire(state, policy)


def _expire(state: Path, policy: Policy) -> None:
    for key in state.glob(f"*/{KEY}"):  # also one whose run could not be entered, on a full disk
        if time.time() - key.stat().st_mtime > policy.run_days * DAY:
            key.unlink(missing_ok=True)


def _wanted(task: str, job: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, str]:
    """Under whose models a request embeds the node's data, and how: all of the job but its name and threads decides about that.

    So do the sizes at which distances are calibrated: those at many sizes tell where in a sample a class occurs.
    So does a partner's key: the server could swap its run's half, and R and the noise of the pair would be others.
    """
    own = task == "recalibrate" or (task == "reference" and not inputs.get("again", False))
    if not own and task != "project":
        return {}
    asked = [{k: v for k, v in job.items() if k not in ("run", "threads")}, dict(inputs["settings"]), inputs.get("sizes")]
    how = json.dumps(asked, sort_keys=True)
    if not own:
        return {str(row): _print(inputs["omegas"][row], how, inputs["keys"][row]) for row in inputs["rows"]}
    pairs = inputs["partners"] if task == "reference" and inputs["settings"].get("projection") != "row" else {}
    return {OWN: _print(inputs["omega"], how)} | {name: _print(inputs["omega"], how, key) for name, key in pairs.items()}


def _add(known: dict[str, dict[str, int]], wanted: Mapping[str, str], round: int, policy: Policy) -> int:
    """Add the models wanted in a round to those known, by client, each in the round that asked first; returns how many are new."""
    added = 0
    for whose, print_ in wanted.items():
        models = known.setdefault(whose, {})
        added += print_ not in models
        models.setdefault(print_, round)
        client = "itself" if whose == OWN else f"client {whose!r}"
        what, now = f"embeds its data with at most {{most}} models of {client} in", list(models.values()).count(round)
        _limit(now, f"{what} round {round}", "models_per_round", policy.models_per_round)
        _limit(len(models), f"{what} this run", "models_per_run", policy.models_per_run)
    partners = sum(first == round for whose, models in known.items() if whose != OWN for first in models.values())
    what = f"embeds its data with at most {{most}} partners' models in round {round}"
    _limit(partners, what, "partners_per_round", policy.partners_per_round)
    return added


def _limit(count: int, what: str, key: str, most: int) -> None:
    if count > most:
        raise PolicyError(
            f"this node {what.replace('{most}', str(most))}, got {count}: start a run with another run.seed, "
            f"or its operator raises policy.{key} in node.toml"
        )


def _print(omega: Any, how: str, key: Any = b"") -> str:
    """Digest of a model and of what decides which samples are embedded and how.

    The same bytes in another type are another model, which would be counted as this one and get its privacy noise.
    """
    if not isinstance(omega, Tensor) or omega.dtype != torch.float32 or not isinstance(key, bytes):
        raise PolicyError("expected an embedding model as a tensor of float32, and a partner's key as bytes; check the server")
    return digest(omega.detach().cpu().contiguous().numpy().tobytes(), how, key).hex()[:32]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("expected an object")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PolicyError(f"this node cannot read what it has released; its operator restores {path.name}") from error
