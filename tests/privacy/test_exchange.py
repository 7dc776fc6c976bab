from __future__ import annotations

import pytest

from emdcfl.core.errors import ClientError
from emdcfl.core.keys import NodeSecret
from emdcfl.privacy.exchange import open_sealed, pair_seed, public_key, seal

A, B, EVE = (NodeSecret.simulated(0, name) for name in ("a", "b", "eve"))
CONTEXT = ("run", "a", "b")


def test_what_one_seals_the_other_opens() -> None:
    box = seal(A, public_key(B), b"the seed of R", context=CONTEXT)
    assert open_sealed(B, public_key(A), box, context=CONTEXT) == b"the seed of R"
    assert b"the seed of R" not in box
    assert seal(A, public_key(B), b"the seed of R", context=CONTEXT) != box  # a fresh nonce each time


@pytest.mark.parametrize(
    ("who", "partner", "context", "change"),
    [
        (EVE, A, CONTEXT, None),  # somebody else
        (B, EVE, CONTEXT, None),  # a forged sender
        (B, A, ("run", "b", "a"), None),  # the other direction
        (B, A, ("another run", "a", "b"), None),  # replayed from another run
        (B, A, CONTEXT, lambda box: box[:-1] + bytes([box[-1] ^ 1])),
        (B, A, CONTEXT, lambda box: bytes([box[0] ^ 1]) + box[1:]),
        (B, A, CONTEXT, lambda box: box[:5]),
        (B, A, CONTEXT, lambda box: b""),
    ],
)
def test_forged_damaged_and_misdirected_boxes_are_refused(
    who: NodeSecret, partner: NodeSecret, context: tuple[str, ...], change: object
) -> None:
    box = seal(A, public_key(B), b"seed", context=CONTEXT)
    box = change(box) if callable(change) else box
    with pytest.raises(ClientError, match="forged, damaged or meant for another node") as caught:
        open_sealed(who, public_key(partner), box, context=context)
    assert "\n" not in str(caught.value)


def test_a_pair_derives_the_same_seed_and_nobody_else_does() -> None:
    context = ("run", "a", "b")
    seed = pair_seed(A, public_key(B), context=context)
    assert seed == pair_seed(B, public_key(A), context=context) and len(seed) == 32
    others = {
        pair_seed(A, public_key(B), context=("run", "a", "b", "a")),
        pair_seed(A, public_key(EVE), context=context),
        pair_seed(EVE, public_key(B), context=context),
    }
    assert seed not in others and len(others) == 3


@pytest.mark.parametrize("key", [b"", b"short", bytes(32)])
def test_unusable_keys_are_refused(key: bytes) -> None:
    with pytest.raises(ClientError, match="public key"):
        seal(A, key, b"seed", context=CONTEXT)


def test_a_public_key_lasts_as_long_as_its_secret_and_says_nothing_about_it() -> None:
    assert public_key(A) == public_key(NodeSecret.simulated(0, "a")) != public_key(B)
    assert public_key(A) != A.derive("x25519 node key")
