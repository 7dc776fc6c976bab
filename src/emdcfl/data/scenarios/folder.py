"""``folder``: the user's own files as a scenario, so that a run on them has a config like any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from emdcfl.data.own.folder import FolderOptions, checked_scenario, read_folder
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.types import Scenario


@scenario("folder", "your own files: path = a folder of images or tables, one client each (see docs/tutorials/own-data.md)")
def folder(
    *,
    path: str,
    label: str | None = None,
    client: str | None = None,
    leave_out: str | Sequence[str] | None = None,
    split: str | None = None,
    split_column: str | None = None,
    group: str | None = None,
    merge_labels: bool | None = None,
    label_map: str | None = None,
    drop: str | Sequence[str] | None = None,
    only: str | Sequence[str] | None = None,
    date: str | Sequence[str] | None = None,
    missing: str | Sequence[str] | None = None,
    gaps: str | None = None,
    task: str | None = None,
    data_seed: int = 0,
    size: int | None = None,
    model: str | None = None,
) -> Scenario:
    """Read a folder or a table of one's own files; see ``emdcfl.data.own.load_folder``.

    The options have the names and meanings of the command line's (``emdcfl run --help``); lists may be texts with commas. ``data_seed`` is
    the seed of the splits; ``model``, the name of the network, may decide the size of images.
    """
    return checked_scenario(read_folder(Path(path), FolderOptions.of(locals())), seed=data_seed)
