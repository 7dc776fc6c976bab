r"""A node's keys, and key agreement for the random projections: the server relays, and learns nothing.

Every node has an X25519 key pair derived from its node secret. Two nodes that know each other's public key share
:math:`s = X25519(a, B) = X25519(b, A)`. From it, HKDF-SHA-256 makes one key per purpose and direction, and ChaCha20-Poly1305 seals what
one node tells another: the seed of its projection. The node secret lies on the node's disk; people compare the fingerprint of its public
key, and a ``Challenge`` makes a node prove that it holds the key it shows.

A real node also draws a *run secret* for each run and deletes it when the run is over. Its public half follows the node's in the key it
announces, and four agreements (node and run key of one with node and run key of the other, as in Noise KK) go into the shared key. So
the server, which can swap run keys but not the pinned ones, opens no box; and whoever steals ``secret.key`` later opens none that was
recorded. A simulation has no run secrets: its node secrets follow from the seed, so its boxes protect nothing and are those of
``privacy.simulated``, which need no agreement of every pair. Where ``cryptography`` is not installed, a simulation computes the same
keys there too, and a real node is refused.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import os
import stat
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.core.files import locked, replace_text
from emdcfl.core.keys import NodeSecret, digest
from emdcfl.core.optional import LazyModule
from emdcfl.privacy import simulated

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import x25519
    from cryptography.hazmat.primitives.ciphers import aead
else:
    x25519 = LazyModule("cryptography.hazmat.primitives.asymmetric.x25519", "flower", "for the keys of real nodes")
    aead = LazyModule("cryptography.hazmat.primitives.ciphers.aead", "flower", "for the keys of real nodes")

NONCE = 12
KEY = 32
TAG = 16

BOX = NONCE + KEY + TAG
"""Bytes of a sealed seed: all that the server, which cannot open it, can check."""


def _lacks_cryptography(secret: NodeSecret) -> bool:
    """Whether a simulated node has to do without ``cryptography``."""
    return secret.is_simulated and importlib.util.find_spec("cryptography") is None


@lru_cache(maxsize=1 << 14)  # making one costs as much as an agreement: it computes the public half
def _private(secret: NodeSecret) -> x25519.X25519PrivateKey:
    return x25519.X25519PrivateKey.from_private_bytes(secret.derive("x25519 node key"))


@lru_cache(maxsize=1 << 14)
def public_key(secret: NodeSecret) -> bytes:
    """Return the node's 32-byte public key, the same for the life of its secret."""
    if _lacks_cryptography(secret):
        return simulated.x25519(secret.derive("x25519 node key"))
    return _private(secret).public_key().public_bytes_raw()


def shared_key(shared: bytes, *context: object) -> bytes:
    """Derive the key for one purpose from an X25519 secret (HKDF-SHA-256)."""
    extracted = hmac.new(bytes(KEY), shared, hashlib.sha256).digest()
    return hmac.new(extracted, digest("emdcfl", *context) + b"\x01", hashlib.sha256).digest()


def announced_key(secret: NodeSecret, session: NodeSecret | None) -> bytes:
    """Return what a node announces in a run: its public key, and that of its run secret if it has one."""
    return public_key(secret) + (b"" if session is None else public_key(session))


def node_key(announced: bytes) -> bytes:
    """Return the part of an announced key that stays the same in all runs: what people compare."""
    if len(announced) not in (KEY, 2 * KEY):
        raise ClientError(f"expected a key of {KEY} or {2 * KEY} bytes, got {len(announced)}")
    return announced[:KEY]


def agreed_key(secret: NodeSecret, partner: bytes, *context: object, session: NodeSecret | None = None) -> bytes:
    """Return the key that this node and the one that announced ``partner`` derive alike for one purpose."""
    if len(partner) != (KEY if session is None else 2 * KEY):  # a server that leaves the run key out would undo forward secrecy
        raise ClientError(f"expected a partner's public key of {KEY if session is None else 2 * KEY} bytes, got {len(partner)}")
    try:
        if session is None:
            return shared_key(_agreed(secret, partner), *context)
        theirs, at_run = partner[:KEY], partner[KEY:]
        crossed = [_agreed(secret, at_run), _agreed(session, theirs)]
        if public_key(secret) > theirs:  # the same order on both sides
            crossed.reverse()
        shared = b"".join([_agreed(secret, theirs), _agreed(session, at_run), *crossed])
        return shared_key(shared, "run keys", *sorted([public_key(session), at_run]), *context)
    except ValueError as error:  # a low-order point would make the "secret" a constant
        raise ClientError(f"a partner's public key is not usable: {error}") from error


_agreements: dict[tuple[bytes, bytes], bytes] = {}

MAX_AGREEMENTS = 1 << 17


def _agreed(secret: NodeSecret, partner: bytes) -> bytes:
    """Return X25519 of both keys; remembered, because a pair seals in one direction and opens in the other.

    Both sides agree on the same value, so a process that simulates both computes it once.
    """
    own = public_key(secret)
    pair = (own, partner) if own < partner else (partner, own)
    if pair not in _agreements:
        if len(_agreements) >= MAX_AGREEMENTS:
            _agreements.clear()
        if _lacks_cryptography(secret):
            _agreements[pair] = simulated.x25519(secret.derive("x25519 node key"), partner)
        else:
            _agreements[pair] = _private(secret).exchange(x25519.X25519PublicKey.from_public_bytes(partner))
    return _agreements[pair]


ANYBODY = NodeSecret.simulated(0, "")
"""A secret to try keys with; any would do."""


@lru_cache(maxsize=1 << 14)
def _usable(partner: bytes) -> bytes:
    """Return a partner's key if some agreement with it works; one of low order works with no secret, any other with all."""
    agreed_key(ANYBODY, partner)
    return partner


def seal(secret: NodeSecret, partner: bytes, message: bytes, *, context: tuple[object, ...], session: NodeSecret | None = None) -> bytes:
    """Encrypt ``message`` for the holder of ``partner``; both sides must name the same ``context`` (run, sender, receiver)."""
    nonce = os.urandom(NONCE)
    if secret.is_simulated and session is None:
        return nonce + simulated.seal(public_key(secret), _usable(partner), nonce, message, context)
    return nonce + aead.ChaCha20Poly1305(agreed_key(secret, partner, "seal", *context, session=session)).encrypt(nonce, message, None)


def open_sealed(secret: NodeSecret, partner: bytes, box: bytes, *, context: tuple[object, ...], session: NodeSecret | None = None) -> bytes:
    """Decrypt what ``seal`` made; a forged, damaged or misdirected box is refused."""
    try:
        if secret.is_simulated and session is None:
            return simulated.open_sealed(public_key(secret), _usable(partner), box[:NONCE], box[NONCE:], context)
        key = agreed_key(secret, partner, "seal", *context, session=session)
        return aead.ChaCha20Poly1305(key).decrypt(box[:NONCE], box[NONCE:], None)
    except (_invalid_tag(), ValueError) as error:
        raise ClientError(
            f"a sealed projection seed could not be opened for {context}: it was forged, damaged or meant for another node"
        ) from error


def _invalid_tag() -> type[Exception]:
    try:
        from cryptography.exceptions import InvalidTag
    except ImportError:
        return ValueError
    return InvalidTag


def pair_seed(secret: NodeSecret, partner: bytes, *, context: tuple[object, ...], session: NodeSecret | None = None) -> bytes:
    """Return the 32-byte seed two nodes derive alike without sending anything (``projection="pair"``)."""
    return agreed_key(secret, partner, "pair", *context, session=session)


SECRET_BYTES = 32


def load_secret(path: str | Path) -> NodeSecret:
    """Read the node's secret; the first time, draw it from the operating system and write it, readable by its owner alone."""
    path = Path(path)
    if not os.path.lexists(path):  # where a link leads nowhere, a disk may be missing: no reason for a new secret
        with locked(path):
            if not path.exists():  # another process of this node may have been first
                replace_text(path, os.urandom(SECRET_BYTES).hex() + "\n", mode=0o600)
    return NodeSecret(_read_secret(path))


def _read_secret(path: Path) -> bytes:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(f"{path}: a node's secret must be readable by its owner alone, got mode {mode:o}; run chmod 600 on it")
        secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a node secret of {SECRET_BYTES} bytes in hexadecimal, got {error}; restore it") from error
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path}: expected a node secret of {SECRET_BYTES} bytes in hexadecimal, got {len(secret)}; restore it")
    return secret


def fingerprint(key: bytes) -> str:
    """Return the short text by which people compare a public key.

    Examples
    --------
    >>> fingerprint(bytes(32))
    'SHA256:Zmh6rfhivXdsj8GLjp+OIAiXFIVu4jOzkCpZHQ1fKSU'
    """
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


@dataclass(frozen=True)
class Challenge:
    """What the server asks a node that shows a public key: to prove that it holds the private key.

    A fresh X25519 key and a nonce; the proof is an HMAC over name and nonce under a key only the two of them can derive.
    """

    nonce: bytes = field(default_factory=lambda: os.urandom(16))
    _private: x25519.X25519PrivateKey = field(default_factory=lambda: x25519.X25519PrivateKey.generate(), repr=False)

    @property
    def public(self) -> bytes:
        return self._private.public_key().public_bytes_raw()

    def holds(self, key: bytes, name: str, proof: bytes) -> bool:
        """Whether the proof was made by the holder of ``key``, for this challenge and under this name."""
        if len(key) != KEY:
            return False
        try:
            shared = self._private.exchange(x25519.X25519PublicKey.from_public_bytes(key))
        except ValueError:
            return False
        expected = hmac.new(shared_key(shared, "hello", name), self.nonce, hashlib.sha256).digest()
        return hmac.compare_digest(expected, proof)


def prove(secret: NodeSecret, public: bytes, nonce: bytes, name: str) -> bytes:
    """Answer a ``Challenge``."""
    if len(nonce) != 16:
        raise ClientError(f"expected a challenge with a nonce of 16 bytes, got {len(nonce)}")
    return hmac.new(agreed_key(secret, public, "hello", name), nonce, hashlib.sha256).digest()
