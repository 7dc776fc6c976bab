from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from tests.methods.toy import accuracies, federation, run, toy

from emdcfl.core.params import average
from emdcfl.data.types import Site, Split
from emdcfl.methods import make

GROUPS = [0, 0, 0, 1, 1, 1, 2, 2, 2]


@cache
def oracle():
    """The models Oracle finds."""
    return run("oracle")[2].models


def perfect():
    """A state with these models."""
    fed = federation()
    method = make("ifca")
    return fed, method, replace(method.init(fed, fed.begin(0)), models=oracle().clone())


def test_given_perfect_models_it_keeps_them():
    fed, method, state = perfect()
    for index in (1, 2, 3):
        state = method.step(fed, state, fed.begin(index))
        assert [state.labels[c] for c in fed.clients] == GROUPS
    assert accuracies(fed, method.serve(state)).min() > 0.9


def test_one_round_is_argmin_of_validation_loss_then_fedavg_inside():
    fed, method, before = perfect()
    after = method.step(fed, before, fed.begin(1))
    scores = fed.evaluate(fed.clients, before.models)
    assert {c: int(scores[c]["table"].argmin()) for c in fed.clients} == after.labels
    local = fed.train({c: before.models[after.labels[c]] for c in fed.clients})
    for k in range(3):
        members = [c for c in fed.clients if after.labels[c] == k]
        assert torch.equal(after.models[k], average([local[c]["theta"] for c in members], [local[c]["n"] for c in members]))


def test_a_model_nobody_chose_stays():
    fed, method, state = perfect()
    lost = fed.initial(7) + 3.0
    state = replace(state, models=torch.cat([state.models, lost[None]]))
    state = method.step(fed, state, fed.begin(1))
    assert torch.equal(state.models[3], lost) and state.sets[3] == []
    assert method.serve(state).weights.shape == (9, 4)


def test_redraws_keep_every_model_wanted_and_stop():
    fed = federation()
    method = make("ifca", min_share=0.3)
    state = method.init(fed, fed.begin(0))
    chosen, _ = method._assign(fed, fed.clients, state.models)
    assert np.bincount(list(chosen.values()), minlength=3).min() / 9 >= 0.3
    plain = make("ifca").init(fed, fed.begin(0))
    assert torch.equal(plain.models, torch.stack([fed.initial(i) for i in range(3)]))


def test_where_no_draw_will_do_the_most_even_one_is_taken(caplog):
    scenario = toy(groups=1, per_group=4)
    fed = federation(scenario)
    method = make("ifca", k=4, min_share=0.25, max_restarts=2)
    state = method.init(fed, fed.begin(0))
    assert "no draw of 3" in caplog.text
    draws = [torch.stack([fed.initial(4 * a + i) for i in range(4)]) for a in range(3)]
    shares = [np.bincount(list(method._assign(fed, fed.clients, d)[0].values()), minlength=4).min() for d in draws]
    assert torch.equal(state.models, draws[int(np.argmax(shares))])


def test_the_public_codes_loss_counts_the_small_last_batch_in_full():
    """64 samples that a trained model explains well, and a mislabelled one alone in the last batch: the mean of batch means is misled."""
    scenario = toy(groups=1, per_group=2)
    _, _, trained, _ = run("oracle", scenario)
    val = scenario.sites[0].val
    odd = Split(torch.cat([val.x, val.x[:1]]), torch.cat([val.y, (val.y[:1] + 1) % 4]))
    fed = federation(replace(scenario, sites=tuple(Site(s.name, s.train, odd, s.tests) for s in scenario.sites)))
    models = torch.stack([fed.initial(), trained.models[0]])
    by_sample, _ = make("ifca", k=2)._assign(fed, fed.clients, models)
    by_batch, _ = make("ifca", k=2, preset="reference")._assign(fed, fed.clients, models)
    assert set(by_sample.values()) == {1} and set(by_batch.values()) == {0}


def test_missing_reply_keeps_the_old_label_and_the_unseen_hold_theta0():
    fed, _, state, serving = run("ifca", rounds=2, on_failure="continue", fails={"site-0": (1, 2), "site-5": 2}, min_share=0.2)
    assert "site-0" not in state.labels and "site-5" in state.labels
    assert torch.equal(serving.models[int(serving.weights[0].argmax())], fed.initial())
    assert (serving.clusters == serving.clusters[0]).sum() == 1
