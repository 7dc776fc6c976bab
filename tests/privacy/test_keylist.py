"""Node secrets on disk, fingerprints, proofs, and lists that bind names to keys."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.core.keys import NodeSecret
from emdcfl.privacy.exchange import Challenge, fingerprint, load_secret, prove, public_key
from emdcfl.privacy.keylist import KeyList, add_name, remove_name

A, B = bytes(range(32)), bytes(range(1, 33))


def test_a_secret_is_made_once_and_is_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / "home" / "secret.key"
    secret = load_secret(path)
    assert public_key(load_secret(path)) == public_key(secret)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert public_key(load_secret(tmp_path / "other.key")) != public_key(secret)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret.key"
    load_secret(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_secret(path)


@pytest.mark.parametrize("text", ["", "zz", "00" * 31])
def test_a_damaged_secret_is_never_replaced_silently(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secret.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="restore it"):
        load_secret(path)
    assert path.read_text() == text


def test_a_node_that_is_killed_while_it_draws_its_secret_draws_one_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.key"
    with monkeypatch.context() as patch:
        patch.setattr("os.urandom", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load_secret(path)
    assert public_key(load_secret(path)) == public_key(load_secret(path))


def test_a_secret_on_a_disk_that_is_not_there_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "secret.key"
    path.symlink_to(tmp_path / "disk" / "secret.key")
    with pytest.raises(ConfigError, match="No such file.*restore it"):
        load_secret(path)
    assert path.is_symlink()


def test_only_the_holder_of_a_key_can_prove_it() -> None:
    mine, other, challenge = NodeSecret(os.urandom(32)), NodeSecret(os.urandom(32)), Challenge()
    proof = prove(mine, challenge.public, challenge.nonce, "a")
    assert challenge.holds(public_key(mine), "a", proof)
    assert not challenge.holds(public_key(mine), "b", proof)
    assert not challenge.holds(public_key(other), "a", proof)
    assert not Challenge().holds(public_key(mine), "a", proof)
    assert not challenge.holds(public_key(mine), "a", prove(other, challenge.public, challenge.nonce, "a"))
    assert not challenge.holds(bytes(32), "a", proof)
    assert not challenge.holds(b"short", "a", proof)


def test_first_use_remembers_across_processes_and_refuses_a_change(tmp_path: Path) -> None:
    path = tmp_path / "clients.toml"
    KeyList(path).check("a", A)
    again = KeyList(path)
    again.check("a", A)
    with pytest.raises(ClientError, match="client 'a' shows the key"):
        again.check("a", B)
    again.check("b", B)
    assert set(KeyList(path).known) == {"a", "b"}


def test_a_list_that_others_change_meanwhile_keeps_their_changes(tmp_path: Path) -> None:
    """A server reads its list when it starts; for days after that, its operator adds and removes names."""
    path = tmp_path / "clients.toml"
    add_name(path, "removed", fingerprint(A))
    server = KeyList(path)
    remove_name(path, "removed")
    add_name(path, "added", fingerprint(A))
    server.check("new", B)
    assert set(KeyList(path).known) == {"added", "new"}
    other = KeyList(path)
    add_name(path, "c", fingerprint(A))
    with pytest.raises(ClientError, match="client 'c' shows the key"):
        other.check("c", B)
    assert KeyList(path).known["c"] == fingerprint(A)


def test_a_name_is_replaced_only_where_that_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "clients.toml"
    add_name(path, "a", fingerprint(A))
    with pytest.raises(ConfigError, match="--replace"):
        add_name(path, "a", fingerprint(B))
    assert KeyList(path).known == {"a": fingerprint(A)}
    add_name(path, "a", fingerprint(B), replace=True)
    assert KeyList(path).known == {"a": fingerprint(B)}


@pytest.mark.parametrize("text", ["SHA256:…", fingerprint(A)[:-1], fingerprint(A) + "=", fingerprint(A).removeprefix("SHA256:")])
def test_what_is_no_fingerprint_is_not_listed(tmp_path: Path, text: str) -> None:
    """A placeholder copied from a page would shut the right key out."""
    path = tmp_path / "clients.toml"
    with pytest.raises(ConfigError, match="node fingerprint"):
        add_name(path, "a", text)
    assert not path.exists()


def test_pinned_knows_only_its_list(tmp_path: Path) -> None:
    path = tmp_path / "clients.toml"
    path.write_text(f'a = "{fingerprint(A)}"\n')
    keys = KeyList(path, "pinned")
    keys.check("a", A)
    with pytest.raises(ClientError, match="no key is pinned for client 'b'"):
        keys.check("b", B)


def test_pinned_without_a_list_and_a_damaged_list_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a list"):
        KeyList(tmp_path / "none.toml", "pinned")
    (tmp_path / "bad.toml").write_text("a = 3")
    with pytest.raises(ConfigError, match="SHA256"):
        KeyList(tmp_path / "bad.toml")


def test_relay_takes_what_comes() -> None:
    keys = KeyList(trust="relay")
    keys.check("a", A)
    keys.check("a", B)
