"""Certificates for TLS, keys for node authentication, and signatures of bundles, made with ``cryptography`` alone."""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import itertools
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from emdcfl.core.errors import ConfigError

DAYS, AUTHORITY_DAYS = 825, 3650
"""Validity of the SuperLink's certificate (longer ones are refused by some TLS libraries) and of the authority's, which nodes hold."""


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read; one that exists is never overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists, and is not overwritten; move it away first if it is not needed any more") from error
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    pkcs8 = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, pkcs8, serialization.NoEncryption())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


ISSUER = _name("emdcfl federation")


def _builder(subject: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)  # clocks of sites may be behind
    base = x509.CertificateBuilder().subject_name(subject).issuer_name(ISSUER).public_key(key)
    times = base.not_valid_before(start).not_valid_after(start + datetime.timedelta(days=days))
    return times.serial_number(x509.random_serial_number())


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Write ``ca.crt``, ``ca.key``, ``server.pem`` and ``server.key``: an authority of this federation and the SuperLink's certificate."""
    authority = ec.generate_private_key(ec.SECP384R1())
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = (
        _builder(ISSUER, authority.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .sign(authority, hashes.SHA384())
    )
    write_private(folder / "ca.key", _pem(authority))
    (folder / "ca.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    make_server_certificate(folder, hosts)


def make_server_certificate(folder: Path, hosts: Sequence[str], *, signer: Path | None = None) -> None:
    """Write ``server.pem`` and ``server.key``, signed with the authority's key (``ca.key``)."""
    signer = signer or folder / "ca.key"
    try:
        authority = serialization.load_pem_private_key(signer.read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"{signer}: the authority's key is needed to sign a certificate; put it back for this command") from error
    assert isinstance(authority, ec.EllipticCurvePrivateKey)
    server = ec.generate_private_key(ec.SECP384R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    names = [x509.IPAddress(ipaddress.ip_address(h)) if _is_address(h) else x509.DNSName(h) for h in hosts]
    leaf = (
        _builder(_name(hosts[0]), server.public_key(), DAYS)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(authority, hashes.SHA384())
    )
    write_private(folder / "server.key", _pem(server))
    (folder / "server.pem").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))


def renew_server_certificate(folder: Path) -> datetime.datetime:
    """Replace the SuperLink's certificate by one for the same hosts; returns until when it is valid. The old one stays beside it."""
    old = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [*names.get_values_for_type(x509.DNSName), *(str(a) for a in names.get_values_for_type(x509.IPAddress))]
    with tempfile.TemporaryDirectory(dir=folder) as made:
        make_server_certificate(Path(made), hosts, signer=folder / "ca.key")
        for name in ("server.key", "server.pem"):
            put_aside(folder / name)
            (Path(made) / name).rename(folder / name)
    return x509.load_pem_x509_certificate((folder / "server.pem").read_bytes()).not_valid_after_utc


def put_aside(path: Path) -> Path:
    """Rename a file so that a new one can take its place: ``auth.key`` becomes ``auth.key.1`` or the next free number."""
    number = next(n for n in itertools.count(1) if not path.with_name(f"{path.name}.{n}").exists())
    return path.rename(path.with_name(f"{path.name}.{number}"))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def make_node_key(folder: Path) -> None:
    """Write ``auth.key`` and ``auth.pub``: the key (ECDSA P-384) a node signs its requests to the SuperLink with."""
    key = ec.generate_private_key(ec.SECP384R1())
    openssh = serialization.PrivateFormat.OpenSSH
    write_private(folder / "auth.key", key.private_bytes(serialization.Encoding.PEM, openssh, serialization.NoEncryption()))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / "auth.pub").write_bytes(public + b"\n")


def make_publisher_key(folder: Path) -> None:
    """Write ``publisher.key`` and ``trusted.yaml``: the key (Ed25519) that signs bundles, and the list by which a node knows it.

    A node started with ``--trusted-entities trusted.yaml`` runs bundles with this signature and no others.
    """
    key = ed25519.Ed25519PrivateKey.generate()
    write_private(folder / "publisher.key", _pem(key))
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    (folder / "trusted.yaml").write_text(f"{publisher_name(key.public_key())}: '{line}'\n", encoding="utf-8")


def publisher_name(key: ed25519.Ed25519PublicKey) -> str:
    """Return the name of a publisher's key, by which signatures and the nodes' lists refer to it."""
    return "fpk_" + hashlib.sha256(key.public_bytes_raw()).hexdigest()[:32]


def sign_bundle(folder: Path, bundle: bytes) -> dict[str, str]:
    """Sign a bundle with ``publisher.key``, in the form in which Flower hands signatures to nodes."""
    key = serialization.load_pem_private_key((folder / "publisher.key").read_bytes(), None)
    assert isinstance(key, ed25519.Ed25519PrivateKey)
    now = int(time.time())
    signature = key.sign(now.to_bytes(8, "big") + hashlib.sha256(bundle).digest())
    entry = {"signed_at": now, "signature": base64.urlsafe_b64encode(signature).decode().rstrip("=")}
    # Flower wants to hear of a license before it looks at signatures; ours is open.
    return {publisher_name(key.public_key()): json.dumps(entry), "valid_license": "Apache-2.0"}
