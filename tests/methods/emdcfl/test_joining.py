from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.methods.toy import FlakyFederation, history
from tests.tiny import TRAINING, federation, tiny

from emdcfl.clustering import joined, neighbourhoods
from emdcfl.core.errors import DataError
from emdcfl.methods import make


def cliques(labels: list[int]) -> np.ndarray[Any, Any]:
    return np.equal.outer(labels, labels).astype(float)


def test_newcomers_join_their_group_or_found_one() -> None:
    labels, sets = joined(cliques([0, 0, 1, 1, 0, 2, 2]), [0, 0, 1, 1, -1, -1, -1])
    assert labels.tolist() == [0, 0, 1, 1, 0, 2, 2]
    assert sets == [(0, 1, 4), (2, 3), (5, 6)]


def test_one_refusal_keeps_a_newcomer_out_and_disturbs_nobody() -> None:
    m = cliques([0, 0, 0, 0])
    m[3, 1] = m[1, 3] = 0
    labels, sets = joined(m, [0, 0, 0, -1])
    assert labels.tolist() == [0, 0, 0, 1] and sets == [(0, 1, 2), (3,)]
    assert len(neighbourhoods(m)[1]) == 3  # the paper's rule would split the old cluster


def test_members_not_compared_do_not_count_but_one_must_have_been() -> None:
    m = cliques([0, 0, 0])
    m[2, 1] = m[1, 2] = np.nan
    assert joined(m, [0, 0, -1])[0].tolist() == [0, 0, 0]
    m[2, 0] = m[0, 2] = np.nan
    assert joined(m, [0, 0, -1])[0].tolist() == [0, 0, 1]


def test_existing_labels_stay_even_where_links_say_otherwise() -> None:
    assert joined(cliques([0, 0, 0]), [0, 1, 1])[0].tolist() == [0, 1, 1]
    with pytest.raises(DataError, match="one label per client"):
        joined(cliques([0, 0]), [0])


def play(fed: Any, rounds: int, **options: Any) -> list[Any]:
    return history(fed, make("emdcfl", **options), rounds)


def test_clients_seen_later_train_from_theta0_join_and_leave_the_labels_of_the_others() -> None:
    fed = federation(tiny(clients_per_group=4), participants=3)
    states = play(fed, 6, joining="keep")
    for before, after in itertools.pairwise(states):
        for client, label in before.labels.items():
            assert after.labels[client] == label
    assert len(states[-1].labels) > 3
    truth = fed.truth
    assert truth is not None
    for members in states[-1].sets:
        assert len({truth[c] for c in members}) == 1
    regrouped = play(federation(tiny(clients_per_group=4), participants=3), 6)[-1]
    assert {frozenset(s) for s in regrouped.sets} == {frozenset(s) for s in states[-1].sets}


def test_a_client_that_left_keeps_its_place() -> None:
    fed = FlakyFederation(tiny(), fails={"site-1": (2, 3)}, training=TRAINING, device="cpu", on_failure="continue")
    states = play(fed, 3, joining="keep")
    assert states[3].labels == states[1].labels and states[3].labels["site-1"] == states[3].labels["site-0"]
    assert "site-1" in states[3].sets[states[3].labels["site-1"]]
