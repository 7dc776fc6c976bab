"""``compare``: several methods on the same clients, over seeds, as a frame and a picture."""

from __future__ import annotations

import html
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from emdcfl.api import pictures
from emdcfl.api.clients import Clients, Groups
from emdcfl.api.fitting import Model, Task, as_choice, configure
from emdcfl.api.result import new_page, show_report
from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.core.metric import Metric, metric_of, score_of
from emdcfl.core.optional import require
from emdcfl.core.units import quantity
from emdcfl.methods.base import Method
from emdcfl.runs.config import config_keys
from emdcfl.runs.loop import NoOpObserver
from emdcfl.runs.watching.progress import terminal
from emdcfl.studies import compare as studies
from emdcfl.studies.results import ResultRow, Results, read_results
from emdcfl.studies.table_files import markdown, write_tables
from emdcfl.studies.tables import Cell, Table, build, by_label, value_of

if TYPE_CHECKING:
    import pandas as pd

_INSTEAD = {"run.seed": "give seeds=[…]", "run.hold_out": "use fit(…, hold_out=[…]), or the command 'emdcfl compare --folds N'"}


def compare(
    clients: Clients,
    methods: Sequence[str | Method] | str | Method = ("emdcfl", "fedavg", "local"),
    *,
    seeds: int | Sequence[int] = 3,
    model: Model | None = None,
    task: Task | None = None,
    label: str | None = None,
    site: str | None = None,
    rounds: int | None = None,
    local_epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    groups: Groups = None,
    device: str = "auto",
    jobs: int = 1,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    progress: bool = False,
) -> Comparison:
    """Run methods × seeds on the same clients: what ``emdcfl compare`` does, on data in memory as well.

    Where FedAvg is compared, FedAvg with fine-tuning at home joins, unless ``settings={"personalize.mode": "off"}``. Other methods are
    compared without fine-tuning; ``"ifca+ft"`` is one with it.

    Parameters
    ----------
    clients, model, task, label, site, rounds, local_epochs, batch_size, lr, groups, device, settings
        As in ``fit``.
    methods : list of str or Method
        Names, as in ``"fedavg"`` or ``"emdcfl:tolerance=0.03"``, or instances; or one of them, or one text ``"a,b,c"`` or ``"all"``.
    seeds : int or list of int
        So many seeds from 0 on, or these. All split the data alike (setting ``"scenario.data_seed"``), so that all runs are tested alike.
    jobs : int
        Runs at a time, for data that a config can build (a scenario, a folder). Above 1, call it under ``if __name__ == "__main__":``.
    out : path, optional
        Folder of results; runs that are in it already are not run again.

    Returns
    -------
    Comparison

    Examples
    --------
    >>> found = compare("rotated-digits", ["oracle", "local"], seeds=1, rounds=1, local_epochs=1)
    >>> found.methods
    ['Oracle', 'Local']
    """
    numbers = list(range(seeds) if isinstance(seeds, int | np.integer) else seeds)
    if not numbers:
        raise ConfigError(f"expected at least one seed, got {seeds!r}")
    if not all(isinstance(seed, int | np.integer) and seed >= 0 for seed in numbers):
        raise ConfigError(f"expected seeds as a number of them, or a list of whole numbers from 0 on, got {seeds!r}")
    refused = next((key for key in settings or {} if key.partition(".")[0] in ("method", "privacy") or key in _INSTEAD), None)
    if refused is not None:
        instead = _INSTEAD.get(refused, "options go with a method, as in 'emdcfl:tolerance=0.03'")
        raise ConfigError(f"settings: {refused} would hold for all runs; {instead}")
    given = config_keys(rounds=rounds, local_epochs=local_epochs, batch_size=batch_size, lr=lr, device=device)
    given |= config_keys(task=task, label=label, client=site) | dict(settings or {})
    base, scenario = configure(clients, model, "emdcfl", given, groups=groups)
    if scenario is not None and jobs > 1:
        raise ConfigError(f"expected jobs = 1 for data in memory, got {jobs}: they are not sent to other processes; write them to a folder")
    given_methods = methods if isinstance(methods, Iterable) and not isinstance(methods, str) else [methods]
    with studies.data_in_memory(base, scenario), ExitStack() as temporary:
        chosen = [one for m in given_methods for one in (studies.parse_methods(m, base) if isinstance(m, str) else [as_choice(m)])]
        if not chosen:
            raise ConfigError(f"expected at least one method, got {methods!r}")
        if jobs > 1:
            _check_importable(type(m) for m in given_methods if not isinstance(m, str))
        wanted = studies.configs(base, studies.with_fine_tuning(base, chosen), [int(seed) for seed in numbers])
        folder = Path(tempfile.mkdtemp(prefix="emdcfl-") if out is None else out)
        if out is None:
            temporary.callback(shutil.rmtree, folder, ignore_errors=True)
        outcome = studies.compare(wanted, folder, jobs=jobs, watch=_Lines() if progress else None)
        if outcome.failed:
            temporary.pop_all()
            kept = f" with out={str(folder)!r}, which has the finished runs" if out is None else ""
            raise ClientError(f"{studies.describe_failures(outcome.failed)}{kept}")
        rows = [row for row in read_results(folder) if row["config"] in set(outcome.keys)]
        if out is not None:
            from emdcfl.report import write_report

            write_tables(read_results(folder), folder)
            write_report(folder)
    return Comparison(rows)


def _check_importable(classes: Iterable[type]) -> None:
    """Raise where a class of one's own is out of reach for other processes: made in a function, or in a notebook."""
    for cls in classes:
        at_prompt = cls.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
        if at_prompt or "<locals>" in cls.__qualname__:
            raise ConfigError(f"expected jobs = 1, or methods that other processes can import, got {cls.__qualname__}; write it in a file")


@dataclass(frozen=True, repr=False)
class Comparison:
    """Finished runs of several methods on the same clients. ``rows`` are the lines of ``results.jsonl``."""

    rows: list[ResultRow]

    @cached_property
    def table(self) -> Table:
        """The table that ``emdcfl compare`` prints."""
        return build(self.rows)

    @property
    def metric(self) -> Metric:
        """What methods are compared by."""
        return metric_of(self.rows[0]) if self.rows else Metric.ACCURACY

    @cached_property
    def methods(self) -> list[str]:
        """Methods in the order of the table."""
        return [label for label in self.table.rows if self._cell(label) is not None]

    def _cell(self, label: str, metric: str | None = None) -> Cell | None:
        (column, *others) = self.table.columns
        if others:
            raise ConfigError(f"expected runs on one scenario, got {1 + len(others)}")
        return self.table.cells.get((label, column.key, metric or column.metrics[0]))

    @property
    def frame(self) -> pd.DataFrame:
        """One row per method as a frame: mean accuracy (or R², RMSE) over seeds, its 95 % interval, worst client, ARI, seconds, seeds.

        Where classes are unbalanced at more than half of the sites, also balanced accuracy and AUC.
        """
        pandas = require("pandas", "tables", "for a frame (the numbers are in comparison.rows)")
        return pandas.DataFrame(list(self._records()), index=pandas.Index(self.methods, name="method"))

    def _records(self) -> Iterator[dict[str, Any]]:
        table, labelled = self.table, by_label(self.rows)
        (column, *_) = table.columns
        for label in self.methods:
            mean, against = self._cell(label), table.against.get((label, column.key))
            assert mean is not None
            ari, seconds, scale = self._cell(label, "ari"), self._cell(label, "seconds"), self.metric.scale
            worst = [value for row in labelled[label] if (value := value_of(row, "worst")) is not None]
            scales = {"rmse": 1.0, "balanced": 100.0, "auc": 1.0}
            more = {name: cell.mean / by for name, by in scales.items() if (cell := self._cell(label, name)) is not None}
            yield {
                self.metric.value: mean.mean / scale,
                "low": math.nan if mean.interval is None else mean.interval.low,
                "high": math.nan if mean.interval is None else mean.interval.high,
                "worst": statistics.fmean(worst) / scale if worst else math.nan,
                **more,
                "against best": 0.0 if label == table.leader(column) else math.nan if against is None else against.mean,
                "ari": math.nan if ari is None else ari.mean,
                "clusters": sum(row["k"] for row in labelled[label]) / len(labelled[label]),
                "seconds": math.nan if seconds is None else seconds.mean,
                "seeds": mean.n,
            }

    def plot(self) -> pictures.Picture:
        """Draw mean accuracies (or R²) with their 95 % intervals, the best on top."""
        metric, scale = self.metric.value, self.metric.scale
        found = sorted(zip(self.methods, self._records(), strict=True), key=lambda pair: -pair[1][metric])
        ends = [None if math.isnan(r["low"]) else (scale * r["low"], scale * r["high"]) for _, r in found]
        what = f"mean {self.metric.label} over clients{' in per cent' if scale == 100 else ''}, 95 % interval"
        return pictures.bars([label for label, _ in found], [scale * r[metric] for _, r in found], ends, what)

    def report(self, out: str | Path | None = None, *, show: bool = True) -> Path:
        """Write the page that ``emdcfl compare`` writes (to a temporary file by default), open it, and return its path."""
        with tempfile.TemporaryDirectory() as folder:
            with Results(Path(folder)) as results:
                results.add(self.rows)
            return show_report(Path(folder), out or new_page(), show)

    def __repr__(self) -> str:
        lines = []
        for label, r in zip(self.methods, self._records(), strict=True):
            metric = self.metric
            interval = "" if math.isnan(r["low"]) else f" ({metric.range(r['low'], r['high'])})"
            rmse = f", RMSE {quantity(r['rmse'])}" if "rmse" in r else ""
            lines.append(f"{label}: {metric.text(r[metric.value])}{interval}, worst {metric.text(r['worst'])}{rmse}, seeds {r['seeds']}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def to_markdown(self) -> str:
        """Write the table as Markdown."""
        return markdown(self.table)


class _Lines(NoOpObserver):
    """Print a line per finished run."""

    def launch(self, job: studies.Job, number: int, total: int) -> None: ...

    def note(self, done: studies.Done, results: Results, ended: int, total: int) -> None:
        if done.row is not None:
            mean = metric_of(done.row).text(score_of(done.row)["mean"])
            terminal().print(f"[{ended}/{total}] {done.job}: {mean}, {done.row['seconds']['total']:.0f} s", soft_wrap=True)
