"""CFL's tree of splits, and the protocol for clients that were absent when their cluster split.

A node of the tree is named by the way to it from the root: one character 0 or 1 for each split. A client that was absent keeps the model
from before the split. When it next takes part it trains from that model once more, goes to the side whose mean update has the larger
cosine with its own, and so on down to a leaf. A client first seen after a split comes down from the root in the same way. A node that has
split is kept only while a client may still come down through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from emdcfl.core import tasks
from emdcfl.core.federation import Federation
from emdcfl.core.params import Scope, average, cosines
from emdcfl.core.schema import Reply
from emdcfl.methods.base import Clustered
from emdcfl.methods.shared.vectors import sets_of, update_gram

ROOT = ""


@dataclass(frozen=True)
class SplitState(Clustered):
    """``Clustered`` over the nodes of the tree."""

    paths: list[str] = field(default_factory=list)
    """For each model, its node."""
    founded: dict[str, Tensor] = field(default_factory=dict)
    """Path → plain mean of the members' states when the node was split off, for those who were absent then."""
    founded_steps: dict[str, float] = field(default_factory=dict)
    """Path → mean number of the steps they had made."""


AnySplit = TypeVar("AnySplit", bound=SplitState)


@dataclass
class SplitTree:
    """The tree during a round: models by path, and where each client is."""

    models: dict[str, Tensor]
    at: dict[str, str]
    founded: dict[str, Tensor]
    founded_steps: dict[str, float]

    @classmethod
    def from_state(cls, state: SplitState) -> SplitTree:
        """Unfold a state."""
        at = {c: state.paths[i] for c, i in state.labels.items()}
        return cls(dict(zip(state.paths, state.models, strict=True)), at, dict(state.founded), dict(state.founded_steps))

    def to_state(self, state: AnySplit, n: Mapping[str, int]) -> AnySplit:
        """Drop the nodes that no client will come through again, and fold the tree into the state."""
        self._prune(unseen=len(self.at) < len(state.clients))
        paths = sorted(self.models)
        labels = {c: paths.index(self.at[c]) for c in state.clients if c in self.at}
        return replace(
            state,
            n=dict(n),
            labels=labels,
            sets=sets_of(state.clients, labels, len(paths)),
            models=torch.stack([self.models[path] for path in paths]),
            paths=paths,
            founded=self.founded,
            founded_steps=self.founded_steps,
        )

    def split_off(self, child: str, model: Tensor, members: Mapping[str, Tensor], steps: Sequence[float]) -> None:
        """Add a child with its model and members; their plain mean is kept for those who are absent."""
        self.models[child] = model
        self.founded[child] = average(list(members.values()), [1.0] * len(members))
        self.founded_steps[child] = sum(steps) / len(members)
        self.at |= dict.fromkeys(members, child)

    def descend(self, fed: Federation, clients: Sequence[str], scope: Scope) -> tuple[dict[str, str], dict[str, int]]:
        """Lead the clients at nodes that have split down to a leaf; returns where each is, and n of those who trained on the way.

        Those who do not answer on the way do not take part.
        """
        position, n = {c: self.at.get(c, ROOT) for c in clients}, {}
        while walking := [c for c, path in position.items() if self._has_split(path)]:

            def fold(client: str, reply: Reply) -> None:
                above = position[client]
                sides = [above + "0", above + "1"]
                rows = [reply["theta"], *(self.founded[side] for side in sides)]
                steps = [float(reply["steps"]), *(self.founded_steps[side] for side in sides)]
                alike = cosines(update_gram(fed.layout, rows, self.models[above], steps, scope))
                position[client] = sides[int(alike[0, 2] > alike[0, 1])]
                n[client] = reply["n"]

            inputs = {c: {"theta": self.models[position[c]]} for c in walking}
            answered = fed.run(tasks.train, inputs, fold=fold, training=fed.training.as_dict())
            for c in walking:
                if c not in answered.valid:
                    del position[c]
        return position, n

    def _has_split(self, path: str) -> bool:
        return path + "0" in self.models

    def _prune(self, *, unseen: bool) -> None:
        occupied = {*self.at.values(), *([ROOT] if unseen else [])}
        for path in [p for p in self.models if self._has_split(p)]:
            if not any(path.startswith(above) for above in occupied):
                del self.models[path]
                for child in (path + "0", path + "1"):
                    del self.founded[child], self.founded_steps[child]
