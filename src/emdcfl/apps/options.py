"""Keys of the Flower app's run config: ``[tool.flwr.app.config]`` in ``pyproject.toml``, ``flwr run -c``.

================  ==============================================================================================
``config``        the run's config as TOML text, or the path of such a file; empty for the defaults
``out``           run directory on the SuperLink's machine; a relative one lies below the SuperLink's working folder
``resume``        continue the run in ``out`` from its last complete round
``keys``          file that binds client names to key fingerprints; empty keeps the list in memory
``trust``         ``first-use`` or ``pinned``: what to make of a name that the file does not know
``deadline``      seconds a request may take, training included
``part-mb``       largest request for embedding models
``reply-mb``      largest reply that is read
``wait``          seconds to wait for missing nodes before round 1
``job``           folder for progress and outcome, read by ``emdcfl run``; empty for none
================  ==============================================================================================

Imports errors only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from emdcfl.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class Options:
    """One value per key; a hyphen in a key is an underscore here."""

    config: str = ""
    out: str = "runs/flower"
    resume: bool = False
    keys: str = ""
    trust: str = "first-use"
    deadline: float = 600.0
    part_mb: float = 256.0
    reply_mb: float = 2048.0
    wait: float = 60.0
    job: str = ""

    def __post_init__(self) -> None:
        for name in ("deadline", "part_mb", "reply_mb", "wait"):
            if not getattr(self, name) >= (0.0 if name == "wait" else 1.0):
                least = "0" if name == "wait" else "1"
                raise ConfigError(f"run config: expected {_key(name)} of at least {least}, got {getattr(self, name)}")
        if not self.out:
            raise ConfigError("run config: expected out to name a run directory, got an empty text")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """Read what Flower hands to the app; a key or type that is not known is told.

        Examples
        --------
        >>> Options.read({"out": "runs/a", "part-mb": 64}).part_mb
        64.0
        """
        known = {_key(field.name): field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in given.items():
            if key not in known:
                raise ConfigError(f"run config: unknown key {key!r}: {nearest(key, known)}")
            wanted = type(getattr(cls, known[key]))
            if type(value) is not wanted and not (wanted is float and type(value) is int):
                raise ConfigError(f"run config: expected {key} as {wanted.__name__}, got {value!r} ({type(value).__name__})")
            values[known[key]] = wanted(value)
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Return the values under the keys of the run config."""
        return {_key(name): value for name, value in asdict(self).items()}


def _key(name: str) -> str:
    return name.replace("_", "-")
