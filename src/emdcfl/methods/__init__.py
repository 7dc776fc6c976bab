"""Every method, one file each. Dropping a file with a ``@register``-ed class into this package adds a method."""

from emdcfl.methods.base import METHODS, Distances, Method, Serving, discover, find, make

discover(__name__, __path__)

__all__ = ["METHODS", "Distances", "Method", "Serving", "find", "make"]
