"""The user's own data: folders of images, tables and arrays become a ``Scenario`` like the built-in ones."""

from __future__ import annotations

from emdcfl.data.own.arrays import from_arrays, site_from_arrays
from emdcfl.data.own.checking.check import ClientReport, FolderReport, check_folder
from emdcfl.data.own.folder import load_folder
from emdcfl.data.own.site import encoding_of, load_site, read_inputs

__all__ = [
    "ClientReport",
    "FolderReport",
    "check_folder",
    "encoding_of",
    "from_arrays",
    "load_folder",
    "load_site",
    "read_inputs",
    "site_from_arrays",
]
