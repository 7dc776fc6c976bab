"""A run directory, read for its report page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from emdcfl.clustering import PairRatios
from emdcfl.core.checks import read_toml
from emdcfl.core.errors import StoreError
from emdcfl.core.metric import Metric, metric_of, score_of
from emdcfl.core.units import reading_order
from emdcfl.report.svg import COLOURS, SHAPES
from emdcfl.runs.outputs import read_reading, read_summary
from emdcfl.runs.personal import FINE_TUNED, with_personal
from emdcfl.runs.scoring import MetricsRow, better_rounds, check_rows, is_tested
from emdcfl.runs.store import RunStore
from emdcfl.runs.store.files import read_arrays, refuse_links
from emdcfl.runs.store.rounds import METRICS


@dataclass(frozen=True)
class Run:
    """The parts of a run directory that exist."""

    path: Path
    summary: dict[str, Any]
    rows: list[MetricsRow]
    config: dict[str, Any]
    pairs: PairRatios | None
    reading: dict[str, Any] | None
    baselines: dict[str, Run]

    @cached_property
    def clients(self) -> list[str]:
        return [str(c) for c in self.summary["clients"]]

    @cached_property
    def clusters(self) -> list[int] | None:
        found = self.summary.get("clusters")
        return None if found is None else [int(k) for k in found]

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """Cluster → the numbers of its clients, in the order of a reader."""
        found: dict[int, list[int]] = {}
        labels = self.clusters or []
        for i in self.order if labels else ():
            found.setdefault(labels[i], []).append(i)
        return found

    @cached_property
    def groups(self) -> list[str] | None:
        """True groups, where the scenario knows them."""
        found = self.summary.get("groups")
        return None if found is None else [str(g) for g in found]

    @property
    def variants(self) -> list[str]:
        return list(score_of(self.summary)["variants"])

    @property
    def metric(self) -> Metric:
        return metric_of(self.summary)

    @cached_property
    def last(self) -> dict[str, MetricsRow]:
        """Metrics of the last round in which each client was tested."""
        return {r["client"]: r for r in self.rows if r.get(self.metric)}

    def score_at(self, client: str, variant: str) -> float | None:
        """Return the last accuracy (or R²) of a client; none where it was not tested or has no test samples."""
        if not self.rows and client in self.clients:  # a baseline that had no rounds
            sites = score_of(self.summary)["variants"].get(variant, {}).get("sites") or []
            return sites[self.clients.index(client)] if len(sites) == len(self.clients) else None
        row = self.last.get(client)
        return float(row[self.metric][variant]) if row is not None and is_tested(row, variant) else None

    @property
    def others(self) -> dict[str, dict[str, Any]]:
        """Summaries of the baselines."""
        return {name: run.summary for name, run in self.baselines.items()}

    @cached_property
    def fine_tuned(self) -> dict[str, float | None]:
        """Client → score with the fine-tuned model that it kept."""
        told = self.summary.get("personalized") or {"kept": [], "clients": {}}
        return {c: (told["clients"].get(c) or {}).get(self.variants[0]) for c in told["kept"]}

    @cached_property
    def colours(self) -> dict[int, str]:
        """Style class of each cluster: the largest have a colour each, the rest are grey."""
        if self.clusters is None:
            return {}
        sizes = Counter(self.clusters)
        chosen = sorted(sorted(sizes, key=lambda k: (-sizes[k], k))[:COLOURS])
        return {k: f"k{chosen.index(k)}" if k in chosen else "kx" for k in sorted(sizes)}

    @cached_property
    def shapes(self) -> dict[str, str]:
        """Shape of each true group; circles for all where there are more groups than shapes."""
        names = list(dict.fromkeys(self.groups or []))
        return {g: SHAPES[i] if len(names) <= len(SHAPES) else "circle" for i, g in enumerate(names)}

    @cached_property
    def order(self) -> list[int]:
        """The numbers of the clients by cluster, and there in the order of a reader."""
        labels = self.clusters or [0] * len(self.clients)
        return sorted(reading_order(self.clients), key=labels.__getitem__)


def read_run(folder: Path) -> Run:
    """Read a run directory; only ``summary.json`` must be there. The summary gets ``better_rounds``, where there are any."""
    refuse_links(folder)
    summary = read_summary(folder)
    metric = metric_of(summary).value
    missing = [key for key in ("method", "scenario", "clients", metric) if key not in summary]
    if missing or "variants" not in summary[metric]:
        raise StoreError(f"{folder / 'summary.json'}: no {(missing or [f'{metric}.variants'])[0]!r}; resume the run to write it again")
    found = {p.name: p for p in sorted((folder / "baselines").glob("*")) if (p / "summary.json").is_file()}
    rows = RunStore(folder).read_metrics()
    check_rows(rows, str(folder / METRICS))
    better = better_rounds(rows, summary)
    return Run(
        path=folder,
        summary=summary if better is None else {**summary, "better_rounds": better},
        rows=rows,
        config=_read_config(folder / "config.toml"),
        pairs=_read_distances(folder, summary),
        reading=read_reading(folder) if summary.get("clusters") is not None else None,
        baselines={name: run for folder_name, path in found.items() for name, run in _both(folder_name, read_run(path))},
    )


def _both(name: str, run: Run) -> list[tuple[str, Run]]:
    """Return a baseline and, where its clients fine-tuned, what came out after it."""
    if "personalized" not in run.summary:
        return [(name, run)]
    summary, rows = with_personal(run.summary, run.rows)
    summary.pop("better_rounds", None)  # of the models before
    return [(name, run), (name + FINE_TUNED, replace(run, summary=summary, rows=rows))]


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return read_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: truncated or damaged: {error}; restore it, or start again with another --out") from error


def _read_distances(folder: Path, summary: dict[str, Any]) -> PairRatios | None:
    path = folder / "distances.npz"
    if not path.exists() or summary.get("clusters") is None:
        return None
    arrays = read_arrays(path)
    if "sample" in arrays:  # of too many clients for one matrix; heatmap.png shows the sample
        return None
    n = len(summary["clients"])
    for name in ("W", "epsilon", "kind"):
        if name not in arrays or arrays[name].shape != (n, n):
            raise StoreError(f"{path}: expected {name} of shape ({n}, {n}), one row per client; resume the run to write it again")
    return PairRatios(arrays["W"], arrays["epsilon"], arrays["kind"], [int(k) for k in summary["clusters"]])
