from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.methods.toy import MORE_STEPS, accuracies, federation, run

from emdcfl.methods import make

TABLES = st.integers(2, 5).flatmap(
    lambda k: st.integers(1, 4).flatmap(lambda b: st.lists(st.lists(st.floats(0, 5), min_size=b, max_size=b), min_size=k, max_size=k))
)


@given(TABLES)
def test_history_grows_by_one_for_the_best_and_by_at_most_one_elsewhere(rows):
    table = torch.tensor(rows, dtype=torch.float32)
    n = 64 * (table.shape[1] - 1) + 10
    best, gained = make("fedce").credit(table, n)
    assert gained[best] == 1.0
    assert (gained > 0).all() and (gained <= 1).all()


def test_credit_by_hand():
    table = torch.tensor([[1.0, 3.0], [1.5, 0.5], [4.0, 4.5]])
    best, gained = make("fedce", delta=0.5).credit(table, 74)  # batches of 64 and 10
    # Sample means: 1.27, 1.36, 4.07. Batch means: 2, 1, 4.25.
    assert best == 0
    expected = [1.0, np.exp(-0.5 * np.hypot(0.5, 2.5)), np.exp(-0.5 * np.hypot(3.0, 1.5))]
    np.testing.assert_allclose(gained.numpy(), expected, rtol=1e-12)


def test_the_public_code_chooses_by_batch_means_and_credits_k_times():
    table = torch.tensor([[1.0, 3.0], [1.5, 0.5], [4.0, 4.5]])
    best, gained = make("fedce", preset="reference").credit(table, 74)
    assert best == 1
    # After candidate 0 the best so far is 0, after 1 and 2 it is 1.
    expected = [1 + np.exp(-0.5 * np.hypot(0.5, 2.5)), 2.0, np.exp(-0.5 * np.hypot(2.5, 4.0))]
    np.testing.assert_allclose(gained.numpy(), expected, rtol=1e-12)


def test_one_round_is_a_softmax_over_clients_for_each_cluster():
    fed = federation()
    method = make("fedce", delta=2.0)
    before = method.init(fed, fed.begin(0))
    after = method.step(fed, before, fed.begin(1))
    local = fed.train({c: before.models[after.labels[c]] for c in fed.clients}).stack("theta").double()
    h = torch.stack([after.h[c] for c in fed.clients])
    torch.testing.assert_close(after.models, (h.softmax(0).T @ local).float(), rtol=1e-5, atol=1e-6)
    assert (h.max(1).values == 1).all()


def test_scores_accumulate_only_for_those_who_trained():
    fed, _, state, serving = run("fedce", rounds=3, on_failure="continue", fails={"site-4": 2, "site-8": (1, 2, 3)})
    assert max(float(state.h[c].max()) for c in fed.clients if c != "site-8") <= 3.0
    assert float(state.h["site-4"].sum()) < float(state.h["site-3"].sum())
    assert "site-8" not in state.h
    assert torch.equal(serving.models[int(serving.weights[8].argmax())], fed.initial())


def test_large_scores_neither_overflow_nor_divide_by_zero():
    fed = federation()
    method = make("fedce")
    state = method.init(fed, fed.begin(0))
    h = {
        c: torch.tensor([2000.0, 0.0, 0.0], dtype=torch.float64) if c == "site-0" else torch.zeros(3, dtype=torch.float64)
        for c in fed.clients
    }
    after = method.step(fed, replace(state, h=h), fed.begin(1))
    local = fed.train({"site-0": state.models[after.labels["site-0"]]})["site-0"]["theta"]
    assert torch.equal(after.models[0], local)
    assert torch.isfinite(after.models).all()


@pytest.mark.slow
def test_a_steep_delta_separates_the_groups():
    fed, _, _, serving = run("fedce", delta=5.0, training=MORE_STEPS)
    assert accuracies(fed, serving).min() > 0.8
