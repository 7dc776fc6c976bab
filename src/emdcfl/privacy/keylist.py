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

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w

from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.core.files import locked, replace_text
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
        """Raise ``ClientError`` if this key may not go by this name; remember a new name, where the mode is to remember."""
        if self.trust == "relay":
            return
        print_ = fingerprint(key)
        if name not in self.known and self.trust == "first-use" and self.enrol:
            with self.changing():
                self.known.setdefault(name, print_)
        known = self.known.get(name)
        if known is None:
            raise ClientError(f"no key is pinned for client {name!r}, and it shows {print_}; add it to {self.path} if it is genuine")
        if known != print_:
            raise ClientError(
                f"client {name!r} shows the key {print_}, expected {known}: another node uses its name, or its key was replaced; "
                f"correct {self.path or 'the list'} if that is meant"
            )

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the list as it is in its file now, and write it: another process may have changed it since it was read."""
        if self.path is None:
            yield
            return
        with locked(self.path):
            self.known = self._read()
            yield
            replace_text(self.path, tomli_w.dumps(dict(sorted(self.known.items()))))


def check_fingerprint(print_: str) -> None:
    """Raise ``ConfigError`` if a text is no fingerprint: one cut off, or a page's placeholder, would shut the right key out."""
    if not re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", print_):
        raise ConfigError(f"expected a fingerprint, SHA256: and 43 characters, got {print_!r}; emdcfl node fingerprint prints it")


def add_name(path: Path, name: str, print_: str, *, replace: bool = False) -> None:
    """Add a name with its fingerprint to a list, or raise ``ConfigError`` if it is there with another one that is not to be replaced."""
    check_fingerprint(print_)
    keys = KeyList(path)
    with keys.changing():
        if keys.known.get(name, print_) != print_ and not replace:
            raise ConfigError(f"{path}: {name!r} is there with the fingerprint {keys.known[name]}; add --replace if its key was replaced")
        keys.known[name] = print_


def remove_name(path: Path, name: str) -> None:
    """Take a name off a list."""
    keys = KeyList(path)
    with keys.changing():
        keys.known.pop(name, None)
