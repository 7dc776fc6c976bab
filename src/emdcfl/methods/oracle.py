r"""Oracle: FedAvg inside the true groups. An upper bound, possible only where the truth is known.

.. math:: \theta_k \leftarrow \sum_{c\in S^*_k} n_c\,\theta_c / \sum_{c\in S^*_k} n_c

The groups come from the scenario. Under partial participation a client is alone with θ⁰ until it is first seen, and a
member absent in a round contributes its latest local state, exactly as in EMD-CFL. Clients send their state and :math:`n_c`, and
learn their group's model, with which they are served.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from emdcfl.core.errors import ConfigError
from emdcfl.core.federation import Federation, Round
from emdcfl.methods.base import Clustered, ClusteredMethod, average_sets, register

NO_GROUPS = "oracle needs the true groups and these data have none; use emdcfl, fedavg or local"


@register
@dataclass(frozen=True)
class Oracle(ClusteredMethod):
    """Known groups.

    Parameters
    ----------
    aggregate : "latest" or "participants"
        Under partial participation: average every member's latest local state, or only this round's.
    """

    aggregate: Literal["latest", "participants"] = "latest"

    name: ClassVar[str] = "oracle"
    citation: ClassVar[str] = "known groups; an upper bound"

    def init(self, fed: Federation, round: Round) -> Clustered:
        if fed.truth is None:
            raise ConfigError(NO_GROUPS)
        return Clustered(list(fed.clients), fed.initial())

    def step(self, fed: Federation, state: Clustered, round: Round) -> Clustered:
        replies = fed.train({c: state.start(c) for c in round.participants})
        state = replace(state, n={**state.n, **replies.column("n")})
        assert fed.truth is not None
        seen = [c for c in state.clients if c in state.n]
        order = list(dict.fromkeys(fed.truth[c] for c in seen))
        sets = [[c for c in seen if fed.truth[c] == group] for group in order]
        labels = {c: order.index(fed.truth[c]) for c in seen}
        keep = not fed.everyone_answers
        return average_sets(state, sets, labels, replies.column("theta"), keep=keep, members=self.aggregate, guard=fed.guard)
