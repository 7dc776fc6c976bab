r"""Key agreement for the random projections: the server relays, and learns nothing.

Every node has an X25519 key pair derived from its node secret. Two nodes that know each other's public key share
:math:`s = X25519(a, B) = X25519(b, A)`. From it, HKDF-SHA-256 makes one key per purpose and direction, and ChaCha20-Poly1305 seals what
one node tells another: the seed of its projection.
"""

from __future__ import annotations

import os
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from emdcfl.core.errors import ClientError
from emdcfl.core.keys import NodeSecret, digest

NONCE = 12
KEY = 32
TAG = 16

BOX = NONCE + KEY + TAG
"""Bytes of a sealed seed: all that the server, which cannot open it, can check."""


@lru_cache(maxsize=4096)  # making one costs as much as an agreement: it computes the public half
def _private(secret: NodeSecret) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(secret.derive("x25519 node key"))


def public_key(secret: NodeSecret) -> bytes:
    """Return the node's 32-byte public key, the same for the life of its secret."""
    return _private(secret).public_key().public_bytes_raw()


def shared_key(shared: bytes, *context: object) -> bytes:
    """Derive the key for one purpose from an X25519 secret (HKDF-SHA-256)."""
    return HKDF(algorithm=SHA256(), length=KEY, salt=None, info=digest("emdcfl", *context)).derive(shared)


def agreed_key(secret: NodeSecret, partner: bytes, *context: object) -> bytes:
    """Return the key that this node and the holder of ``partner`` derive alike for one purpose."""
    if len(partner) != KEY:
        raise ClientError(f"expected a public key of {KEY} bytes, got {len(partner)}")
    try:
        shared = _agreed(secret, partner)
    except ValueError as error:  # a low-order point would make the "secret" a constant
        raise ClientError(f"a partner's public key is not usable: {error}") from error
    return shared_key(shared, *context)


@lru_cache(maxsize=4096)  # a pair seals in one direction and opens in the other: the costly part is the same
def _agreed(secret: NodeSecret, partner: bytes) -> bytes:
    return _private(secret).exchange(X25519PublicKey.from_public_bytes(partner))


def seal(secret: NodeSecret, partner: bytes, message: bytes, *, context: tuple[object, ...]) -> bytes:
    """Encrypt ``message`` for the holder of ``partner``; both sides must name the same ``context`` (run, sender, receiver)."""
    nonce = os.urandom(NONCE)
    return nonce + ChaCha20Poly1305(agreed_key(secret, partner, "seal", *context)).encrypt(nonce, message, None)


def open_sealed(secret: NodeSecret, partner: bytes, box: bytes, *, context: tuple[object, ...]) -> bytes:
    """Decrypt what ``seal`` made; a forged, damaged or misdirected box is refused."""
    try:
        return ChaCha20Poly1305(agreed_key(secret, partner, "seal", *context)).decrypt(box[:NONCE], box[NONCE:], None)
    except (InvalidTag, ValueError) as error:
        raise ClientError(
            f"a sealed projection seed could not be opened for {context}: it was forged, damaged or meant for another node"
        ) from error


def pair_seed(secret: NodeSecret, partner: bytes, *, context: tuple[object, ...]) -> bytes:
    """Return the 32-byte seed two nodes derive alike without sending anything (``projection="pair"``)."""
    return agreed_key(secret, partner, "pair", *context)
