from __future__ import annotations

import hashlib
import pickle

import pytest
import torch

from emdcfl.core.keys import NodeSecret, digest, generator, global_seed, keyed_int


def test_keys_do_not_run_into_each_other() -> None:
    assert digest("a", "bc") != digest("ab", "c")
    seen = {keyed_int(s, c, r, p) for s in (0, 1) for c in ("a", "b", "") for r in (0, 1, 11) for p in ("x", "y")}
    assert len(seen) == 2 * 3 * 3 * 2
    assert all(0 <= k < 2**63 for k in seen)


def test_draws_are_fixed_for_all_time() -> None:
    by_hand = hashlib.sha256(b"".join(len(p).to_bytes(8, "big") + p for p in (b"0", b"site-1", b"3", b"shuffle"))).digest()
    assert keyed_int(0, "site-1", 3, "shuffle") == int.from_bytes(by_hand[:8], "big") >> 1 == 5078177129813674004
    assert generator(3, "site-1", 2, "shuffle").permutation(10).tolist() == [3, 9, 4, 7, 5, 6, 2, 8, 1, 0]


def test_global_seed_is_given_back() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with global_seed(1):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with global_seed(1):
        assert torch.equal(torch.rand(3), inside)


def test_every_gpu_is_seeded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the ones that are not the current device: ``--device cuda:1`` draws its dropout there."""
    gpus = tuple(torch.Generator().manual_seed(k) for k in (5, 6))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda d: gpus[d].get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, d: gpus[d].set_state(state))
    before = [gpu.get_state() for gpu in gpus]
    with global_seed(1):
        assert [gpu.initial_seed() for gpu in gpus] == [1, 1]
    assert all(torch.equal(gpu.get_state(), state) for gpu, state in zip(gpus, before, strict=True))


def test_secrets_are_apart_from_the_seed_and_never_shown() -> None:
    secret = NodeSecret.simulated(0, "a")
    raw = digest("simulated node secret", 0, "a")
    for text in (repr(secret), str(secret), f"{secret}", f"{[secret]}", f"{ {'secret': secret} }"):
        assert raw.hex() not in text and repr(raw) not in text and "NodeSecret(…)" in text
    assert secret.derive("x") != secret.derive("y")
    assert secret.derive("x") == NodeSecret.simulated(0, "a").derive("x")
    assert secret.derive("x") not in (digest("x"), digest(0, "a", "x"))
    assert NodeSecret.simulated(0, "b").derive("x") != secret.derive("x") != NodeSecret.simulated(1, "a").derive("x")
    assert pickle.dumps(secret)  # may travel to a worker of the same user


def test_a_secret_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, got 3"):
        NodeSecret(b"abc")
