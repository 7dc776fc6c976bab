"""Packages that only some uses need: imported when first used, and named with their extra where they are missing.

``pa``, ``pc`` and ``pq`` are pyarrow, its ``compute`` and its ``parquet``.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from emdcfl.core.errors import ConfigError


def require(name: str, extra: str, why: str) -> Any:
    """Import a module, or say which extra has it.

    Examples
    --------
    >>> require("json", "none", "to write").dumps([1])
    '[1]'
    >>> require("no_such_module", "tables", "to read tables")
    Traceback (most recent call last):
    emdcfl.core.errors.ConfigError: expected no_such_module to read tables, but it is not installed; pip install 'emdcfl[tables]'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(f"expected {package} {why}, but it is not installed; pip install 'emdcfl[{extra}]'") from error


class LazyModule(ModuleType):
    """A module that is imported when something of it is first used.

    Examples
    --------
    >>> LazyModule("math", "none", "to compute").sqrt(4.0)
    2.0
    """

    def __init__(self, name: str, extra: str, why: str) -> None:
        super().__init__(name)
        self.__dict__["_needs"] = (name, extra, why)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # asked by tools that walk over modules
            raise AttributeError(attribute)
        found = self.__dict__[attribute] = getattr(require(*self.__dict__["_needs"]), attribute)
        return found


def arrow(part: str = "") -> Any:
    """Return pyarrow, or a part of it, to be imported when a table is first read."""
    return LazyModule(f"pyarrow.{part}" if part else "pyarrow", "tables", "to read tables")


if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
else:
    pa, pc, pq = arrow(), arrow("compute"), arrow("parquet")

__all__ = ["LazyModule", "arrow", "pa", "pc", "pq", "require"]
