"""``folder``: the user's own files as a scenario, so that a run on them has a config like any other."""

from __future__ import annotations

from collections.abc import Sequence

from emdcfl.data.own import load_folder
from emdcfl.data.own.cleaning import Cleaning
from emdcfl.data.own.splitting import SplitRule
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.types import Scenario


@scenario("folder", "your own files: path = a folder of images or tables, one client each (see docs/tutorials/own-data.md)")
def folder(
    *,
    path: str,
    label: str | None = None,
    client: str | None = None,
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
    """Read a folder; see ``emdcfl.data.own.load_folder``.

    Parameters
    ----------
    path : str
        Folder or table.
    label, client : str, optional
        Columns of tables.
    split : str, optional
        ``random`` (the default) or ``time:COLUMN``: the oldest rows of a site train, the newest test.
    split_column : str, optional
        Column of tables that says train, val or test.
    group : str, optional
        Column whose equal values stay in one split; for images a regular expression of file names.
    merge_labels : bool, optional
        Labels that differ only in capitals and spaces become one.
    label_map : str, optional
        Labels to rename: ``OLD=NEW,…``.
    drop, only : list of str, optional
        Columns of tables to leave out, or the only ones to use; the label stays.
    date : list of str, optional
        Columns of tables to read as dates: ``COLUMN`` or ``COLUMN:FORMAT``; a date is the number of days since 1970.
    missing : list of str, optional
        Marks of missing values in tables, besides the usual ones.
    gaps : str, optional
        ``mean`` (the default): a missing number becomes the pooled mean, with a column that says so; ``drop-rows``: its row is left out.
    task : str, optional
        ``classification`` or ``regression``: whether labels are classes (the default, unless they look like measurements) or numbers.
    data_seed : int
        Seed of the splits.
    size : int, optional
        Height and width of images.
    model : str, optional
        Name of the network, which may decide the size of images.
    """
    rule, cleaning = SplitRule.of(split, split_column, group), Cleaning.of(**locals())
    return load_folder(path, label=label, client=client, seed=data_seed, size=size, model=model, rule=rule, cleaning=cleaning)
