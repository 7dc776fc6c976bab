"""Every method, one file each. Dropping a file with a ``@register``-ed class into this package adds a method."""

import importlib
import pkgutil

from emdcfl.methods.base import METHODS, Distances, Method, Serving, find, make

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["METHODS", "Distances", "Method", "Serving", "find", "make"]
