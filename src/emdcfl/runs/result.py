"""``Result``: a run directory in memory."""

from __future__ import annotations

import html
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from emdcfl.core.errors import DataError, StoreError, nearest
from emdcfl.core.metric import Metric, metric_of, score_of
from emdcfl.core.units import plural, some
from emdcfl.data.own import frames
from emdcfl.data.own.arrays import inputs_like
from emdcfl.data.types import Scenario
from emdcfl.methods.base import Serving
from emdcfl.runs.config import Config
from emdcfl.runs.outputs import load_outputs, write_outputs
from emdcfl.runs.scoring import MetricsRow, check_rows, is_tested
from emdcfl.runs.served import ModelInfo, Served, served
from emdcfl.runs.store import RunStore, data_record
from emdcfl.runs.store.rounds import METRICS

if TYPE_CHECKING:
    from emdcfl.runs.new_sites.nearest import NearestCluster
    from emdcfl.runs.new_sites.place import Placement


@dataclass(frozen=True)
class Accuracy:
    """Test accuracy: unweighted mean and minimum over clients, every client's own, and the mean's 95 % interval over these sites."""

    mean: float | None
    worst: float | None
    clients: dict[str, float]
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Regression:
    """Test scores of predicted numbers: R² and RMSE, each as unweighted mean over clients, the worst client's, and every client's own.

    ``low`` and ``high`` are the ends of the 95 % interval of the mean R² over these sites.
    """

    r2: float | None
    worst_r2: float | None
    rmse: float | None
    clients: dict[str, tuple[float, float]]
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """A run, finished or not: what a run directory holds, in memory."""

    config: Config
    """Complete: every default is written out."""
    summary: Mapping[str, Any]
    """What ``summary.json`` holds."""
    history: list[MetricsRow]
    """One row per tested round and client: what ``metrics.jsonl`` holds."""
    about: ModelInfo
    """Classes, network, preprocessing."""
    source: Serving | Callable[[], Serving]
    personal: Mapping[str, Tensor] | Callable[[str], Tensor | None] = field(default_factory=dict)
    """Client → the fine-tuned state that it kept."""
    scenario: Scenario | None = None
    state: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    """The run directory, where there is one."""

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(self.summary["clients"])

    @property
    def clusters(self) -> dict[str, int] | None:
        """Client → cluster; ``None`` for methods without hard clusters."""
        found = self.summary["clusters"]
        return None if found is None else dict(zip(self.clients, found, strict=True))

    @property
    def ari(self) -> float | None:
        """Agreement with the true groups, where they are known."""
        found: float | None = self.summary["ari"]
        return found

    @property
    def metric(self) -> Metric:
        """Accuracy, or R² where numbers are predicted."""
        return metric_of(self.summary)

    @property
    def accuracy(self) -> Accuracy:
        """Test accuracy; of a run that predicts numbers nothing is known, see ``regression``."""
        return self.plain if self.metric is Metric.ACCURACY else Accuracy(None, None, {})

    @property
    def plain(self) -> Accuracy:
        """Scores (accuracy or R²) before fine-tuning at home."""
        score = score_of(self.summary)
        variant = next(iter(score["variants"]))
        last = {row["client"]: score_of(row)[variant] for row in self.history if is_tested(row, variant)}
        own = {c: last[c] for c in self.clients if c in last}
        return Accuracy(score["mean"], score["worst"], own, score.get("low"), score.get("high"))

    @property
    def regression(self) -> Regression | None:
        """R² and RMSE with the model that each client should use; ``None`` for a run on classes."""
        if self.metric is not Metric.R2:
            return None
        used = score_of(self.summary.get("personalized", self.summary))
        sites, rmse = next(iter(used["variants"].values())), used["rmse"]
        pairs = zip(self.clients, sites["sites"], sites["rmse"]["sites"], strict=True)
        own = {client: (r2, error) for client, r2, error in pairs if r2 is not None}
        return Regression(used["mean"], used["worst"], rmse["mean"], own, used["low"], used["high"])

    @cached_property
    def serving(self) -> Serving:
        """The models, and which client is served with which; read from the run directory when first asked for."""
        return self.source() if callable(self.source) else self.source

    @property
    def models(self) -> dict[str, nn.Module]:
        """Client → its network in evaluation mode (of mixtures, the model with the largest weight)."""
        return {client: self.model_of(client).module() for client in self.clients}

    @property
    def personalized(self) -> Accuracy | None:
        """Accuracy (or R²) with fine-tuning at home, each client with the model it should use; ``None`` for a run without."""
        told = self.summary.get("personalized")
        if told is None:
            return None
        score = score_of(told)
        variant = next(iter(score["variants"]))
        own = {c: found[variant] for c, found in told["clients"].items() if found and variant in found}
        return Accuracy(score["mean"], score["worst"], own, score.get("low"), score.get("high"))

    def personal_state(self, client: str) -> Tensor | None:
        """Return the fine-tuned state a client kept; ``None`` where it kept none."""
        return self.personal(client) if callable(self.personal) else self.personal.get(client)

    def model_of(self, client: str, *, plain: bool = False) -> Served:
        """Return the model a client should use: the fine-tuned one it kept, else (or if ``plain``) what it is served with."""
        client = str(client)  # as the names of sites are, whatever they were in ``fit``
        if client not in self.clients:
            raise DataError(f"there is no client {client!r}: {nearest(client, self.clients)}")
        own = None if plain else self.personal_state(client)
        if own is not None:
            return Served(self.about, own[None], (1.0,))
        all_ = self.serving
        return served(self.about, all_.models, all_.weights[self.clients.index(client)], all_.mix)

    def predict(self, client: str, x: Any, *, plain: bool = False) -> list[Any]:
        """Return what the client's model (see ``model_of``) predicts for ``x``, given as to ``fit``.

        Classes have the type that they had in the training data of all clients (int, float or bool), else they are text.
        """
        if self.about.target is not None:
            numbers: list[float] = self.model_of(client, plain=plain).probabilities(self.inputs(x))[:, 0].tolist()
            return numbers
        labels = self.about.labels
        return [labels[i] for i in self.predict_proba(client, x, plain=plain).argmax(1).tolist()]

    def predict_proba(self, client: str, x: Any, *, plain: bool = False) -> Tensor:
        """Return class probabilities, one column per entry of ``about.classes``; ``x`` as given to ``fit``, a frame for a run on tables."""
        if self.about.target is not None:
            raise DataError("a run that predicts numbers has no class probabilities; use predict")
        return self.model_of(client, plain=plain).probabilities(self.inputs(x))

    def inputs(self, x: Any) -> Tensor:
        """Return raw inputs in the form in which the run stores samples."""
        if frames.is_table(x):
            return frames.encode(x, self.about.encoding)
        if self.about.encoding["kind"] == "table":
            raise DataError(f"expected a frame with the columns that the run was trained on, got {type(x).__name__}")
        return inputs_like(x, self.about.shape)

    def place(self, site: Any, *, name: str | None = None, label: str | None = None) -> Placement:
        """Say which group a new site belongs to: a folder or table, a frame, or ``(X, y)`` arrays."""
        from emdcfl.runs.new_sites.place import place

        return place(self, site, name=None if name is None else str(name), label=label)

    def place_unlabelled(self, site: Any, *, name: str | None = None) -> NearestCluster:
        """Say which groups a site without labels is nearest to: a folder or table, a frame, or inputs ``X``; ``model`` serves it."""
        from emdcfl.runs.new_sites.nearest import place_unlabelled

        return place_unlabelled(self, site, name=None if name is None else str(name))

    def save(self, folder: str | Path) -> Path:
        """Write the run directory that ``emdcfl run --out`` would have written, and return its path."""
        place = Path(folder)
        if place.exists() and not (place.is_dir() and not any(place.iterdir())):
            raise StoreError(f"{place}: expected a new or empty folder, got one in use; choose another, or remove it first")
        if self.state is None:
            if self.folder is None:
                raise StoreError("this result holds no state of a run, so it cannot be saved; save the one that fit returned")
            if place.resolve().is_relative_to(self.folder.resolve()):
                raise StoreError(f"{place}: expected a folder outside the run directory {self.folder}, which would be copied into itself")
            shutil.copytree(self.folder, place, ignore=shutil.ignore_patterns(".lock"), dirs_exist_ok=True)
            return place
        with RunStore.open(place, self.config) as store:
            if self.scenario is not None:
                data_record.bind(place, self.config.scenario.options, self.scenario.fingerprints)
            store.append_metrics(self.history)
            store.save_state(self.summary["rounds"], self.state, self.extra)
            write_outputs(place, self)
        return place

    def __repr__(self) -> str:
        return f"Result({self._headline()})"

    def _headline(self) -> str:
        s, score, metric = self.summary, self.plain, self.metric
        groups = "" if s["clusters"] is None else f" in {plural(s['k'], 'cluster')}"
        scores = f"{metric.label} {metric.text(score.mean)}, worst client {metric.text(score.worst)}"
        tested, tuned = "not tested" if score.mean is None else scores, self.personalized
        tested += "" if tuned is None or tuned.mean is None else f" ({metric.text(tuned.mean)} fine-tuned at home)"
        if (numbers := self.regression) is not None and numbers.rmse is not None:
            tested += f", RMSE {numbers.rmse:.3g}"
        rounds = f"{plural(s['rounds'], 'round')}{'' if s['finished'] else ', unfinished'}"
        return f"{s['method']} on {s['scenario']}, seed {s['seed']}: {len(self.clients)} clients{groups}, {tested}, {rounds}"

    def _repr_html_(self) -> str:
        """Show clusters and scores as a table in a notebook."""
        score, groups = self.plain.clients, self.clusters or {}
        members: dict[Any, list[str]] = {}
        for client in self.clients:
            members.setdefault(groups.get(client, "–"), []).append(client)
        rows = []
        for k, names in sorted(members.items(), key=lambda item: str(item[0])):
            known = [score[c] for c in names if c in score]
            mean = self.metric.text(sum(known) / len(known) if known else None)
            rows.append(f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(some(names, most=8))}</td><td>{mean}</td></tr>")
        head = f"<tr><th>cluster</th><th>clients</th><th>{self.metric.label}</th></tr>"
        return f"<p>{html.escape(self._headline())}</p><table>{head}{''.join(rows)}</table>"


def load(folder: str | Path, *, trust_model: bool = False) -> Result:
    """Read a run directory; see ``emdcfl.load``, which can also be given data in memory."""
    path = Path(folder)
    outputs = load_outputs(path, trust_model=trust_model)
    store = RunStore.read(path)
    config = store.config() if trust_model else store.foreign_config()
    history = store.read_metrics()
    check_rows(history, str(path / METRICS))
    return Result(config=config, history=history, folder=path, **outputs)
