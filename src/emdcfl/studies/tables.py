"""From rows of results to a table: mean ± standard deviation over seeds, 95 % intervals, the paper's value beside ours.

A column is a scenario (with its options, network and number of participants), a row a method. Runs that differ in seed or hardware only
are one cell. Its label names the method's options that are not the default and, where a method was run with several settings, what differs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from emdcfl.core.metric import Metric, metric_of, score_of
from emdcfl.core.units import percent, quantity
from emdcfl.data.scenarios.plan import PAPER_TRAINING
from emdcfl.methods.base import METHODS, default_options, preset_of, preset_values
from emdcfl.runs.config import AT_NODES, OWN_FILES
from emdcfl.runs.new_sites.unseen import UNSEEN, mean_scores
from emdcfl.runs.plan import IN_MEMORY
from emdcfl.runs.store.identity import flat
from emdcfl.runs.verdict.intervals import Interval, SiteScores, difference, over_seeds
from emdcfl.studies.compare import TITLES, paper_place
from emdcfl.studies.paper_values import Value, measured_value, paper_value
from emdcfl.studies.results import ResultRow
from emdcfl.trust.policy import Trust

METRICS = {
    "mean": "Avg acc", "worst": "Worst acc", "r2": "Avg R²", "worst_r2": "Worst R²", "rmse": "RMSE", "clean": "Clean acc",
    "backdoor": "Backdoor acc", "balanced": "Balanced", "auc": "AUC", "ari": "ARI", "seconds": "s/run",
}  # fmt: skip

DIGITS = {"seconds": 1, "auc": 3}
"""Decimal places that differ from two."""


@dataclass(frozen=True)
class Cell:
    """One number of ours, over ``n`` seeds, the paper's, and ours at the paper's size. The standard deviation is the sample's (ddof = 1).

    ``interval`` is that of an accuracy, as a share, or of an R²: over these sites, their test samples and seeds (``runs.intervals``).
    """

    mean: float
    std: float | None
    n: int
    paper: Value | None = None
    full: Value | None = None
    interval: Interval | None = None

    def text(self, metric: str) -> str:
        if metric == "rmse":
            return quantity(self.mean) + ("" if self.std is None else f" ± {self.std:.2g}")
        return Value(self.mean, self.std).text(DIGITS.get(metric, 2))


@dataclass(frozen=True)
class Column:
    """A scenario and what is measured on it."""

    key: str
    title: str
    metrics: tuple[str, ...]
    smaller: str = ""
    """How these runs differ in size from the paper's; empty where they do not."""
    thresholds: str = ""
    """Which thresholds decided about clusters, by method; empty where none did."""


PAPER = "paper"
MARK, FULL = "paper †", "ours †"
"""Head the paper's numbers, and ours at the paper's size, beside runs of another size."""


@dataclass(frozen=True)
class Table:
    """Cells by (row label, column key, metric)."""

    columns: tuple[Column, ...]
    rows: tuple[str, ...]
    cells: Mapping[tuple[str, str, str], Cell]
    methods: Mapping[str, str]
    """Method of each row."""
    against: Mapping[tuple[str, str], Interval] = field(default_factory=dict)
    """(row label, column key) → its accuracy (or R²) less that of the column's leader, paired by site and seed."""

    @property
    def reference(self) -> set[str]:
        """Rows that know the truth and do not compete."""
        return {label for label, method in self.methods.items() if method == "oracle"}

    def best(self, column: str, metric: str) -> set[str]:
        """Labels whose cell is the best of its column at the precision shown."""
        if metric in ("seconds", "rmse"):
            return set()
        shown = {
            r: round(c.mean, DIGITS.get(metric, 2))
            for r in self.rows
            if r not in self.reference and (c := self.cells.get((r, column, metric)))
        }
        return {r for r, value in shown.items() if value == max(shown.values())}

    def leader(self, column: Column) -> str | None:
        """Return the row with the best accuracy of a column, with which others are compared."""
        means = {r: c.mean for r in self.rows if r not in self.reference and (c := self.cells.get((r, column.key, column.metrics[0])))}
        return max(means, key=lambda label: means[label], default=None)

    def labels(self, column: Column) -> list[str]:
        """Return the rows that have a number in a column."""
        return [label for label in self.rows if self.seeds(label, column)]

    def seeds(self, label: str, column: Column) -> int:
        return max((cell.n for m in column.metrics if (cell := self.cells.get((label, column.key, m)))), default=0)

    def has_intervals(self, column: Column) -> bool:
        return any(key[1:] == (column.key, column.metrics[0]) and cell.interval is not None for key, cell in self.cells.items())

    def paper_note(self, column: Column) -> str:
        """Say that the paper's numbers beside a column are of runs of another size; empty where they are not, or there are none."""
        beside = column.smaller and any(self.beside(column, metric) for metric in column.metrics)
        return f"† at the paper's size; these runs: {column.smaller}" if beside else ""

    def notes(self, column: Column) -> list[str]:
        """Return what is said below a column."""
        return [note for note in (self.paper_note(column), column.thresholds) if note]

    def beside(self, column: Column, metric: str) -> dict[str, str]:
        """Return the heads of the numbers to show beside a metric, and the field of a cell that has them."""
        cells = [cell for key, cell in self.cells.items() if key[1:] == (column.key, metric)]
        shown = {MARK: "paper", FULL: "full"} if column.smaller else {PAPER: "paper"}
        return {head: name for head, name in shown.items() if any(getattr(cell, name) is not None for cell in cells)}


def build(results: Sequence[ResultRow]) -> Table:
    """Arrange results: columns in the order they were first run, rows in the paper's order."""
    by_column, titles = _by_column(r for r in results if _held_out(r) is None)  # the others are in the table of unseen sites
    columns: list[Column] = []
    cells: dict[tuple[str, str, str], Cell] = {}
    methods: dict[str, str] = {}
    runs: dict[tuple[str, str], list[ResultRow]] = {}
    for key, rows in by_column.items():
        metrics = _metrics(rows)
        columns.append(Column(key, titles[key], metrics, _smaller(rows), thresholds_used(by_label(rows))))
        for label, members in by_label(rows).items():
            runs[label, key] = members
            methods[label] = members[0]["method"]
            for metric in metrics:
                cell = _cell(members, metric)
                if cell is not None:
                    cells[label, key, metric] = cell
    order = sorted(methods, key=lambda label: (paper_place(methods[label])[0], label))
    table = Table(tuple(columns), tuple(order), cells, methods)
    leaders = {column.key: (column.metrics[0], runs[leader, column.key]) for column in columns if (leader := table.leader(column))}
    compared = {place: found for place, rows in runs.items() if (found := _against(rows, *leaders.get(place[1], ("", [])))) is not None}
    return replace(table, against=compared)


def _by_column(results: Iterable[ResultRow]) -> tuple[dict[str, list[ResultRow]], dict[str, str]]:
    """Return the results of each column, and its title."""
    found: dict[str, list[ResultRow]] = {}
    for row in results:
        found.setdefault(json.dumps(_column_settings(row), sort_keys=True), []).append(row)
    return found, _titles({key: (rows[0]["scenario"], flat(json.loads(key))) for key, rows in found.items()})


def _smaller(rows: Sequence[ResultRow]) -> str:
    """Say how runs differ in size from the paper's: in scale, rounds, or local epochs."""
    found: dict[str, set[Any]] = {"scale": set(), "rounds": set(), "local epochs": set()}
    for row in rows:
        settings = row["settings"]
        found["scale"].add(settings["scenario"].get("scale", PAPER))
        found["rounds"].add(settings["run"]["rounds"])
        found["local epochs"].add(settings["training"].get("local_epochs", PAPER_TRAINING["local_epochs"]))
    usual = {"scale": PAPER, "rounds": PAPER_TRAINING["rounds"], "local epochs": PAPER_TRAINING["local_epochs"]}
    known = {name: values - {None} for name, values in found.items()}  # rows of early versions do not say
    return ", ".join(f"{name} {', '.join(map(str, sorted(values)))}" for name, values in known.items() if values - {usual[name]})


def _against(rows: Sequence[ResultRow], metric: str, leader: Sequence[ResultRow]) -> Interval | None:
    """Compare runs with the leader's of the same seeds, site by site; None for the leader itself."""
    other = {row["seed"]: row for row in leader}
    if rows is leader:
        return None
    pairs = [(SiteScores.of(_score(r, metric)), SiteScores.of(_score(other[r["seed"]], metric))) for r in rows if r["seed"] in other]
    found = [difference(a, b) for a, b in pairs if a is not None and b is not None]
    return over_seeds([one for one in found if one is not None])


def _score(row: ResultRow, metric: str) -> Mapping[str, Any]:
    variants: Mapping[str, Any] = score_of(row)["variants"]
    found = variants[metric] if metric in variants else next(iter(variants.values()), {})
    return found if isinstance(found, Mapping) else {}


def _column_settings(row: ResultRow) -> dict[str, Any]:
    settings = row["settings"]
    scenario = {k: v for k, v in settings["scenario"].items() if k != "data_root"}
    return {"scenario": scenario, "model": settings.get("model"), "participants": settings["run"].get("participants")}


def _row_settings(row: ResultRow) -> dict[str, Any]:
    """Return the settings that a run followed: runs that differ in none are in one cell."""
    settings = row["settings"]
    tuning = {"personalize": settings["personalize"]} if is_fine_tuned(row) else {}
    trust = {key: value for key, value in settings.get("trust", {}).items() if getattr(Trust, key, value) != value}
    how = {"rounds": settings["run"]["rounds"], "precision": settings.get("engine", {}).get("precision", "fp32")}
    method = settings["method"]
    if method.get("tolerance", "auto") != "auto" and "grouping" in method:  # a number means the paper's rule
        method = {**method, "grouping": "neighbourhoods"}
    found = flat({"method": method, "training": settings["training"], "trust": trust, **how, **tuning})
    return {key: value for key, value in found.items() if value is not None}  # as of a version without the option


def is_fine_tuned(row: ResultRow) -> bool:
    """Whether a row's accuracies are those with fine-tuning at home."""
    return bool(row["settings"].get("personalize", {}).get("mode", "off") != "off")


def sample_key(row: ResultRow) -> str:
    """Return what makes two rows the same sample of the same cell: column, method, settings and seed, whatever they ran on."""
    return json.dumps([_column_settings(row), _row_key(row), row["seed"], _held_out(row)], sort_keys=True)


def _held_out(row: ResultRow) -> Any:
    return row["settings"]["run"].get("hold_out")


def _row_key(row: ResultRow) -> str:
    return json.dumps([row["method"], _row_settings(row)], sort_keys=True)


def by_label(results: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    """Group the results of one column by method and settings, one per seed."""
    groups: dict[str, list[ResultRow]] = {}
    for row in results:
        members = groups.setdefault(_row_key(row), [])
        if (row["seed"], _held_out(row)) not in [(other["seed"], _held_out(other)) for other in members]:  # or it ran on other hardware too
            members.append(row)
    named = {key: (_title(rows[0]), _row_settings(rows[0])) for key, rows in groups.items()}
    chosen = {key: chosen_options(rows[0]) for key, rows in groups.items()}
    return {title: groups[key] for key, title in _titles(named, chosen).items()}


SCENARIO_SETS = frozenset({"thresholds", "threshold", "lam", "grouping", "match_classes"})
"""Options that scenarios set, so that their values alone do not say whether somebody chose them."""


def chosen_options(row: ResultRow) -> set[str]:
    """Return the options of a row's method that neither the method's defaults nor a preset or scenario explain.

    Examples
    --------
    >>> chosen_options({"method": "fedprox", "settings": {"method": {"name": "fedprox", "mu": 1.0, "prox": "squared"}}})
    {'mu'}
    """
    own, cls = row["settings"]["method"], METHODS.get(str(row["method"]))
    if cls is None:
        return set()
    usual = default_options(cls) | dict(preset_values(cls, preset_of(cls.name, own)))
    return {name for name, value in own.items() if name in usual.keys() - SCENARIO_SETS and value != usual[name]}


CFL_THRESHOLDS = {"absolute": ("epsilon1", "epsilon2"), "relative": ("relative1", "relative2"), "cosines": ("separation", "stationary")}


def thresholds_used(rows: Mapping[str, Sequence[ResultRow]]) -> str:
    """Say which thresholds decided about clusters, of methods that have them: those of CFL, FedClust and PACFL fit one network or data set.

    Examples
    --------
    >>> thresholds_used({"PACFL": [{"method": "pacfl", "settings": {"method": {"threshold": 12.0}}}]})
    'thresholds: PACFL 12'
    """
    said = []
    for label, members in rows.items():
        own = members[0]["settings"]["method"]
        if "thresholds" in own:
            names = CFL_THRESHOLDS.get(own["thresholds"], ())
            said.append(f"{label} {own['thresholds']} ({', '.join(f'{own[name]:g}' for name in names if name in own)})")
        elif "threshold" in own:
            value = own["threshold"]
            said.append(f"{label} {value if isinstance(value, str) else format(value, 'g')}")
    return f"thresholds: {'; '.join(said)}" if said else ""


def _title(row: ResultRow) -> str:
    preset = preset_of(str(row["method"]), row["settings"]["method"])
    name = TITLES.get(str(row["method"]), str(row["method"])) + (f", {preset}" if preset else "")
    return name + (" + fine-tuning" if is_fine_tuned(row) else "")


def _titles(named: Mapping[str, tuple[str, Mapping[str, Any]]], chosen: Mapping[str, set[str]] | None = None) -> dict[str, str]:
    """Name things: their name, the options that were ``chosen`` and, where several share a name, the settings in which those differ."""
    titles = {}
    for key, (name, settings) in named.items():
        others = [s for n, s in named.values() if n == name]
        differing = {k for s in others for k in s if any(o.get(k) != s[k] for o in others)}
        differing |= {f"method.{option}" for option in (chosen or {}).get(key, ())}
        shown = [f"{k.rpartition('.')[2]} {settings[k]}" for k in sorted(differing) if settings.get(k) is not None]
        titles[key] = f"{name} ({', '.join(shown)})" if shown else name
    return titles


def _metrics(rows: Sequence[ResultRow]) -> tuple[str, ...]:
    scores: tuple[str, ...] = ("clean", "backdoor") if "backdoor" in score_of(rows[0])["variants"] else ("mean", "worst")
    if metric_of(rows[0]) is Metric.R2:
        scores = ("r2", "worst_r2", "rmse")
    rare = ("balanced", "auc") if all(map(_leaves_out_classes, rows)) else ()
    ari = ("ari",) if any(row["ari"] is not None for row in rows) else ()
    return (*scores, *rare, *ari, "seconds")


def _leaves_out_classes(row: ResultRow) -> bool:
    """Whether accuracy may hide rare classes: own data, unbalanced at more than half of the sites."""
    if row["settings"]["scenario"]["name"] not in (OWN_FILES, AT_NODES, IN_MEMORY) or "balanced" not in score_of(row):
        return False
    tested = next(iter(score_of(row)["variants"].values())).get("tested", ())
    return bool(2 * score_of(row)["balanced"]["sites"] > sum(n > 0 for n in tested))


def value_of(row: ResultRow, metric: str) -> float | None:
    """Return one metric of a row: accuracies in percent, R², RMSE, ARI, seconds."""
    if metric == "ari":
        return None if row["ari"] is None else float(row["ari"])
    if metric == "seconds":
        return float(row["seconds"]["total"])
    score = score_of(row)
    if metric in ("balanced", "auc"):
        return (100.0 if metric == "balanced" else 1.0) * float(score[metric]["mean"])
    if metric == "rmse":
        value = score["rmse"]["mean"]
        return None if value is None else float(value)
    key = {"r2": "mean", "worst_r2": "worst"}.get(metric, metric)
    value = _score(row, metric)["mean"] if metric in ("clean", "backdoor") else score[key]
    return None if value is None else metric_of(row).scale * float(value)


def _cell(rows: Sequence[ResultRow], metric: str) -> Cell | None:
    values = [v for row in rows if (v := value_of(row, metric)) is not None]
    if not values:
        return None
    first = rows[0]
    participants = first["settings"]["run"].get("participants")
    paper = None if is_fine_tuned(first) else paper_value(first["scenario"], first["method"], metric, participants)
    spread = statistics.stdev(values) if len(values) > 1 else None
    full = measured_value(first["scenario"], first["method"], metric) if _as_measured(first) else None
    return Cell(statistics.fmean(values), spread, len(values), paper, full, _interval(rows, metric))


def _as_measured(row: ResultRow) -> bool:
    """Whether a run has the settings that ``measured.json`` was made with: everybody, nothing fine-tuned, EMD-CFL's links calibrated."""
    own, usual = row["settings"]["method"], row["settings"]["run"].get("participants") is None and not is_fine_tuned(row)
    usual = usual and preset_of(str(row["method"]), own) is None and not chosen_options(row)
    return usual and own.get("tolerance", "auto") == "auto" and own.get("grouping") != "benefit"


def _interval(rows: Sequence[ResultRow], metric: str) -> Interval | None:
    """Return the interval of a mean accuracy over seeds; None for other metrics, or where a run does not have its own."""
    if metric not in ("mean", "clean", "backdoor", "r2"):
        return None
    scores = [score for row in rows if (score := _score(row, metric)).get("mean") is not None]
    ends: list[tuple[Any, Any, Any]] = [(score["mean"], score.get("low"), score.get("high")) for score in scores]
    known = all(isinstance(value, float | int) for three in ends for value in three)
    found = over_seeds([Interval(*three, metric_of(rows[0])) for three in ends]) if known else None
    return None if found is None else found.inside(0.0)  # two seeds say little


UNSEEN_HEADS = ("scenario", "method", "sites tested", *UNSEEN.values(), "right true group")


def unseen_cells(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Write rows of ``unseen_rows`` for people, under ``UNSEEN_HEADS``."""
    return [
        [r["scenario"], r["method"], str(r["tested"]), *(r["metric"].text(r[key]) for key in UNSEEN), percent(r["right"])] for r in rows
    ]


def unseen_rows(results: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """Return accuracies at sites that were held out, over sites, folds and seeds: one row per scenario and method."""
    by_column, titles = _by_column(r for r in results if r.get("unseen"))
    found = []
    for key, rows in by_column.items():
        for label, members in by_label(rows).items():
            sites = [site for row in members for site in row["unseen"]]
            alike = [site["alike"] > 0.5 for site in sites if site["alike"] is not None]
            tested, right = sum(site["samples"] > 0 for site in sites), statistics.fmean(alike) if alike else None
            about = {"scenario": titles[key], "method": label, "tested": tested}
            found.append({**about, **mean_scores(sites), "metric": metric_of(sites[0]), "right": right})
    return found
