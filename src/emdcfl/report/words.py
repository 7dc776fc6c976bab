"""The verdict: how many groups, how sure, who is borderline, what grouping gained. Imports reading, methods and experiments.worth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from emdcfl.methods import METHODS
from emdcfl.report.gaps import BAND, LOWER, Gaps
from emdcfl.report.load_run import Run
from emdcfl.report.svg import number, percent, plural, visible

MOST = 8
"""Most names in a sentence."""

LONGEST = 400
"""Letters of a doubt."""


def join(names: Sequence[str], most: int = MOST) -> str:
    """Join names with commas and an "and".

    Examples
    --------
    >>> join(["a", "b", "c"]), join(list("abcdefghijkl"), 3)
    ('a, b and c', 'a, b, c and 9 more')
    """
    shown = [visible(n, 40) for n in names[:most]]
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def headline(run: Run) -> str:
    """Say in one line what came out."""
    n, k = len(run.clients), int(run.summary.get("k") or 0)
    if run.clusters is None:
        method = METHODS.get(str(run.summary["method"]))
        family = "" if method is None else method.family
        return {
            "global": f"One model for all {plural(n, 'client')}",
            "alone": f"{plural(n, 'client')}, each trained alone",
            "personal": f"A model of its own for each of {plural(n, 'client')}",
        }.get(family, f"{plural(k, 'model')}, mixed for each of {plural(n, 'client')}")
    if n == 1:
        return "A single client"
    if run.gaps is not None and len(run.gaps.uncompared()) == n:
        return f"None of the {n} clients could be compared"
    if len(run.colours) == 1:
        text = f"All {n} clients belong together"
    elif len(run.colours) == n:
        text = f"No two of the {n} clients belong together"
    else:
        text = f"{plural(len(run.colours), 'group')} among {n} clients"
    clarity = None if run.gaps is None else _clarity(run, run.gaps)
    return text if clarity is None else f"{text}, {clarity}"


def _clarity(run: Run, gaps: Gaps) -> str | None:
    if _overlap(gaps):
        return "but they overlap"
    if gaps.borderline():
        return f"with {plural(len(gaps.borderline()), 'borderline client')}"
    if run.doubts:
        return "but not for certain"
    if gaps.uncompared():
        return f"with {plural(len(gaps.uncompared()), 'client')} not compared"
    if gaps.unmeasured():
        return None
    return "clearly separated" if len(set(gaps.clusters)) > 1 else "without doubt"


def _overlap(gaps: Gaps) -> int:
    """Number of linked pairs whose clients are in different clusters."""
    return int((gaps.pairs(same=False) < 1).sum())


def sentences(run: Run) -> list[tuple[str, str]]:
    """Return the verdict as (topic, sentence)."""
    found: list[tuple[str, str]] = []
    unknown = [] if run.gaps is None else [run.clients[i] for i in run.gaps.uncompared()]
    if run.gaps is not None and len(run.clients) > 1:
        found.append(("How sure", _sure(run, run.gaps)))
        if run.doubts:
            found.append(("Doubt", " ".join(f"{doubt[:1].upper()}{doubt[1:]}." for doubt in (visible(d, LONGEST) for d in run.doubts))))
        if len(unknown) < len(run.clients):
            found.append(("Borderline", _borderline(run, run.gaps)))
        if unknown:
            was = "was" if len(unknown) == 1 else "were"
            found.append(("Not compared", f"{join(unknown)} {was} compared with nobody; more validation samples may help."))
    if run.clusters is not None:
        alone = [c for c, k in zip(run.clients, run.clusters, strict=True) if run.clusters.count(k) == 1 and c not in unknown]
        if alone and len(alone) < len(run.clients):
            found.append(("Alone", f"{join(alone)} {'fits' if len(alone) == 1 else 'fit'} no group."))
    if run.summary.get("ari") is not None:
        found.append(("Truth", _truth(run, float(run.summary["ari"]))))
    found.append(("Worth it", _worth(run)))
    if (text := _accuracy(run)) is not None:
        found.append(("Accuracy", text))
    return found


def _sure(run: Run, gaps: Gaps) -> str:
    m, parts = gaps.margins, []
    if m["inside"] is not None:
        parts.append(f"inside groups no pair is farther apart than {number(m['inside'])} × the tolerance")
    if m["outside"] is not None:
        pair = min(m["nearest"].values(), key=lambda link: link["value"])
        bound = "at least " if gaps.deciding_kind[pair["a"], pair["b"]] == LOWER else ""
        parts.append(f"the closest pair of two groups is {bound}{number(m['outside'])} × the tolerance apart")
    text = "; ".join(parts)
    text = f"{text[:1].upper()}{text[1:]}." if text else "No pair was compared."
    if (overlap := _overlap(gaps)) > 0:
        text += (
            f" {plural(overlap, 'pair')} of different groups {'is' if overlap == 1 else 'are'} linked all the same: neighbourhoods overlap."
        )
    return text + _same_groups(gaps)


def _same_groups(gaps: Gaps) -> str:
    """Which other tolerances give the same groups: numbers where there is one for all, else factors of those of the clients."""
    interval, epsilon = gaps.margins["interval"], gaps.tolerance
    if interval is None or (epsilon is not None and epsilon <= 0):
        return ""
    low, high = ((1.0 if epsilon is None else epsilon) * v for v in interval)
    parts = [f"{word} {number(v)}" for word, v in (("above", low), ("up to", high)) if math.isfinite(v)]
    if not parts:
        return ""
    if epsilon is None:
        return f" Clients have tolerances of their own; {' and '.join(parts)} times as wide, they give the same groups."
    return f" Any tolerance {' and '.join(parts)} gives the same groups; it was {epsilon:.4g}."


def _borderline(run: Run, gaps: Gaps) -> str:
    clients, unmeasured = gaps.borderline(), gaps.unmeasured()
    if clients:
        text = f"{join([run.clients[i] for i in clients])}: at least one deciding distance lies within a factor {BAND:g} of the tolerance."
    else:
        text = f"Nobody{' for certain' if unmeasured else ''}: no measured distance lies within a factor {BAND:g} of the tolerance."
    if unmeasured:
        one = unmeasured == 1
        text += (
            f" {plural(unmeasured, 'pair')} near it {'is' if one else 'are'} only bounded: on which side {'it is' if one else 'they are'}"
        )
        text += ' is certain, how far is not (method.distances = "all" measures every pair).'
    if (unset := gaps.count()["unset"]) > 0:
        text += f" {plural(unset, 'pair')} {'was' if unset == 1 else 'were'} not compared."
    return text


def _truth(run: Run, ari: float) -> str:
    if ari >= 1 - 1e-12:
        return "The groups found are exactly the true ones (ARI 1.00)."
    assert run.clusters is not None
    mixed = [k for k in run.colours if run.groups and len({g for g, label in zip(run.groups, run.clusters, strict=True) if label == k}) > 1]
    split = Counter(g for g, _ in set(zip(run.groups or [], run.clusters, strict=False)))
    torn = [g for g, times in split.items() if times > 1]
    parts = [f"Agreement with the true groups: ARI {ari:.2f}"]
    if mixed:
        parts.append(f"{plural(len(mixed), 'cluster')} {'mixes' if len(mixed) == 1 else 'mix'} true groups")
    if torn:
        parts.append(f"{plural(len(torn), 'true group')} {'is' if len(torn) == 1 else 'are'} split ({join(torn, 4)})")
    return "; ".join(parts) + "."


def _worth(run: Run) -> str:
    from emdcfl.runs.baselines import BASELINES, verdict

    others = {n: b.summary for n, b in run.baselines.items() if n in BASELINES and b.summary["accuracy"].get("mean") is not None}
    if not others or run.summary["accuracy"].get("mean") is None:
        if run.baselines:
            return "Not known: no accuracy to compare."
        return "Not measured: this run has no baselines beside it ('emdcfl run --data' trains them, 'emdcfl compare' runs any method)."
    text = verdict({"k": 0, "accuracy": {}, **run.summary}, others)
    alone = run.baselines.get("local")
    if alone is not None:
        variant = run.variants[0]
        both = [(run.accuracy_of(c, variant), alone.accuracy_of(c, variant)) for c in run.clients]
        better = sum(a > b for a, b in both if a is not None and b is not None)
        worse = sum(a < b for a, b in both if a is not None and b is not None)
        text += f". Against training alone {plural(better, 'client')} gained and {worse} lost"
    return f"{text[:1].upper()}{text[1:]}."


def _accuracy(run: Run) -> str | None:
    variant = run.variants[0]
    known = {c: a for c in run.clients if (a := run.accuracy_of(c, variant)) is not None}
    scored = run.summary.get("scored")
    known = {c: a for c, a in known.items() if scored is None or c in scored}
    if not known:
        return None
    worst = min(known, key=lambda c: known[c])
    mean = sum(known.values()) / len(known)
    return f"{percent(mean)} on average over clients; the worst is {visible(worst, 40)} with {percent(known[worst])}."
