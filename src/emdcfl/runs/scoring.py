"""From a ``Serving`` to numbers: accuracy (or R²) of every client by the one declared rule, agreement with the truth, the summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from emdcfl.clustering import adjusted_rand
from emdcfl.core import tasks
from emdcfl.core.errors import ClientError, StoreError
from emdcfl.core.federation import Federation
from emdcfl.core.learning.balance import SCORES, possible
from emdcfl.core.metric import Metric, metric_of, score_of
from emdcfl.core.schema import Reply
from emdcfl.methods.base import Serving
from emdcfl.runs.served import served_to
from emdcfl.runs.summary_types import MAX_SCORE
from emdcfl.runs.verdict.intervals import LEVEL, SiteScores, difference, new_sites, these_sites

MetricsRow = dict[str, Any]
"""One line of ``metrics.jsonl``: a client in a round."""

MIN_RISE = 0.02
"""Change of the mean score in the last round, or since the best one, from which other rounds would have been better."""

TESTED: Mapping[Metric, Mapping[str, str]] = {
    Metric.ACCURACY: {"accuracy": "accuracy", "test_loss": "loss", "test_samples": "n"},
    Metric.R2: {"r2": "r2", "r2_error": "r2_error", "test_loss": "loss", "test_samples": "n"},
}
"""Key of a row → score of a test (``tasks.test``)."""


def check_rows(rows: Sequence[Any], where: str) -> None:
    """Raise ``StoreError`` unless these are rows as ``score`` makes them; a run directory may come from elsewhere."""
    for row in rows:
        if not isinstance(row, dict) or type(row.get("round")) is not int or not isinstance(row.get("client"), str):
            raise StoreError(f"{where} holds a row that no run writes; start again with another --out")
        scores = ("r2", "r2_error") if metric_of(row) is Metric.R2 else ("accuracy",)
        found = [row.get(name) for name in (*scores, "test_loss", "test_samples")]
        numbers = [row.get("cluster"), row.get("train_loss"), *(v for by in found if isinstance(by, dict) for v in by.values())]
        variants = [set(by) for by in found if isinstance(by, dict)]
        whole = all(by is None for by in found) or (len(variants) == len(found) and all(names == variants[0] for names in variants))
        small = all(value is None or (type(value) in (int, float) and not abs(value) > MAX_SCORE) for value in numbers)
        if not whole or not small:
            raise StoreError(f"{where} holds a row with values that no run writes; start again with another --out")
        uneven = row.get("unbalanced", {})
        known = isinstance(uneven, dict) and all(isinstance(one, dict) for one in uneven.values())
        if not known or not all({*map(type, one.values())} <= {int, float} and possible(one) for one in uneven.values()):
            raise StoreError(f"{where} holds a row with scores that no run writes; start again with another --out")


@dataclass(frozen=True)
class Untested:
    """A round that is complete but for its test, which travels with the next round's requests."""

    round: int
    losses: dict[str, float]
    """Client → training loss."""
    excluded: dict[str, str]
    """Client → why it was not asked again in that round."""


class RoundTest:
    """The test of a round: every client with what it is served.

    ``variants`` are the test variants of each client, where they are known; a reply about others is rejected.
    """

    def __init__(self, fed: Federation, serving: Serving, about: Untested, variants: Mapping[str, Collection[str]] | None = None) -> None:
        self.fed, self.serving, self.about, self.variants = fed, serving, about, variants
        self._inputs = served_to(serving, fed.clients)

    def piggyback(self) -> bool:
        """Have the engine send the test along with its next requests, if it does so; ``rows`` is then to be called after these."""
        with self.fed.revisit(self.about.round, self.about.excluded):
            return self.fed.piggyback(tasks.test, self._inputs)

    def rows(self) -> list[MetricsRow]:
        """Return one row per client, in client order; whoever has not answered yet is asked."""
        about, clusters = self.about, self.serving.clusters
        with self.fed.revisit(about.round, about.excluded):
            found = outcomes(self.fed, self._inputs, self.variants)
        rows = []
        for i, client in enumerate(self.fed.clients):
            cluster = None if clusters is None else int(clusters[i])
            row = {"round": about.round, "client": client, "cluster": cluster, "train_loss": about.losses.get(client)}
            rows.append({**row, **found[client]})
        return rows


def outcomes(
    fed: Federation, inputs: Mapping[str, Mapping[str, Any]], variants: Mapping[str, Collection[str]] | None = None
) -> dict[str, dict[str, Any]]:
    """Test clients with models and weights of their own; returns what a row of the metrics says of each, ``None`` without a reply."""
    names = TESTED[Metric.R2 if fed.layout.outputs == 1 else Metric.ACCURACY]

    def verify(client: str, reply: Reply) -> None:
        wanted = set(reply["n"] if variants is None else variants[client])
        for field in names.values():
            if field not in reply:
                raise ClientError(f"expected {field} of the test variants, got none")
            if set(reply[field]) != wanted:
                raise ClientError(f"expected {field} of the test variants {sorted(wanted)[:8]}, got {sorted(reply[field])[:8]}")
        for variant, scores in _balanced(reply).items():
            if variant not in wanted or not possible(scores):
                raise ClientError(f"expected balanced accuracy and AUC with their sizes, got {sorted(scores)[:8]} of {variant[:40]!r}")

    replies = fed.run(tasks.test, inputs, verify=verify)
    return {c: as_row(replies.valid[c], names) if c in replies.valid else dict.fromkeys(names) for c in inputs}


def as_row(reply: Reply, names: Mapping[str, str]) -> dict[str, Any]:
    """Return what a row of the metrics says of scores by test variant; ``names`` is one of ``TESTED``."""
    row = {name: reply[field] for name, field in names.items()}
    return {**row, "unbalanced": uneven} if (uneven := _balanced(reply)) else row


def _balanced(reply: Reply) -> dict[str, dict[str, float]]:
    """Test variant → scores of unbalanced classes, where a client sent any."""
    found: dict[str, dict[str, float]] = {}
    for field in (key for name in SCORES for key in (name, f"{name}_n")):
        for variant, value in reply.get(field, {}).items():
            found.setdefault(variant, {})[field] = float(value)
    return found


def site_scores(rows: Sequence[MetricsRow], variant: str, scored: Sequence[str] | None = None, std: float | None = None) -> dict[str, Any]:
    """Score one test variant over clients; who did not answer, has no test samples or is not ``scored`` does not count.

    Returns ``mean`` (unweighted) and ``worst``; ``low`` and ``high``, the 95 % interval of the mean over these sites, and ``new_sites``,
    that over sites like these (``verdict/intervals.py``); ``balanced`` and ``auc``, each with its interval, where ``sites`` have unbalanced
    classes; ``sites`` and ``tested``: score (None where it does not count) and number of test samples of every client. Of R² also its
    standard ``errors``, and ``rmse`` with mean, worst and sites; ``std`` is that of the numbers to predict. What cannot be computed is
    None.
    """
    wanted = None if scored is None else set(scored)
    counts = [is_tested(row, variant) and (wanted is None or row["client"] in wanted) for row in rows]
    samples = [row.get("test_samples") or {} for row in rows]
    tested = tuple(int(own.get(variant, 1)) if counted else 0 for own, counted in zip(samples, counts, strict=True))
    numbers = any(metric_of(row) is Metric.R2 for row in rows)

    def at_sites(of: Callable[[MetricsRow], Any]) -> tuple[float, ...]:
        return tuple(float(of(row)[variant]) if counted else 0.0 for row, counted in zip(rows, counts, strict=True))

    scores = SiteScores(at_sites(score_of), tested, at_sites(lambda row: row["r2_error"]) if numbers else None)
    values = [p for p, _ in scores.counted]
    these, new = these_sites(scores), new_sites(scores)
    own = [p if n else None for p, n in zip(scores.values, tested, strict=True)]
    return {
        "mean": float(np.mean(values)) if values else None,
        "worst": min(values, default=None),
        "low": None if these is None else these.low,
        "high": None if these is None else these.high,
        "new_sites": None if new is None else {"low": new.low, "high": new.high},
        **_unbalanced([row for row, counted in zip(rows, counts, strict=True) if counted], variant),
        **(_rmse(at_sites(lambda row: row["test_loss"]), tested, 1.0 if std is None else std) if numbers else {}),
        "sites": own,
        **({} if scores.errors is None else {"errors": list(scores.errors)}),
        "tested": list(tested),
    }


def _rmse(losses: Sequence[float], tested: Sequence[int], std: float) -> dict[str, dict[str, Any]]:
    """Return the root mean squared error in the units of the data: mean and worst over clients, and every client's own."""
    own = [std * math.sqrt(max(loss, 0.0)) if n else None for loss, n in zip(losses, tested, strict=True)]
    known = [value for value in own if value is not None]
    return {"rmse": {"mean": float(np.mean(known)) if known else None, "worst": max(known, default=None), "sites": own}}


def _unbalanced(rows: Sequence[MetricsRow], variant: str) -> dict[str, dict[str, Any]]:
    """Return balanced accuracy and AUC over the sites with unbalanced classes, and how many these are; nothing where there are none."""
    known = [row["unbalanced"][variant] for row in rows if variant in row.get("unbalanced", {})]
    found = {}
    for name in SCORES if known else ():
        shares = SiteScores(tuple(one[name] for one in known), tuple(max(1, round(one[f"{name}_n"])) for one in known))
        interval = these_sites(shares)
        assert interval is not None
        found[name] = {"mean": interval.mean, "low": interval.low, "high": interval.high, "sites": len(known)}
    return found


def rests_on(summary: Mapping[str, Any], score: Mapping[str, Any]) -> str:
    """Say how many of a run's clients a score rests on, where it is not all.

    Examples
    --------
    >>> rests_on({"clients": ["a", "b", "c"], "scored": None}, {"tested": [40, 0, 12]})
    'tested on 2 of 3'
    """
    found, wanted = sum(n > 0 for n in score.get("tested") or ()), len(summary.get("scored") or summary["clients"])
    return "" if "tested" not in score or found == wanted else f"tested on {found} of {wanted}"


def is_tested(row: MetricsRow, variant: str) -> bool:
    """Whether a row has a score of a test variant that samples stand behind; where it does not count them, they do."""
    score, samples = row.get(metric_of(row)) or {}, row.get("test_samples") or {}
    return score.get(variant) is not None and bool(samples.get(variant, 1))


def tested_scores(rows: Sequence[MetricsRow]) -> dict[int, dict[str, list[float]]]:
    """Round → test variant → scores of the clients that were tested."""
    found: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        for variant in (v for v in row.get(metric_of(row)) or () if is_tested(row, v)):
            found.setdefault(int(row["round"]), {}).setdefault(variant, []).append(float(score_of(row)[variant]))
    return found


def agreement(clusters: Tensor | Sequence[int] | None, clients: Sequence[str], truth: Mapping[str, str] | None) -> float | None:
    """ARI with the true groups, where both exist."""
    if clusters is None or truth is None:
        return None
    return adjusted_rand([truth[c] for c in clients], [int(k) for k in clusters])


def by_round(rows: Sequence[MetricsRow], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Number of clusters, ARI and mean score of every tested round, from a run's metrics and its summary; of several tests, each one's."""
    truth = None if summary["groups"] is None else dict(zip(summary["clients"], summary["groups"], strict=True))
    tests = list(score_of(summary)["variants"])
    rounds: dict[int, list[MetricsRow]] = {}
    for row in rows:
        rounds.setdefault(row["round"], []).append(row)
    found: list[dict[str, Any]] = []
    for index, here in rounds.items():
        clusters = [row["cluster"] for row in here] if summary["clusters"] is not None else None
        k = summary["k"] if clusters is None else len(set(clusters))
        ari = agreement(clusters, [row["client"] for row in here], truth)
        means = {test: site_scores(here, test, summary["scored"])["mean"] for test in tests}
        found.append({"round": index, "k": k, "ari": ari, "mean": means[tests[0]]} | ({"variants": means} if len(tests) > 1 else {}))
    return found


def better_rounds(rows: Sequence[MetricsRow], summary: Mapping[str, Any]) -> tuple[int, float] | None:
    """Return a number of rounds with which a run may have done better, and how its mean score changed; None if there is none.

    Twice as many, where it gained more than chance in the second half of its tested rounds and at least ``MIN_RISE`` in the last one,
    or a round since the test before. Those of its best round, where it has lost more than chance and ``MIN_RISE`` since.
    """
    variant, rounds = next(iter(score_of(summary)["variants"])), dict[int, list[MetricsRow]]()
    for row in rows:
        rounds.setdefault(row["round"], []).append(row)
    scores = {number: SiteScores.of(site_scores(here, variant, summary.get("scored"))) for number, here in rounds.items()}
    tested = {number: one for number, one in scores.items() if one is not None and one.counted}
    if len(tested) < 2:
        return None
    *_, before, last = numbers = list(tested)
    best = max(numbers, key=lambda number: sum(tested[number].values))
    gained = difference(tested[last], tested[numbers[(len(numbers) - 1) // 2]])
    now = difference(tested[last], tested[before])
    since = difference(tested[last], tested[best], 1 - (1 - LEVEL) / (len(tested) - 1))  # the best of all rounds is so by chance, too
    risen = 0.0 if now is None else now.mean / (last - before)
    if gained is not None and gained.sign == 1 and risen >= MIN_RISE:
        return 2 * last, risen
    return (best, since.mean) if since is not None and since.sign == -1 and since.mean <= -MIN_RISE else None


def model_names(serving: Serving, clients: Sequence[str]) -> list[str]:
    """Name of each row of ``serving.models``: ``cluster-<k>``, ``component-<k>`` in mixtures, ``client-<name>`` for personal models."""
    rows = serving.models.shape[0]
    if serving.clusters is not None:
        label = {int(serving.weights[i].argmax()): int(k) for i, k in reversed(list(enumerate(serving.clusters.tolist())))}
        return [f"cluster-{label[row]}" if row in label else f"unused-{row}" for row in range(rows)]
    if serving.mix == "predictions":
        return [f"component-{k}" for k in range(rows)]
    personal = rows == len(clients) and rows > 1
    return [f"client-{clients[k]}" if personal else f"cluster-{k}" for k in range(rows)]
