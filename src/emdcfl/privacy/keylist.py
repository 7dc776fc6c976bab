"""A list that binds each client's name to the fingerprint of its public key.

With it the server notices a node that uses another's name. A node may keep one too: with it the node notices a server that swaps the keys
it relays, which could then open what is sealed.

==============  ==========================================================================================
``relay``       accept every key: the server is trusted to relay keys honestly
``first-use``   remember the first key seen for a name; another one is refused. Without ``enrol`` new names are refused too
``pinned``      accept only the names and keys of the list, which people compared by other means
==============  ==========================================================================================
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w

from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.privacy.exchange import fingerprint

KeyTrust = Literal["relay", "first-use", "pinned"]
MODES = get_args(KeyTrust)


class KeyList:
    """Name → fingerprint, in a TOML file or, without ``path``, in memory.

    ``enrol`` lets ``first-use`` take new names; without it only names of the list are accepted, and an empty list accepts none.
    """

    def __init__(self, path: str | Path | None = None, trust: str = "first-use", *, enrol: bool = True) -> None:
        if trust not in MODES:
            raise ConfigError(f"expected trust to be one of {', '.join(MODES)}, got {trust!r}")
        self.path, self.trust = None if path is None else Path(path), trust
        self.enrol = enrol
        self.known: dict[str, str] = self._read()
        if trust == "pinned" and not self.known:
            raise ConfigError(f"trust = 'pinned' needs a list of names and fingerprints, but {self.path or 'none'} holds none; fill it in")

    def _read(self) -> dict[str, str]:
        if self.path is None or not self.path.exists():
            return {}
        try:
            raw: Any = tomllib.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: cannot read the list of keys: {error}; restore it") from error
        if not all(isinstance(v, str) and v.startswith("SHA256:") for v in raw.values()):
            raise ConfigError(f'{self.path}: expected lines like site = "SHA256:…", got something else')
        return dict(raw)

    def check(self, name: str, key: bytes) -> None:
        """Raise ``ClientError`` if this key may not go by this name."""
        self.check_all({name: key})

    def check_all(self, keys: Mapping[str, bytes]) -> None:
        """Check several keys, and remember those that are new, where the mode is to remember."""
        if self.trust == "relay":
            return
        new = {}
        for name, key in keys.items():
            print_ = fingerprint(key)
            known = self.known.get(name)
            if known is None and (self.trust == "pinned" or not self.enrol):
                raise ClientError(f"no key is pinned for client {name!r}, and it shows {print_}; add it to {self.path} if it is genuine")
            if known is not None and known != print_:
                raise ClientError(
                    f"client {name!r} shows the key {print_}, expected {known}: another node uses its name, or its key was replaced; "
                    f"correct {self.path or 'the list'} if that is meant"
                )
            if known is None:
                new[name] = print_
        if new:
            self.known = {**self.known, **new}
            self.write()

    def write(self) -> None:
        """Write the list, in one step."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(tomli_w.dumps(dict(sorted(self.known.items()))), encoding="utf-8")
        temporary.replace(self.path)


def add_name(path: Path, name: str, print_: str, *, replace: bool = False) -> None:
    """Add a name with its fingerprint to a list, or raise ``ConfigError`` if it is there with another one that is not to be replaced."""
    known = KeyList(path)
    if not print_.startswith("SHA256:"):
        raise ConfigError(f"expected a fingerprint like SHA256:…, got {print_!r}; emdcfl node init prints it")
    if known.known.get(name, print_) != print_ and not replace:
        raise ConfigError(f"{path}: {name!r} is there with the fingerprint {known.known[name]}; add --replace if its key was replaced")
    known.known[name] = print_
    known.write()


def remove_name(path: Path, name: str) -> None:
    """Take a name off a list."""
    known = KeyList(path)
    known.known.pop(name, None)
    known.write()
