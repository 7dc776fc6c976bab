"""Tables in memory: pandas frames and Hugging Face data sets of plain columns become the scenario that the same rows in files would.

Neither library is imported: a frame is known by what it can do. ``site`` names the column that says whose row it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from emdcfl.core.errors import DataError
from emdcfl.core.optional import pa
from emdcfl.data.own.arrays import named_clients, with_truth
from emdcfl.data.own.cleaning import CLEANING, Cleaning
from emdcfl.data.own.folder import FolderOptions, checked_scenario, clean_reading
from emdcfl.data.own.formats.client_tables import LABEL_NAMES, client_samples, shared_table
from emdcfl.data.own.formats.parquet import as_plain
from emdcfl.data.own.formats.quantities import common_units
from emdcfl.data.own.formats.readers import with_dates, without_marks
from emdcfl.data.own.notes import Note
from emdcfl.data.own.parts import MIXED, Part, Raw
from emdcfl.data.own.site import encode_rows, new_site
from emdcfl.data.own.splitting import SPLIT_NAMES, SplitRule, by_split
from emdcfl.data.own.tables import CellRules, TableEncoding
from emdcfl.data.types import Scenario, Site, Target

if TYPE_CHECKING:
    from emdcfl.data.own.defaults import Model

WHERE = Path("frames")
"""Where the rows come from, in notes and as the scenario's name."""
OPTIONS = ("label", "client", "leave_out", "split", "split_column", "group", *CLEANING)
"""What may be said about tables in memory, as about tables in files."""


def is_frame(value: Any) -> bool:
    """Whether this is a pandas frame (or one with its interface)."""
    return hasattr(value, "columns") and hasattr(value, "iloc")


def is_hub(value: Any) -> bool:
    """Whether this is a data set of the Hugging Face library ``datasets``."""
    return hasattr(value, "features") and hasattr(value, "with_format") and hasattr(value, "column_names")


def is_table(value: Any) -> bool:
    """Whether this holds named columns: a frame, a table of a data set, or ``(frame, y)``."""
    if isinstance(value, Mapping):
        return bool(value) and set(value) <= set(SPLIT_NAMES) and any(is_table(part) for part in value.values())
    if isinstance(value, tuple) and len(value) == 2:
        return is_frame(value[0]) and not is_frame(value[1])
    return is_frame(value) or is_hub(value)


def as_table(value: Any, label: str | None = None) -> pa.Table:
    """Return the columns as an Arrow table; of ``(frame, y)``, with y as the column ``label``; class numbers with names as their names."""
    if isinstance(value, tuple):
        frame, y = value
        name = label or next(n for n in LABEL_NAMES if n not in frame.columns)
        table = as_table(frame)
        if np.ndim(y) != 1 or len(y) != table.num_rows:
            raise DataError(f"expected one label per row, got {table.num_rows} rows and {len(y) if np.ndim(y) else y} labels")
        labels = y if isinstance(y, list | tuple) else np.asarray(y).tolist()  # an array of a list would make a gap among words one of them
        return table.append_column(name, pa.array(labels, from_pandas=True))
    if is_hub(value):
        table = value.with_format("arrow")[:]
        for name, feature in value.features.items():
            words = getattr(feature, "names", None)
            if words is not None:
                named = [None if code is None or code < 0 else words[code] for code in table.column(name).to_pylist()]
                table = table.set_column(table.column_names.index(name), name, pa.array(named, pa.string()).dictionary_encode())
        return as_plain(table, "the data set")
    try:
        return as_plain(pa.Table.from_pandas(_for_arrow(value), preserve_index=False), "the frame")
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"a column of the frame can be read neither as numbers nor as text: {error}; make it one of them") from error


def _for_arrow(frame: Any) -> Any:
    """Return a frame whose names are text, whose sparse columns are dense, and whose intervals (of ``cut``) and periods are text."""
    if not all(isinstance(name, str) for name in frame.columns):
        frame = frame.rename(columns=str)
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise DataError(f"the frame has two columns named {twice[0]!r}: rename one")
    kinds = {name: str(getattr(getattr(kind, "categories", None), "dtype", kind)) for name, kind in frame.dtypes.items()}
    dense = {name: frame[name].sparse.to_dense() for name, kind in kinds.items() if kind.startswith("Sparse")}
    text = {name: frame[name].map(str, na_action="ignore") for name, kind in kinds.items() if kind.startswith(("interval", "period"))}
    frame = frame.copy(deep=False) if dense or text else frame
    for name, column in (dense | text).items():
        frame[name] = column
    return frame


def _read(value: Any, label: str | None, cells: CellRules, origin: str) -> pa.Table:
    """Return a table whose marks of missing values are gaps, and whose dates are dates where that was asked for."""
    return with_dates(without_marks(as_table(value, label), cells.missing), cells, origin)


def from_tables(
    clients: Any,
    options: Mapping[str, Any],
    *,
    model: Model = None,
    seed: int = 0,
    groups: Mapping[str, str] | Sequence[str] | None = None,
) -> Scenario:
    """Build a scenario from one table with a site column (the option ``client``), or from one table (or dict of splits) per site."""
    label, column = options.get("label"), options.get("client")
    rule, cleaning = SplitRule.of(**options), Cleaning.of(**options)
    if is_table(clients):
        if column is None:
            raise DataError("expected one frame per site, or one frame and the name of its site column, got one frame; name it with site=")
        raws, notes = _shared(clients, label, column, rule, cleaning.cells)
    else:
        if column is not None:
            raise DataError(f"site={column!r} is the column of one frame for all sites, got a frame per site; leave site= out")
        raws, notes = _by_client(clients, label, rule, cleaning.cells)
    how = replace(FolderOptions.of(options), model=model)
    scenario = checked_scenario(clean_reading(WHERE, how, how.chosen(WHERE, raws), notes), seed=seed)
    return replace(with_truth(scenario, groups), fingerprints={})


def _shared(clients: Any, label: str | None, column: str, rule: SplitRule, cells: CellRules) -> tuple[list[Raw], list[Note]]:
    """Divide one table, or one table per split, by the site column."""
    if not isinstance(clients, Mapping):
        return shared_table(_read(clients, label, cells, "the frame"), "the frame", label, column, rule, cells)
    if rule.column:
        raise DataError("the frames are train, val or test already, so --split-column has nothing to do; leave it out")
    parts: dict[str, dict[str, Part]] = {}
    units: dict[str, dict[str, str]] = {}
    notes: list[Note] = []
    for split, value in by_split(clients, "the frames").items():
        raws, more = shared_table(_read(value, label, cells, f"split {split!r}"), f"split {split!r}", label, column, rule, cells)
        notes += more
        label = raws[0].label
        for raw in raws:
            units[raw.name] = common_units({"the other splits": units.get(raw.name, {}), f"split {split!r}": raw.units})
            parts.setdefault(raw.name, {})[split] = raw.parts[MIXED]
    return [Raw(name, f"{column} = {name}", found, rule, label or "", units[name]) for name, found in parts.items()], notes


def _by_client(clients: Any, label: str | None, rule: SplitRule, cells: CellRules) -> tuple[list[Raw], list[Note]]:
    raws: list[Raw] = []
    notes: list[Note] = []
    for name, entry in named_clients(clients).items():
        raw, more = _one_client(name, entry, label, rule, cells)
        label = raw.label
        raws.append(raw)
        notes += more
    return raws, notes


def _one_client(name: str, entry: Any, label: str | None, rule: SplitRule, cells: CellRules) -> tuple[Raw, list[Note]]:
    if not is_table(entry):
        raise DataError(f"client {name!r}: expected a frame as at the other sites, got {type(entry).__name__}; give all sites alike")
    given = by_split(entry, f"client {name!r}") if isinstance(entry, Mapping) else {MIXED: entry}
    tables = {split: _read(value, label, cells, f"client {name!r}") for split, value in given.items()}
    named = {split: (table, "the frame" if split == MIXED else f"split {split!r}") for split, table in tables.items()}
    return client_samples(name, named, label, rule, cells)


def site_from_table(
    name: str,
    entry: Any,
    options: Mapping[str, Any],
    *,
    encoding: Mapping[str, Any],
    classes: Sequence[str],
    target: Target | None = None,
    seed: int = 0,
) -> tuple[Site, tuple[str, ...]]:
    """Build one more site for a run on tables, from a frame."""
    _check_kind(encoding)
    cleaning = Cleaning.of(**options)
    raw, notes = _one_client(name, entry, encoding["label"], SplitRule.of(**options), cleaning.cells)
    return new_site(raw, encoding, classes, notes, target=target, seed=seed, cleaning=cleaning)


def encode(value: Any, encoding: Mapping[str, Any]) -> torch.Tensor:
    """Return the rows of a frame as a run on tables stores them; a label column is ignored."""
    _check_kind(encoding)
    table = _read(value, None, TableEncoding.from_dict(encoding).cells, "the frame")
    encoded, rows = encode_rows(table, encoding, "the frame")
    if len(rows) < table.num_rows:
        first = min(set(range(table.num_rows)) - set(rows.tolist())) + 1
        raise DataError(f"the run left out rows with missing values (gaps = drop-rows), got one in row {first}; leave it out, too")
    return torch.from_numpy(encoded)


def _check_kind(encoding: Mapping[str, Any]) -> None:
    if encoding["kind"] != "table":
        raise DataError(f"expected what the run was trained on ({encoding['kind']}), got a frame")
