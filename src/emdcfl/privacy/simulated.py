"""The boxes of a simulation, and its keys where the ``cryptography`` package is missing: the same bytes, and no protection.

A simulation's node secrets follow from its seed, so there is nothing to hide: X25519 (RFC 7748) need not run in constant time, and a box
only has to arrive where it belongs. ``privacy.exchange`` uses this for simulated secrets alone.
"""

from __future__ import annotations

import hashlib

PRIME = 2**255 - 19
A24 = 121665
BASE = (9).to_bytes(32, "little")
TAG = 16


def x25519(scalar: bytes, point: bytes = BASE) -> bytes:
    """Multiply a point of Curve25519 by a scalar with the Montgomery ladder; of the base point, it is the public key.

    Examples
    --------
    >>> ours, theirs = bytes(range(32)), bytes(range(32, 64))
    >>> x25519(ours, x25519(theirs)) == x25519(theirs, x25519(ours))
    True
    """
    k = int.from_bytes(scalar, "little") & ~7 & (2**255 - 1) | 2**254
    u = int.from_bytes(point, "little") & (2**255 - 1)
    x2, z2, x3, z3, swap = 1, 0, u, 1, 0
    for bit in (k >> t & 1 for t in reversed(range(255))):
        if swap != bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = bit
        plus, minus = (x2 + z2) % PRIME, (x2 - z2) % PRIME
        aa, bb = plus * plus % PRIME, minus * minus % PRIME
        da, cb = (x3 - z3) * plus % PRIME, (x3 + z3) * minus % PRIME
        x3, z3 = (da + cb) ** 2 % PRIME, u * (da - cb) ** 2 % PRIME
        x2, z2 = aa * bb % PRIME, (aa - bb) * (aa + A24 * (aa - bb)) % PRIME
    if swap:
        x2, z2 = x3, z3
    shared = (x2 * pow(z2, PRIME - 2, PRIME) % PRIME).to_bytes(32, "little")
    if not any(shared):
        raise ValueError("the point has a small order")
    return shared


def seal(own: bytes, partner: bytes, nonce: bytes, message: bytes, context: tuple[object, ...]) -> bytes:
    """Put a message into a box of the usual size for two public keys and a context."""
    key = _key(own, partner, nonce, context)
    body = _masked(message, key)
    return body + _tag(key, body)


def open_sealed(own: bytes, partner: bytes, nonce: bytes, box: bytes, context: tuple[object, ...]) -> bytes:
    """Return what ``seal`` put into a box; one for other keys or another context is refused."""
    key = _key(own, partner, nonce, context)
    body, tag = box[:-TAG], box[-TAG:]
    if _tag(key, body) != tag:
        raise ValueError("the box is damaged, or for somebody else")
    return _masked(body, key)


def _key(own: bytes, partner: bytes, nonce: bytes, context: tuple[object, ...]) -> bytes:
    return b"".join([*sorted((own, partner)), nonce, repr(context).encode()])


def _tag(key: bytes, body: bytes) -> bytes:
    return hashlib.sha256(key + body).digest()[:TAG]


def _masked(message: bytes, key: bytes) -> bytes:
    mask = hashlib.shake_256(key).digest(len(message))
    return (int.from_bytes(message, "big") ^ int.from_bytes(mask, "big")).to_bytes(len(message), "big")
