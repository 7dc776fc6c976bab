"""``Result``: a run as people in Python and in notebooks look at it."""

from __future__ import annotations

import tempfile
import webbrowser
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from emdcfl.api import pictures
from emdcfl.core.errors import ConfigError
from emdcfl.core.metric import score_of
from emdcfl.core.optional import require
from emdcfl.methods.base import Distances
from emdcfl.runs import result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False, eq=False)
class Result(result.Result):
    """A finished run: clusters, accuracy, models and predictions of a run directory in memory, with frames, pictures and the page."""

    @classmethod
    def of(cls, found: result.Result) -> Self:
        """Return a run's result with everything that this class adds."""
        return cls(**{f.name: getattr(found, f.name) for f in fields(found)})

    @property
    def distances(self) -> pd.DataFrame:
        """Distance W from each client (row) to each other (column) as a pandas frame; NaN where a pair was not compared.

        Of more than 400 clients compared with representatives, those of the representatives.
        ``serving.distances`` also holds tolerances, and which entries are bounds, as arrays.
        """
        pandas = require("pandas", "tables", "for a frame (the arrays are in result.serving.distances)")
        found = self._distances()
        names = found.shown(self.clients)
        return pandas.DataFrame(found.W, index=names, columns=names)

    def _distances(self) -> Distances:
        found = self.serving.distances
        if found is None or self.clusters is None:
            raise ConfigError(f"{self.config.method.name} measures no distances between clients; use a run of emdcfl")
        return found

    def plot(self, kind: Literal["heatmap", "tree", "map"] = "heatmap") -> pictures.Picture:
        """Draw the distances between clients; a notebook shows the picture, and ``save`` writes it.

        Parameters
        ----------
        kind : "heatmap", "tree" or "map"
            All pairs, framed by cluster; which clients merge at which distance; or clients as points in the plane.
        """
        if kind not in pictures.KINDS:
            raise ConfigError(f"expected kind = {' or '.join(map(repr, pictures.KINDS))}, got {kind!r}")
        found, clusters = self._distances(), list((self.clusters or {}).values())
        return pictures.KINDS[kind](found, found.shown(self.clients), found.shown(clusters))

    def report(self, out: str | Path | None = None, *, show: bool = True) -> Path:
        """Write the page that ``emdcfl report`` writes, open it in a browser, and return its path.

        Parameters
        ----------
        out : path, optional
            File to write. Default: ``report.html`` in the run directory; a temporary file for a run in memory.
        show : bool
            Whether to open it.
        """
        if self.folder is not None:
            return show_report(self.folder, out, show)
        with tempfile.TemporaryDirectory() as folder:
            return show_report(self.save(Path(folder) / "run"), out or new_page(), show)

    def accuracies(self) -> pd.DataFrame:
        """Return one row per client as a pandas frame: its cluster, accuracy (or R²), 95 % interval and number of test samples."""
        from emdcfl.runs.verdict.intervals import row_interval

        pandas = require("pandas", "tables", "for a frame (the numbers are in result.accuracy.clients)")
        last = {row["client"]: row for row in self.history if score_of(row)}
        rows: list[dict[str, Any]] = []
        for client, row in ((c, last[c]) for c in self.clients if c in last):
            variant, value = next(iter(score_of(row).items()))
            tested, interval = row["test_samples"][variant], row_interval(row, variant)
            ends = {"low": None if interval is None else interval.low, "high": None if interval is None else interval.high}
            rows.append(
                {"cluster": (self.clusters or {}).get(client), self.metric.value: value if tested else None, **ends, "tested": tested}
            )
        return pandas.DataFrame(rows, index=[c for c in self.clients if c in last])


def new_page() -> Path:
    """Return a path for a page that nobody else has."""
    return Path(tempfile.mkdtemp(prefix="emdcfl-")) / "report.html"


def show_report(folder: Path, out: str | Path | None, show: bool) -> Path:
    """Write the page of a run directory or a folder of results, by default into it, perhaps open it, and return its path."""
    from emdcfl.report import write_report

    place = write_report(folder, None if out is None else Path(out))
    if show:
        webbrowser.open(place.resolve().as_uri())
    return place
