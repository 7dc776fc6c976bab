"""Keys of the Flower app's run config: ``[tool.flwr.app.config]`` in ``app/pyproject.toml`` of a federation's folder.

==================  ==============================================================================================
``config``          the run's config as TOML text, or the path of such a file; empty for the defaults
``out``             run directory on the SuperLink's machine; a relative one lies below the SuperLink's working folder
``resume``          continue the run in ``out`` from its last complete round
``keys``            file that binds client names to key fingerprints; empty keeps the list in memory
``trust``           ``first-use`` or ``pinned``: whether a name that the file does not know is added to it or refused
``deadline``        seconds a request may take, training included
``part-mb``         largest request for embedding models
``reply-mb``        largest reply that is read
``wait``            seconds to wait for missing nodes before round 1
``baselines``       also train one model for all and every site alone, to tell whether groups pay
``keep-baselines``  keep their models, not only their accuracies
``job``             folder for progress and outcome, read by ``emdcfl run``; empty for none
==================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from emdcfl.core.checks import check_options
from emdcfl.core.errors import ConfigError
from emdcfl.privacy.keylist import KeyTrust

WHERE = "run config"


@dataclass(frozen=True)
class Options:
    """One value per key; a hyphen in a key is an underscore here."""

    config: str = ""
    out: str = "runs/flower"
    resume: bool = False
    keys: str = ""
    trust: KeyTrust = "first-use"
    deadline: float = 600.0
    part_mb: float = 256.0
    reply_mb: float = 2048.0
    wait: float = 60.0
    baselines: bool = False
    keep_baselines: bool = False
    job: str = ""

    def __post_init__(self) -> None:
        for name, least in (("deadline", 1), ("part_mb", 1), ("reply_mb", 1), ("wait", 0)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{WHERE}.{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        if not self.out:
            raise ConfigError(f"{WHERE}.out must name a run directory, got an empty text")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """Read what Flower hands to the app; an unknown key or a wrong type is an error.

        Examples
        --------
        >>> Options.read({"out": "runs/a", "part-mb": 64}).part_mb
        64.0
        """
        return cls(**check_options(cls, {key.replace("-", "_"): value for key, value in given.items()}, WHERE))

    def as_dict(self) -> dict[str, Any]:
        """Return the values under the keys of the run config."""
        return {name.replace("_", "-"): value for name, value in asdict(self).items()}
