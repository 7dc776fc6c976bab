"""What a run found, in sentences: three lines, and what they rest on. The terminal and the report show the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from emdcfl.core.metric import metric_of, score_of
from emdcfl.core.units import names, percent, percent_range, plural, some
from emdcfl.runs.verdict.advice import STANDS_OUT, Summary, advice, scores_of_sites, used, worth
from emdcfl.runs.verdict.chance import over_mean
from emdcfl.runs.verdict.intervals import these_sites
from emdcfl.runs.verdict.structure import headline, not_compared, one_group_by_benefit, structure
from emdcfl.runs.verdict.trained_with import in_words as trained_with
from emdcfl.runs.verdict.trained_with import untrained
from emdcfl.runs.verdict.what_differs import in_words as what_differs

FAR_APART = 0.2
"""Difference of the mean R² over sites from that over all sites together from which a few sites decide the mean."""


def in_brief(summary: Summary, reading: Summary | None, baselines: Mapping[str, Summary]) -> list[tuple[str, str]]:
    """Return what somebody who reads three lines should read: what to use, which site to look at, how sure that is."""
    sure, to_do = how_sure(used(summary)), advice(summary, baselines)
    if sure is None:
        sure = f"not tested: no {metric_of(summary).label} is known"
    elif to_do is not None and to_do.choice in baselines:  # another training is recommended
        sure = f"this run's {sure}"
    found = [("Use", headline(summary, reading, baselines)), ("Look at", _look_at(summary, reading, baselines)), ("How sure", sure)]
    return [(topic, _sentence(said)) for topic, said in found]


def _look_at(summary: Summary, reading: Summary | None, baselines: Mapping[str, Summary]) -> str:
    """Name the sites that a person should look at first, and why."""
    if absent := untrained(summary):
        return f"never trained, so in no group and without a model to use: {names(absent)}"
    to_do = advice(summary, baselines)
    if to_do is not None and (to_do.look or to_do.doubts):
        return (to_do.look or to_do.doubts)[0]
    scores, clients = scores_of_sites(used(summary)), summary["clients"]
    if len(scores.values) == len(clients) and scores.counted:
        mean = sum(p for p, _ in scores.counted) / len(scores.counted)
        own = [these_sites(one, STANDS_OUT) for one in scores.each()]
        low = sorted((found.mean, c) for found, c in zip(own, clients, strict=True) if found is not None and found.high < mean)
        if low:
            text = scores.metric.text
            return f"clearly less accurate than the mean of {text(mean)}: {some([f'{names([c])} ({text(p)})' for p, c in low], most=4)}"
    if reading is not None and reading["borderline"]:
        return f"borderline, another sample might group them otherwise: {names(reading['borderline'])}"
    return "no site stands out"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def sentences(summary: Summary, reading: Summary | None, baselines: Mapping[str, Summary]) -> list[tuple[str, str]]:
    """Return what the three lines rest on, as (topic, sentence)."""
    found: list[tuple[str, str]] = []
    to_do = advice(summary, baselines)
    if baselines:
        found.append(("Worth it", worth(summary, baselines) if to_do is None else to_do.reason))
    if (uneven := unbalanced(used(summary))) is not None:
        found.append(("Classes", uneven))
    if to_do is not None:
        found += [("Doubt", doubt) for doubt in to_do.doubts]
        found += [] if one_group_by_benefit(summary, reading) else [("Groups", structure(summary, reading))]
    found += [("What differs", said) for said in what_differs(summary)]
    found += [("Trained with", said) for said in trained_with(summary)]
    if reading is not None and len(summary["clients"]) > 1:
        topic = "Groups" if "splits" in reading else "Distances"
        found += [(topic, sentence) for sentence in reading["sentences"]]
        found += [("Doubt", doubt) for doubt in reading["doubts"]]
    if (alone := _alone(summary, reading)) is not None:
        found.append(("Alone", alone))
    if (true := _truth(summary)) is not None:
        found.append(("Truth", true))
    return [(topic, _sentence(said)) for topic, said in found]


def how_sure(summary: Summary) -> str | None:
    """Say how far the mean score can be trusted, on these sites and on others like them."""
    score, metric = score_of(summary), metric_of(summary)
    if score.get("low") is None:
        return None
    tested = f"{plural(score['samples'], 'test sample')} at {plural(sum(n > 0 for n in scores_of_sites(summary).samples), 'site')}"
    text = f"{metric.label} {metric.range(score['low'], score['high'])} on these sites ({tested}; 95% interval)"
    new = score.get("new_sites")
    text += "" if new is None else f", {metric.range(new['low'], new['high'])} on average over sites like these"
    together = over_mean(summary)
    if together is None or abs(together.mean - score["mean"]) < FAR_APART:
        return text
    return f"{text}; {together.range} over all sites together, where sites whose numbers hardly differ count little"


def unbalanced(summary: Summary) -> str | None:
    """Say how models do on unbalanced classes, where a frequent class may hide the others; None where classes are balanced."""
    accuracy = score_of(summary)
    if "balanced" not in accuracy:
        return None
    balanced, auc = accuracy["balanced"], accuracy["auc"]
    where = f"classes are unbalanced at {balanced['sites']} of {plural(len(summary['clients']), 'site')}"
    area = f"AUC {auc['mean']:.3f} ({auc['low']:.3f}–{auc['high']:.3f})"
    return f"{where}: there, balanced accuracy {percent(balanced['mean'])} ({percent_range(balanced['low'], balanced['high'])}), {area}"


def _alone(summary: Summary, reading: Summary | None) -> str | None:
    clients, clusters = summary["clients"], summary.get("clusters") or []
    sizes, unknown = Counter(clusters), not_compared(summary, reading)
    alone = [c for c, k in zip(clients, clusters, strict=False) if sizes[k] == 1 and c not in unknown]
    return f"no group fits {names(alone)}" if 0 < len(alone) < len(clients) else None


def _truth(summary: Summary) -> str | None:
    if summary.get("ari") is None or summary.get("clusters") is None:
        return None
    if summary["ari"] >= 1 - 1e-12:
        return "the groups found are exactly the true ones (ARI 1.00)"
    pairs = dict.fromkeys(zip(summary.get("groups") or [], summary["clusters"], strict=False))
    mixed = [k for k, times in Counter(k for _, k in pairs).items() if times > 1]
    split = [str(g) for g, times in Counter(g for g, _ in pairs).items() if times > 1]
    parts = [f"agreement with the true groups: ARI {summary['ari']:.2f}"]
    if mixed:
        parts.append(f"{plural(len(mixed), 'cluster')} {'mixes' if len(mixed) == 1 else 'mix'} true groups")
    if split:
        parts.append(f"{plural(len(split), 'true group')} {'is' if len(split) == 1 else 'are'} split ({some(split, most=4)})")
    return "; ".join(parts)
