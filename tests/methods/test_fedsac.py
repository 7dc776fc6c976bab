"""FedSaC: PCA bases and the angles between them, its weights, order of clients, and the public code's slips."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from sklearn.decomposition import PCA
from tests.methods.test_pfedgraph import UNEQUAL, by_name, graph, with_batchnorm
from tests.methods.toy import BRIEF, federation, play, run, toy

from emdcfl.core.tasks import Training
from emdcfl.methods import make
from emdcfl.methods.fedsac import train_and_basis
from emdcfl.methods.shared.graph import project_simplex
from emdcfl.methods.shared.subspaces import complementarity, pca_basis


def orthonormal(seed: int, r: int = 3, d: int = 7) -> torch.Tensor:
    q, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, r)))
    return torch.from_numpy(q.T.copy()).float()


def test_basis_is_that_of_scikit_learn() -> None:
    z = np.random.default_rng(0).standard_normal((60, 9)) * np.linspace(1, 3, 9)
    found = pca_basis(torch.from_numpy(z).float(), 3)
    expected = PCA(3).fit(z).components_
    expected *= np.sign(np.take_along_axis(expected, np.abs(expected).argmax(1)[:, None], 1))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_basis_is_short_where_the_data_span_little() -> None:
    z = torch.randn(20, 1, generator=torch.Generator().manual_seed(0)) * torch.arange(5.0)
    assert pca_basis(z, 3).shape == (1, 5)
    assert pca_basis(torch.ones(20, 5), 3).shape == (0, 5)
    assert pca_basis(z[:2], 3).shape == (1, 5)


def test_angles_are_the_principal_ones_whatever_the_signs() -> None:
    bases = [orthonormal(seed) for seed in range(3)]
    c = complementarity(bases)
    for i in range(3):
        for j in range(3):
            expected = np.cos(subspace_angles(bases[i].double().numpy().T, bases[j].double().numpy().T).mean())
            assert float(c[i, j]) == pytest.approx(expected, abs=1e-3)
    flipped = [bases[0], bases[1] * torch.tensor([[-1.0], [1.0], [-1.0]]), bases[2].flip(0)]
    torch.testing.assert_close(complementarity(flipped), c, rtol=1e-5, atol=1e-5)


def test_greedy_angles_count_a_flipped_direction_as_opposite() -> None:
    e = torch.eye(5)[:3]
    flipped = e * torch.tensor([[1.0], [1.0], [-1.0]])
    assert float(complementarity([e, flipped], "greedy")[0, 1]) == pytest.approx(np.cos(np.pi / 3))
    assert float(complementarity([e, flipped])[0, 1]) == pytest.approx(1.0)


def test_greedy_angles_pair_the_largest_cosines_first() -> None:
    table = np.array([[0.9, 0.8, 0.1], [0.85, -0.2, 0.3], [0.0, 0.4, -0.5]])
    # 0.9 takes row 0 and column 0; of the rest 0.4 takes row 2 and column 1, which leaves 0.3.
    a, b = torch.eye(3), torch.from_numpy(table.T.copy()).float()
    expected = np.cos(np.mean(np.arccos([0.9, 0.4, 0.3])))
    assert float(complementarity([a, b], "greedy")[0, 1]) == pytest.approx(expected, abs=1e-6)


def test_an_empty_subspace_has_nothing_in_common_with_others() -> None:
    c = complementarity([orthonormal(0), torch.zeros(0, 7)])
    assert c.tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("options", [{}, {"lambda1": 0.5, "lambda2": 1.6, "components": 2}], ids=str)
def test_a_round_follows_the_equations(options: dict[str, Any]) -> None:
    fed = federation(toy(n=UNEQUAL), training=BRIEF)
    method = make("fedsac", snap=None, **options)
    state, _ = play(fed, method, 1)
    new = method.step(fed, state, fed.begin(2))
    terms = {c: {"cosine": {"anchor": theta, "mu": 0.01}} for c, theta in by_name(state).items()}
    local = fed.train(by_name(state), own=terms).stack("theta")
    bases = []
    for theta, client in zip(local, fed._clients.values(), strict=True):
        z = client.embeddings(theta, "train", torch.arange(len(client.site.train)))
        bases.append(PCA(options.get("components", 3)).fit(z.double().numpy()).components_)
    c = np.array([[np.cos(np.arccos(np.linalg.svd(a @ b.T)[1].clip(0, 1)).mean()) for b in bases] for a in bases])
    np.fill_diagonal(c, 1.0)
    updates = (local - state.theta0).double()[:, fed.layout.trainable].numpy()
    unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    l1, l2 = options.get("lambda1", 0.9), options.get("lambda2", 1.4)
    x = project_simplex(np.array(UNEQUAL) / sum(UNEQUAL) + (l2 * unit @ unit.T - l1 * c) / 2)
    weights = graph(method, fed, state, 2)
    np.testing.assert_allclose(weights.numpy(), x, atol=2e-3)
    torch.testing.assert_close(new.models, (weights @ local.double()).float())


def test_without_complementarity_it_is_pfedgraph() -> None:
    scenario = toy(n=UNEQUAL)
    sac = run("fedsac", scenario, rounds=3, lambda1=0.0, lambda2=1.25, training=BRIEF)[2]
    plain = run("pfedgraph", scenario, rounds=3, alpha=0.8, training=BRIEF)[2]
    torch.testing.assert_close(sac.models, plain.models)


def test_complementarity_moves_weight_to_other_subspaces() -> None:
    fed = federation(toy(n=UNEQUAL), training=BRIEF)
    asked = {c: fed.initial() for c in fed.clients}
    bases = fed.train(asked, task=train_and_basis, components=3, mode="eval").column("basis")
    c = complementarity(list(bases.values())).numpy()
    with_term, without = (graph(make("fedsac", snap=-1.0, lambda1=v), fed).numpy() for v in (0.9, 0.0))
    moved = with_term - without
    assert all(np.corrcoef(moved[i], c[i])[0, 1] < -0.5 for i in range(9))


@pytest.mark.slow
def test_reference_prefers_strangers_on_networks_with_batchnorm() -> None:
    training = Training(local_epochs=10, batch_size=8, lr=0.01)
    truth = np.repeat([0, 1, 2], 3)
    same = truth[:, None] == truth[None, :]
    shares = {}
    for preset in (None, "reference"):
        weights = graph(make("fedsac", preset=preset), federation(with_batchnorm(toy()), training=training)).numpy()
        shares[preset] = float((weights * same).sum(1).mean())
    assert shares[None] > 0.9 and shares["reference"] < 0.5, shares


def test_training_mode_embeddings_differ_and_do_not_leak_into_the_state() -> None:
    fed = federation(with_batchnorm(toy()), training=BRIEF)
    fed.begin(1)
    asked = {c: fed.initial() for c in fed.clients}
    a = fed.train(asked, task=train_and_basis, components=3, mode="eval")
    b = fed.train(asked, task=train_and_basis, components=3, mode="train")
    plain = fed.train(asked)
    assert torch.equal(a.stack("theta"), plain.stack("theta")) and torch.equal(b.stack("theta"), plain.stack("theta"))
    assert not torch.equal(a.stack("basis"), b.stack("basis"))
