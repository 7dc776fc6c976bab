"""Errors a user can act on. Each message is one line: what was expected, what was got, what to do.

The CLI prints ``str(error)`` and exits with code 2; a traceback is only for bugs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from emdcfl.core.units import some

MAX_MESSAGE = 1500
"""Characters of a message, which may quote text of any length."""

FEW, MANY = 12, 40
"""Valid names that a message lists beside the nearest one, and at most."""


class EmdcflError(Exception):
    r"""Base of the errors a user can act on. Its text is one line.

    Examples
    --------
    >>> str(DataError("expected a class, got 'a\nb'"))
    "expected a class, got 'a b'"
    """

    def __str__(self) -> str:
        text = " ".join(super().__str__().splitlines())
        return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 300]} … {text[-300:]}"


class ConfigError(EmdcflError):
    """A setting is unknown, of the wrong type or out of range."""


class DataError(EmdcflError):
    """Data are missing, unreadable or unusable for the run."""


class ModelError(EmdcflError):
    """A network cannot be built, flattened or fed."""


class ClientError(EmdcflError):
    """A client failed, or validation rejected its reply."""


class QuorumError(EmdcflError):
    """Too few of the sampled clients trained in a round."""


class StoreError(EmdcflError):
    """A run directory is unreadable, locked, or belongs to another run."""


def similar(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the valid name that is most like ``name``, whatever their capitals; None if none is.

    Examples
    --------
    >>> similar("dose", ["AGE", "DOSE"])
    'DOSE'
    """
    folded = {other.casefold(): other for other in valid}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else None


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ``"did you mean 'x'?"`` and the valid names, for error messages.

    Examples
    --------
    >>> nearest("emdclf", ["emdcfl", "fedavg"])
    "did you mean 'emdcfl'? (valid: emdcfl, fedavg)"
    >>> nearest("x", ["emdcfl", "fedavg"])
    'expected one of emdcfl, fedavg'
    """
    names = sorted(valid)
    close = similar(name, names)
    if close and len(names) > FEW:  # a table may have thousands of columns
        return f"did you mean {close!r}?"
    known = some(names, most=MANY)
    return f"did you mean {close!r}? (valid: {known})" if close else f"expected one of {known}"
