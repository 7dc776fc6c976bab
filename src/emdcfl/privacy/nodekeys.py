"""A node's secret on disk, the fingerprint people compare, and the proof that a node holds the key it shows."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.core.keys import NodeSecret
from emdcfl.privacy.exchange import KEY, agreed_key, shared_key

SECRET_BYTES = 32


def load_secret(path: str | Path) -> NodeSecret:
    """Read the node's secret; the first time, draw it from the operating system and write it, readable by its owner alone."""
    path = Path(path)
    try:
        return NodeSecret(_read(path))
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another process of this node was first
        return NodeSecret(_read(path))
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(os.urandom(SECRET_BYTES).hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    return NodeSecret(_read(path))


def _read(path: Path) -> bytes:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path}: the node's secret must be readable by its owner alone (mode 600), got {mode:o}; run chmod 600 on it")
    try:
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
    _private: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)

    @property
    def public(self) -> bytes:
        return self._private.public_key().public_bytes_raw()

    def holds(self, key: bytes, name: str, proof: bytes) -> bool:
        """Whether the proof was made by the holder of ``key``, for this challenge and under this name."""
        if len(key) != KEY:
            return False
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(key))
        except ValueError:
            return False
        expected = hmac.new(shared_key(shared, "hello", name), self.nonce, hashlib.sha256).digest()
        return hmac.compare_digest(expected, proof)


def prove(secret: NodeSecret, public: bytes, nonce: bytes, name: str) -> bytes:
    """Answer a ``Challenge``."""
    if len(nonce) != 16:
        raise ClientError(f"expected a challenge with a nonce of 16 bytes, got {len(nonce)}")
    return hmac.new(agreed_key(secret, public, "hello", name), nonce, hashlib.sha256).digest()
