"""What to do after a run, from its summary, its interpretation and its baselines.

Distances say which sites look alike; test data say which training pays. Where baselines were run, the paired differences to them decide
(:mod:`emdcfl.runs.verdict.intervals`): a grouping that loses is not recommended, however clear its distances are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from emdcfl.clustering import members_of
from emdcfl.core.metric import Metric, metric_of, score_of
from emdcfl.core.units import names, percent, percent_range, plural, some
from emdcfl.runs.verdict.chance import Guessing, guessing, over_mean
from emdcfl.runs.verdict.intervals import Interval, SiteScores, difference, more_samples
from emdcfl.runs.verdict.trained_with import trained

LOGISTIC, LINEAR = "logistic", "linear"
"""Regressions per site that stand beside networks: of classes, and of numbers."""

BASELINES = {
    "fedavg": "one model for all",
    "fedavg+ft": "one model for all, fine-tuned at home",
    "local": "every site alone",
    LOGISTIC: "logistic regression per site",
    LINEAR: "linear regression per site",
}
"""Baseline → what a comparison calls it."""

DISAGREE = 0.05
"""Loss of a group against its sites alone from which on differing labels are the likely reason."""

STANDS_OUT = 0.99
"""Confidence with which a single site is named: there are many sites to compare."""

DETECTABLE = 0.02
"""Difference that test data should be able to show; where an interval is wider, a comparison is undecided."""

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Advice:
    """What to do, and why."""

    choice: str
    """``"this run"``, the name of a baseline, ``"undecided"``, or ``"none"`` where no model has learned anything."""
    headline: str
    """What to do in one line."""
    reason: str
    """What that rests on."""
    gains: Mapping[str, Interval]
    """Score of this run less that of each baseline, paired by site."""
    doubts: list[str]
    """What speaks against the grouping, with the remedy."""
    look: list[str]
    """The sites that lose most."""


def gains(summary: Summary, baselines: Mapping[str, Summary]) -> dict[str, Interval]:
    """Return what this run is better than each baseline, paired by site; baselines without a common test are left out."""
    own = scores_of_sites(used(summary))
    compared = {name: difference(own, scores_of_sites(other)) for name, other in baselines.items() if name in BASELINES}
    return {name: found for name, found in compared.items() if found is not None}


def used(summary: Summary) -> Summary:
    """Return the summary with the scores of the models that clients should use: after fine-tuning, where there was any."""
    return {**summary, metric_of(summary).value: score_of(summary["personalized"])} if "personalized" in summary else summary


def _tuned(summary: Summary) -> str:
    """Say that models are fine-tuned, where a client kept one that is."""
    return ", fine-tuned at home" if summary.get("personalized", {}).get("kept") else ""


def scores_of_sites(summary: Summary) -> SiteScores:
    """Scores of the sites in the main variant; of a summary without them, the mean as that of a single site."""
    score = score_of(summary)
    found = SiteScores.of(next(iter(score.get("variants", {}).values()), {}))
    if found is None:
        mean = score.get("mean") if metric_of(summary) is Metric.ACCURACY else None
        found = SiteScores((mean or 0.0,), (0 if mean is None else int(score.get("samples") or 0),))
    return found


def rivals(summary: Summary, baselines: Mapping[str, Summary]) -> dict[str, Interval]:
    """Return the gains over baselines that are other trainings than this run: one group is one model for all, by another name."""
    one = summary["k"] == 1
    same = {"fedavg": one and not _tuned(summary), "fedavg+ft": one and "personalized" in summary, "local": all_alone(summary)}
    return {name: gain for name, gain in gains(summary, baselines).items() if not (same.get(name) and gain.sign == 0)}


def all_alone(summary: Summary) -> bool:
    """Whether every group that a run ended with consists of one site."""
    return summary.get("clusters") is not None and summary["k"] == trained(summary)


def advice(summary: Summary, baselines: Mapping[str, Summary]) -> Advice | None:
    """Say what to do, from paired differences to the baselines; None where there is nothing to compare with.

    A training whose models are no better than guessing is never recommended.
    """
    found = _by_differences(summary, baselines)
    if found is None:
        return None
    trained = {"this run": used(summary), **{name: one for name, one in baselines.items() if name in BASELINES}}
    choice = found.choice if found.choice in trained else "fedavg" if "fedavg" in found.gains else "this run"
    guesses = {name: guessing(one, _over_guess(one, baselines)) for name, one in trained.items()}
    if (nothing := guesses[choice]) is None:
        return replace(found, doubts=[*_rare_classes(summary, trained, choice), *found.doubts])
    useful = {name: one for name, one in trained.items() if score_of(one).get("low") is not None and guesses[name] is None}
    if not useful:
        return replace(found, choice="none", headline=no_model(summary, choice, nothing))
    best = max(useful, key=lambda name: _beyond_classes(useful[name]))
    instead = what_to_do(summary) if best == "this run" else _train(best)
    return replace(found, choice=best, headline=f"{instead}: {_called(summary, choice)} {nothing.says}")


def _rare_classes(summary: Summary, trained: Mapping[str, Summary], choice: str) -> list[str]:
    """Say which training clearly finds rare classes better: of 2 % positives, all may be missed within two points of accuracy."""
    found = {name: score_of(one)["balanced"] for name, one in trained.items() if "balanced" in score_of(one)}
    if choice not in found or 2 * found[choice]["sites"] <= len(summary["clients"]):
        return []
    best, own = max(found, key=lambda name: float(found[name]["mean"])), found[choice]
    if found[best]["low"] <= own["high"]:
        return []
    scores = " against ".join(f"{percent(one['mean'])} ({percent_range(one['low'], one['high'])})" for one in (found[best], own))
    return [
        f"{_called(summary, best)} finds rare classes better than {_called(summary, choice)}: balanced accuracy {scores}; "
        "use it where they count"
    ]


def _over_guess(summary: Summary, baselines: Mapping[str, Summary]) -> Interval | None:
    """Return the score less that of each site's most frequent class, or of its mean, where a regression per site was run beside it."""
    if metric_of(summary) is Metric.R2:
        mean = baselines.get(LINEAR, {}).get("training_mean")
        return None if mean is None else over_mean(summary, mean)
    frequent = SiteScores.of(baselines.get(LOGISTIC, {}).get("most_frequent", {}))
    return None if frequent is None else difference(scores_of_sites(summary), frequent)


def no_model(summary: Summary, choice: str, nothing: Guessing) -> str:
    """Say that nothing was learned."""
    return f"No model is of use yet: {_called(summary, choice)} {nothing.says}; {nothing.remedy} may help"


def _beyond_classes(summary: Summary) -> float:
    """What trainings are ordered by where one of them only guesses: balanced accuracy where classes are unbalanced."""
    score = score_of(summary)
    return float(score["balanced"]["mean"] if "balanced" in score else score["mean"])


def _by_differences(summary: Summary, baselines: Mapping[str, Summary]) -> Advice | None:
    found = rivals(summary, baselines)
    if not found:
        return None
    worse = {name: g for name, g in found.items() if g.sign == -1}
    networks = {name: g for name, g in found.items() if name not in (LOGISTIC, LINEAR)}
    better = {name: g for name, g in networks.items() if g.sign == 1}
    alone = baselines.get("local")
    disagree, look = _disagreement(used(summary), alone), _losers(used(summary), alone)
    apart = _other_names(summary) or _never_right(used(summary), baselines.get("fedavg"))
    doubts = disagree or _only_fine_tuned(summary, alone)
    told = worth(summary, baselines)
    if worse:
        best = _best(worse, baselines, disagree=bool(disagree) and summary["k"] == 1)
        doubts = [*apart, *doubts] or [f"training as in this run costs {(-worse[best]).points('')} against {BASELINES[best]}"]
        return Advice(best, _instead(summary, best, worse[best]), told, found, [*_own_rounds(summary, -worse[best]), *doubts], look)
    if better:
        least = min(better, key=lambda name: better[name].mean)
        other_rounds = {name: baselines[name] for name, gain in better.items() if _may_catch_up(baselines[name], gain)}
        to_do = what_to_do(summary)
        if all_alone(summary) and "local" in found:  # what it shared before the groups parted made the difference
            to_do = f"Train as in this run, which ends with every site alone{_tuned(summary)}"
        text = f"{to_do}: worth {better[least].points('')} against {BASELINES[least]}"
        if least in other_rounds:
            text += ", which is still improving" if other_rounds[least]["better_rounds"][1] > 0 else ", which was better after fewer rounds"
        level = [BASELINES[name] for name, gain in found.items() if gain.sign == 0]
        text += f"; {level[0] if len(level) == 1 else f'{len(level)} others'} may be as good" if level else ""
        late = [_other_rounds(BASELINES[name], other) for name, other in other_rounds.items()]
        return Advice("this run", text, told, found, [*apart, *late, *doubts], look)
    return Advice("undecided", _undecided(summary, networks or found, baselines), told, found, [*apart, *doubts], look)


def _own_rounds(summary: Summary, gain: Interval) -> list[str]:
    """Say that this run might be as good as what is better than it, after more or fewer rounds."""
    return [_other_rounds(_called(summary), summary)] if _may_catch_up(summary, gain) else []


def _may_catch_up(other: Summary, gain: Interval) -> bool:
    """Whether the worse of two might be as good after more rounds, or was after fewer: what it lost since is known."""
    change = float(other.get("better_rounds", (0, 0.0))[1])
    return change > 0 or (change < 0 and gain.low <= -change)


def _other_rounds(name: str, other: Summary) -> str:
    """Say that a training might be as good after more or fewer rounds."""
    (better, change), rounds = other["better_rounds"], plural(int(other["rounds"]), "round")
    points = _in_units(other, abs(change))
    if change > 0:
        return f"{name} gained {points} in the last of {rounds}: with more it may be as good (--rounds {better})"
    return f"{name} was best after round {better} of {rounds} and lost {points} since: it may be as good (--rounds {better})"


def _best(worse: Mapping[str, Interval], baselines: Mapping[str, Summary], *, disagree: bool) -> str:
    """Return the baseline to use instead; where labels do not agree, a shared start must be clearly better than none to be recommended."""
    best = min(worse, key=lambda name: worse[name].mean)
    if disagree and "local" in worse and best.startswith("fedavg"):
        gain = difference(scores_of_sites(baselines[best]), scores_of_sites(baselines["local"]))
        return best if gain is not None and gain.sign == 1 else "local"
    return best


def what_to_do(summary: Summary) -> str:
    """Say what this run did, as something to do."""
    k, n, tuned = summary["k"], trained(summary), _tuned(summary)
    if summary.get("clusters") is None:
        return f"Train with {summary['method']}{tuned}"
    if k == 1:
        return f"Train {'both' if n == 2 else f'all {n}'} sites together{tuned}"
    return f"Train every site alone{tuned}" if k == n else f"Train in these {k} groups{tuned}"


def _instead(summary: Summary, best: str, gain: Interval) -> str:
    """Say what to do where a baseline is better."""
    cost = (-gain).points("")
    if summary.get("clusters") is None:
        return f"{_train(best)}: {cost} better than {summary['method']}"
    if summary["k"] == 1 and best == "local":
        agree = gain.mean > -DISAGREE
        why = "look alike, and yet sharing does not pay" if agree else "look alike but do not agree on labels"
        until = "" if agree else " until their labels agree"
        return f"Do not use one model: the sites {why}, it costs {cost}; train every site alone{until}"
    start = " from the start" if best == "local" and all_alone(summary) else ""
    own = "this run, which ended so" if start else "the sites alone" if all_alone(summary) else _called(summary)
    return f"{_train(best)}{start}: {cost} better than {own}"


def _train(best: str) -> str:
    return f"Train {'a ' if best in (LOGISTIC, LINEAR) else ''}{BASELINES[best]}"


def _called(summary: Summary, choice: str = "this run") -> str:
    """Name a training within a sentence."""
    if choice != "this run":
        return BASELINES[choice]
    if summary.get("clusters") is None:
        return str(summary["method"])
    own = {1: f"one model for all{_tuned(summary)}", trained(summary): BASELINES["local"]}
    return own.get(summary["k"], f"training in these {summary['k']} groups")


def _undecided(summary: Summary, found: Mapping[str, Interval], baselines: Mapping[str, Summary]) -> str:
    """Say what to do where no difference to this run can be seen: the simplest, or what is clearly better than that; and why."""
    simplest = what_to_do(summary)
    if "fedavg" in found and (summary["k"] != 1 or found["fedavg"].mean < 0):  # of one group, it is without fine-tuning
        simplest, one = _train("fedavg"), scores_of_sites(baselines["fedavg"])
        others = {name: difference(scores_of_sites(baselines[name]), one) for name in BASELINES.keys() & baselines.keys()}
        if better := {name: gain for name, gain in others.items() if gain is not None and gain.sign == 1}:
            best = max(sorted(better), key=lambda name: better[name].mean)
            return f"Undecided, for now {lower_first(_train(best))}: {better[best].points('')} better than {BASELINES['fedavg']}"
    widest = max(max(-gain.low, gain.high) for gain in found.values())
    if widest > DETECTABLE:
        return f"Undecided, for now {lower_first(simplest)}: {_needed(summary, found)}"
    return f"{simplest}, the simplest choice: nothing else differs by more than {_in_units(summary, widest)}"


def lower_first(sentence: str) -> str:
    """Write a sentence as a part of another."""
    return f"{sentence[:1].lower()}{sentence[1:]}"


def _needed(summary: Summary, found: Mapping[str, Interval]) -> str:
    """Say how many more test samples would show a difference worth knowing."""
    half, own = max((gain.high - gain.low) / 2 for gain in found.values()), scores_of_sites(summary)
    samples = sum(own.samples)
    least = "0.02 R²" if metric_of(summary) is Metric.R2 else f"{100 * DETECTABLE:.0f} points"
    if half <= DETECTABLE:
        return f"{plural(samples, 'test sample')} would show a difference of {least}, and there may be a smaller one"
    if len(own.samples) != len(summary["clients"]):
        more, where = samples * ((half / DETECTABLE) ** 2 - 1), ""
    else:
        added = more_samples(dict(zip(summary["clients"], own.samples, strict=True)), (DETECTABLE / half) ** 2)
        more, where = sum(added.values()), f" at {names(list(added))}" if len(added) < len(own.counted) else ""
    told = max(float(f"{more:.1g}"), 1)
    return f"{plural(samples, 'test sample')} cannot show a difference of {least}, about {told:.0f} more{where} would"


def _in_units(summary: Summary, value: float, sign: str = "") -> str:
    """Write a difference of scores with its unit."""
    metric = metric_of(summary)
    return f"{metric.change(value, sign)} {metric.unit}"


def _only_fine_tuned(summary: Summary, alone: Summary | None) -> list[str]:
    """Say that groups fail without fine-tuning: what is trained together is then hardly worth more than a start."""
    if alone is None or not _tuned(summary) or summary.get("clusters") is None or all_alone(summary):
        return []
    gain = difference(scores_of_sites(summary), scores_of_sites(alone))
    if gain is None or gain.high >= 0 or gain.mean > -DISAGREE:
        return []
    return [
        f"before fine-tuning, models of groups cost {(-gain).points('')} against every site alone: sites of a group differ or do not agree "
        "on labels (emdcfl data check), and a site that joins must fine-tune too"
    ]


def _other_names(summary: Summary) -> list[str]:
    """Say that a group's most frequent class is at no other site: groups that only tell names of classes apart seem to pay."""
    clusters = summary.get("clusters")
    if clusters is None or len(set(clusters)) < 2:
        return []
    units = [(unit["members"], one) for unit in summary.get("what_differs") or [] for one in unit["found"]]
    apart = [f"{one['feature']} at {names(members)}" for members, one in units if _is_own_class(one)]
    if not apart:
        return []
    remedy = "if other sites call it otherwise, the groups tell names apart, and gain by that: use --label-map (emdcfl data check)"
    return [f"most samples have a class that no other site has: {some(apart, most=3)}; {remedy}"]


def _never_right(summary: Summary, together: Summary | None) -> list[str]:
    """Name the sites that one model for all never gets right, and this run does: nodes do not say which classes are frequent."""
    if together is None or metric_of(summary) is Metric.R2:
        return []
    wrong = dict(zip(together["clients"], scores_of_sites(together).values, strict=False))
    found = [client for client, gain in _by_site(summary, together).items() if gain.low > 0 and wrong[client] == 0]
    return [f"one model for all is never right at {names(found)}: check how labels are spelled there (emdcfl data check)"] if found else []


def _is_own_class(found: Mapping[str, Any]) -> bool:
    """Whether what differs is a class that most samples have here, and none elsewhere."""
    return bool(found["feature"].startswith("class ") and found["kind"] == "share" and found["here"] > 1 / 2 and found["there"] == 0)


def _disagreement(summary: Summary, alone: Summary | None) -> list[str]:
    """Name the groups that lose clearly against their sites alone: their data look alike, and their labels do not agree."""
    clusters = summary.get("clusters")
    if alone is None or clusters is None:
        return []
    own, other, found = scores_of_sites(summary), scores_of_sites(alone), []
    by_site = len(own.values) == len(other.values) == len(clusters)
    for k, members in members_of(clusters).items():
        if len(members) == 1 or not (by_site or len(members) == len(clusters)):
            continue
        gain = difference(own.only(members), other.only(members)) if by_site else difference(own, other)
        if gain is not None and gain.high < 0 and gain.mean <= -DISAGREE:
            part = "" if len(members) == len(clusters) else f" of cluster {k} ({names([summary['clients'][i] for i in members])})"
            found.append(
                f"the sites{part} look alike but do not seem to agree on labels: one model costs {(-gain).points('')} against each alone; "
                f"check {_remedy(metric_of(summary))}"
            )
    return found


def _remedy(metric: Metric) -> str:
    by_benefit = 'or group by benefit (method.grouping = "benefit", if the run did not)'
    if metric is Metric.R2:
        return f"the units and the meaning of what they predict, {by_benefit}"
    return f'how they spell and code their labels (emdcfl data check), {by_benefit} or with labels (method.cost = "label-aware")'


def _losers(summary: Summary, alone: Summary | None) -> list[str]:
    """Name the sites that do clearly better alone, the largest loss first."""
    lost = {} if alone is None else {client: gain for client, gain in _by_site(summary, alone).items() if gain.high < 0}
    worst = sorted(lost, key=lambda c: lost[c].mean)
    sizes = Counter(summary.get("clusters") or [])
    single = {c for c, k in zip(summary["clients"], summary.get("clusters") or [], strict=False) if sizes[k] == 1}
    told = [f"{names([c])}{' from the start' if c in single else ''} ({_in_units(summary, lost[c].mean, '+')})" for c in worst]
    return [f"better off alone: {some(told, most=3)}"] if worst else []


def _by_site(summary: Summary, other: Summary) -> dict[str, Interval]:
    """Return what each tested site gains over another training, as sure as it must be to name a single site."""
    own, others = scores_of_sites(summary), scores_of_sites(other)
    if not len(own.values) == len(others.values) == len(summary["clients"]):
        return {}
    pairs = zip(summary["clients"], own.each(), others.each(), strict=True)
    return {client: gain for client, one, two in pairs if (gain := difference(one, two, STANDS_OUT)) is not None}


def worth_rows(summary: Summary, baselines: Mapping[str, Summary]) -> list[tuple[str, Summary, str]]:
    """Return one row per training: what it is called, its accuracy, and what this run gains over it in points."""
    found = {name: gain.points(unit=False) for name, gain in rivals(summary, baselines).items()}
    rows = [(BASELINES.get(name, name), score_of(other), found.get(name, "–")) for name, other in baselines.items()]
    each = " of one site each" if all_alone(summary) and summary["k"] > 1 else ""
    title = f"{plural(int(summary.get('k') or 0), 'group')}{each} ({summary['method']}){_tuned(summary)}"
    return [(title, score_of(used(summary)), ""), *rows]


def worth(clustered: Summary, baselines: Mapping[str, Summary]) -> str:
    """Say what this run gained over each baseline, in points of mean accuracy or in R², with intervals."""
    found = rivals(clustered, baselines)
    if not found:
        return "no other training to compare with"
    return ", ".join(f"{gain.points()} against {BASELINES[name]}" for name, gain in found.items())
