"""Markdown tables from the rows that the other benchmarks leave: tolerance, privacy noise, liars, faults; speed: ``performance_tables.py``.

``benchmarks/results.py`` puts them into ``docs/results/tables``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.benefit import CASES as SITES
from benchmarks.calibration import CASES
from benchmarks.differences import plain
from benchmarks.faults.table import write_table
from benchmarks.public_tables import COMPARED, MARGIN

from benchmarks import privacy, public_tables, trust
from emdcfl.runs.new_sites.nearest import UNSURE
from emdcfl.runs.new_sites.unseen import UNSEEN, mean_scores
from emdcfl.runs.verdict.advice import BASELINES

Row = dict[str, Any]
PAIRS = (("same_law", "refused"), ("two_laws", "linked"))
GROUPS = {"emdcfl": "by benefit", "oracle": "by wrist (true)"}
PAPER = ("rotated-mnist", "backdoor-mnist", "pacs")
"""Scenarios of the paper that ran by benefit at full size."""
NUMBER = r"–|[+−-]?[\d,.]+( ?(%|ms|s|[kM]B|GiB|±.*|\([^)]*\)|of [\d,]+))?"
"""What is aligned to the right."""
WAYS = {"drawn": "as drawn", "matched": "matched", "blocks": "blocks"}


def pages(data: Path) -> dict[str, str]:
    """Return the body of each page whose rows are not those of ``emdcfl compare``."""
    makers: dict[str, Callable[[Path], str]] = {
        "tolerance": tolerance,
        "privacy": privacy_noise,
        "trust": liars,
        "reliability": lambda folder: write_table(read(folder / "faults.jsonl"))[0],
        "benefit": benefit,
        "unseen": unseen,
        "small-tables": small_tables,
    }
    elsewhere = {"calibration": calibration(data / "tolerance"), "public": public(data / "benefit")}
    return {**elsewhere, **{name: maker(data / name) for name, maker in makers.items()}}


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Write a Markdown table; columns of numbers are aligned to the right.

    >>> print(table(["engine", "ratio"], [["batched", 0.1]]))
    | engine | ratio |
    | --- | ---: |
    | batched | 0.1 |
    """
    numbers = [all(re.fullmatch(NUMBER, str(row[i])) for row in rows) for i in range(len(head))]
    lines = [head, ["---:" if right else "---" for right in numbers], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def read_pages(data: Path) -> dict[str, Any]:
    """Return what is written by hand: title and text of every page."""
    return tomllib.loads((data / "pages.toml").read_text(encoding="utf-8"))


def section(title: str, body: str, *, level: int = 2) -> str:
    return f"{'#' * level} {title}\n\n{body.strip()}\n"


def sources(rows: Sequence[Mapping[str, Any]]) -> str:
    """Name seeds, commits and hardware of rows."""
    parts = []
    for key, title in (("seed", "Seeds"), ("commit", "Commits"), ("hardware", "Hardware")):
        found = sorted({str(row[key]) for row in rows if row.get(key) is not None}, key=lambda text: (len(text), text))
        if found:
            parts.append(f"{title}: {', '.join(found)}.")
    return " ".join(parts)


def written_down(tables: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return tables whose numbers were printed once and written down in ``pages.toml``, by page."""
    found: dict[str, list[str]] = {}
    for one in tables:
        body = "\n\n".join(
            part for part in (one.get("text", "").strip(), table(one["head"], one["rows"]), one.get("after", "").strip()) if part
        )
        found.setdefault(one["page"], []).append(section(one["title"], body))
    return {page: "\n".join(parts) for page, parts in found.items()}


def tolerance(folder: Path) -> str:
    names = {
        "paper": "Paper scale",
        "mnist-small": "MNIST, small scale",
        "mnist-small-same-samples": "MNIST, small scale, the same samples for all partners",
        "backdoor-mnist-small": "Backdoor MNIST, small scale",
        "backdoor-mnist-1200": "Backdoor MNIST, 1200 train images, five epochs",
    }
    parts = [section(title, _tolerances(read(folder / f"{name}.jsonl"))) for name, title in names.items()]
    parts.append(section("Rotated digits", _digits(read(folder / "digits.jsonl"))))
    parts.append(section("Rotated digits, seeds that were held out", _tolerances(read(folder / "digits-held-out.jsonl"))))
    return "\n".join(parts)


def calibration(folder: Path) -> str:
    """Write how often synthetic sites are grouped right, by the rule and by one where pairs have no sizes and class counts of their own."""
    rows, simpler = (read(folder / f"calibration{name}.jsonl") for name in ("", "-before"))
    benefit = [r for r in rows if r["options"].get("grouping") == "benefit"]
    rules = {"": [r for r in rows if not r["options"]], ", by the simpler rule": simpler}
    titles = {"grouped": "Sites in groups, and sites of one law that differ in class frequencies or size", "equal": "Twelve equal sites"}
    parts = [
        section(f"{title}{rule}", _calibration(found, list(CASES[kind]))) for kind, title in titles.items() for rule, found in rules.items()
    ]
    if benefit:
        parts.append(section("Grouping by benefit", _benefit(benefit)))
    return "\n".join(parts)


def _benefit(rows: Sequence[Row]) -> str:
    """Write how often validation losses find the true groups: they judge runs, not pairs."""
    cases = [case for kind in CASES.values() for case in kind if any(r["case"] == case for r in rows)]
    lines = [[case or "all", *_counted([r for r in rows if case in (None, r["case"])])[: -len(PAIRS)]] for case in [*cases, None]]
    return f"{table(['sites', 'right', 'false splits', 'false merges', 'silent'], lines)}\n\n{sources(rows)}"


def benefit(folder: Path) -> str:
    """Write whether groups pay: accuracy by strategy, the groups found, how often they are the true ones, and what deciding costs."""
    rows = read(folder / "results.jsonl")
    about = read_pages(folder.parent)["benefit"]
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        found.setdefault((_case(row), _strategy(row)), {})[row["seed"]] = row
    lines, groups, cost = [], [], []
    grouping = [way for way in STRATEGIES if "rule" in way or way == BY_BENEFIT]
    for case in SITES:
        seeds = sorted(found[case, "alone"])
        means = {way: _percent(found.get((case, way), {}), seeds) for way in STRATEGIES}
        best = max(value for way in SIMPLE if (value := means[way]) is not None)
        default = means[DEFAULT]
        told = ["–" if value is None else f"{value:.1f}" for value in means.values()]
        margin = "–" if default is None else f"{default - best:+.1f}".replace("-0.0", "0.0")
        lines.append([case, len(seeds), *told[:COMPARED], margin, *told[COMPARED:]])
        groups.append([case, *(_groups(found.get((case, way), {}), seeds) for way in grouping)])
        if shares := _deciding(found.get((case, BY_BENEFIT), {}), found.get((case, "one for all"), {}), seeds):
            cost.append([case, *(f"{100 * share:.0f} %" for share in shares)])
    true = [line for case in SITES if (line := _often(case, found.get((case, BY_BENEFIT), {})))]
    return "\n".join(
        [
            section(
                "Accuracy",
                f"{table(['sites', 'seeds', *STRATEGIES[:COMPARED], MARGIN, *STRATEGIES[COMPARED:]], lines)}\n\n{sources(rows)}",
            ),
            section("Groups found", table(["sites", *grouping], groups)),
            section("How often by benefit finds the true groups", table(["sites", "seeds", "right", "smallest ARI"], true)),
            *_scenarios(folder),
            section("What deciding adds to training", f"{table(['sites', 'distances', 'validation losses'], cost)}\n\n{about['cost']}"),
            section("How the rule was chosen", about["chosen"]),
        ]
    )


def public(folder: Path) -> str:
    """Write how the default does on data sets that had no part in choosing it."""
    rows, new, advised = (read(folder / f"public{name}.jsonl") for name in ("", "-tuned", "-advice"))
    found = {name: table(*one) for name, one in public_tables.tables(rows, new, advised, STRATEGIES, _strategy).items()}
    return str(read_pages(folder.parent)["public"]["tables"]).format(
        **found, sources=sources([*rows, *new]), advice_sources=sources(advised)
    )


def _scenarios(folder: Path) -> Iterator[str]:
    """Write whether grouping by benefit finds the groups of the paper's scenarios, at the paper's size and small."""
    head = ["scenario", "seeds", "Oracle", "calibrated rule", "by benefit", "groups, calibrated", "groups, by benefit"]
    lines, used = _paper_scenarios([row for name in PAPER for row in read(folder.parent / f"{name}.jsonl")])
    note = (
        "The runs have the paper's size. The run on Rotated MNIST by benefit had the GPU to itself. The others shared it and are older. "
        "Backdoor scenarios have two values, without and with the trigger. Losses are the evaluation beyond Oracle's. PACS by benefit has "
        "images of 224 pixels, encoded once more. With them Oracle has 92.30, too."
    )
    yield section("The paper's scenarios", f"{note}\n\n{table([*head, 'distances', 'validation losses'], lines)}\n\n{sources(used)}")
    lines, used = _paper_scenarios(read(folder / "paper-small.jsonl"))
    note = (
        "The runs are at `--scale small`. On PACS and CIFAR10 this is 48 SGD steps of ResNet18 per site, in three rounds. On Rotated "
        "CIFAR10, a model for all is as good as Oracle's at that size (8 × 64 test images), so by benefit there is one group. The "
        "calibrated rule's groups are not the true ones. On Backdoor CIFAR10, targets and attackers have the same classes and gain from "
        "each other in round 1. They are separated in round 2, but with one seed not at all, and three rounds do not compensate for "
        "that (128 test images)."
    )
    yield section("The paper's scenarios, small", f"{note}\n\n{table(head, [line[: len(head)] for line in lines])}\n\n{sources(used)}")


def _paper_scenarios(rows: Sequence[Row]) -> tuple[list[list[object]], list[Row]]:
    """Whether grouping by benefit finds the groups of the paper's scenarios: lines of a table without and with shares, and their rows."""
    ways = ("oracle", "calibrated rule", BY_BENEFIT)
    found: dict[str, dict[str, dict[int, Row]]] = {}
    for row in rows:
        way = _strategy(row) if row["method"] == "emdcfl" else row["method"]
        if plain(row) and way in ways:
            found.setdefault(row["scenario"], {way: {} for way in ways})[way][row["seed"]] = row
    lines: list[list[object]] = []
    used: list[Row] = []
    for scenario, own in sorted(found.items()):
        seeds = sorted(set.intersection(*(set(runs) for runs in own.values())))
        if not seeds:
            continue
        used += [own[way][seed] for way in ways for seed in seeds]
        variants = own["oracle"][seeds[0]]["accuracy"]["variants"]
        scores = [
            " / ".join(f"{100 * mean(own[way][seed]['accuracy']['variants'][name]['mean'] for seed in seeds):.2f}" for name in variants)
            for way in ways
        ]
        shares = [f"{100 * share:.1f} %" for share in _deciding(own[BY_BENEFIT], own["oracle"], seeds)]
        lines.append([scenario, ", ".join(map(str, seeds)), *scores, *(_groups(own[way], seeds) for way in ways[1:]), *shares])
    return lines, used


BY_BENEFIT, DEFAULT = "by benefit", "by benefit + fine-tuning (default)"
SIMPLE = ("alone", "one for all", "one for all + fine-tuning")
STRATEGIES = (*SIMPLE, DEFAULT, BY_BENEFIT, "paper's rule", "calibrated rule", "IFCA", "CFL", "FedEM", "pFedGraph")


def _case(row: Row) -> str:
    options = {key: value for key, value in row["settings"]["scenario"].items() if key not in ("name", "data_seed")}
    return next(case for case, (name, wanted) in SITES.items() if (name, wanted) == (row["scenario"], options))


def _strategy(row: Row) -> str:
    settings = row["settings"]
    tuned = settings.get("personalize", {}).get("mode", "off") != "off"
    if row["method"] == "emdcfl":
        if settings["method"].get("tolerance", "auto") != "auto":
            return "paper's rule"
        return (DEFAULT if tuned else BY_BENEFIT) if settings["method"].get("grouping") == "benefit" else "calibrated rule"
    names = {"local": SIMPLE[0], "fedavg": SIMPLE[1], "ifca": "IFCA", "cfl": "CFL", "fedem": "FedEM", "pfedgraph": "pFedGraph"}
    return names[row["method"]] + (" + fine-tuning" if tuned else "")


def _percent(rows: Mapping[int, Row], seeds: Sequence[int]) -> float | None:
    return mean(100 * rows[seed]["accuracy"]["mean"] for seed in seeds) if all(seed in rows for seed in seeds) else None


def _groups(rows: Mapping[int, Row], seeds: Sequence[int]) -> str:
    """Smallest and largest number of groups, and the mean ARI where the true groups are known."""
    if not all(seed in rows for seed in seeds):
        return "–"
    score = "" if any(rows[seed]["ari"] is None for seed in seeds) else f" (ARI {mean(rows[seed]['ari'] for seed in seeds):.2f})"
    counts = sorted({rows[seed]["k"] for seed in seeds})
    return (str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}") + score


def _often(case: str, rows: Mapping[int, Row]) -> list[object] | None:
    """How often groups are the true ones; one group where all sites are equal."""
    known = [row["ari"] for row in rows.values() if row["ari"] is not None]
    if not known or not rows[min(rows)]["scenario"].startswith("digit"):
        return None
    seeds = sorted(rows)
    return [case, f"{seeds[0]} to {seeds[-1]}", f"{sum(ari == 1 for ari in known)} of {len(known)}", f"{min(known):.2f}"]


def _deciding(rows: Mapping[int, Row], plain: Mapping[int, Row], seeds: Sequence[int]) -> list[float]:
    """Shares of training: embedding and transport; evaluating and deciding beyond what another method does."""
    if not all(seed in rows and seed in plain for seed in seeds):
        return []
    parts = [(rows[s]["seconds"], plain[s]["seconds"]) for s in seeds]
    train = sum(own["train"] for own, _ in parts)
    distances = sum(own["embed"] + own["transport"] for own, _ in parts)
    losses = sum(own["evaluate"] + own.get("decide", 0.0) - other["evaluate"] for own, other in parts)  # "evaluate" may hold both
    return [distances / train, max(losses, 0.0) / train]


def unseen(folder: Path) -> str:
    """Write how people fare who had no part in training, each placed by unlabelled data."""
    rows = read(folder / "watch.jsonl")
    head = ["groups", "seed", "sites tested", *UNSEEN.values(), "placed with the right wrist", "half and half", "with the other"]
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        seeds = sorted({row["seed"] for row in rows if row["method"] == method})
        for chosen in [*([seed] for seed in seeds), seeds]:
            sites = [site for row in rows if row["method"] == method and row["seed"] in chosen for site in row["unseen"]]
            counts = _whose([site["alike"] for site in sites])
            shares = [f"{100 * value:.1f}" for value in mean_scores(sites).values() if value is not None]
            lines.append([GROUPS[method], chosen[0] if len(chosen) == 1 else "all", len(sites), *shares, *counts])
    people = section("People left out, placed without labels", f"{table(head, lines)}\n\n{sources(rows)}")
    chosen = section("How the rules were chosen", read_pages(folder.parent)["unseen"]["chosen"])
    return "\n".join([people, placed(read(folder / "place.jsonl")), chosen])


def _whose(shares: Sequence[float | None]) -> list[int]:
    """Count groups by the share of members that are of the site's own kind: most (or every group is), half, fewer."""
    own = [1.0 if share is None else share for share in shares]
    return [sum(share > 0.5 for share in own), sum(share == 0.5 for share in own), sum(share < 0.5 for share in own)]


def _accuracy(rows: Sequence[Row], by: str) -> str:
    return f"{100 * mean(row[by] for row in rows):.1f}" if rows else "–"


def placed(rows: Sequence[Row]) -> str:
    """Write where ``place`` puts new sites: with their labels, and without."""
    with_labels, without = [], []
    for case, known in dict.fromkeys((row["case"], row["known"]) for row in rows):
        runs = [row for row in rows if (row["case"], row["known"]) == (case, known)]
        who = [case if known else f"{case}: the strangers", len(runs)]
        joined = [row for row in runs if row["cluster"] is not None]
        worse = sum(row["alone"] is not None and row["score"] < row["alone"] - 0.05 for row in joined)
        with_labels.append([*who, *_whose([row["share"] for row in joined]), len(runs) - len(joined), worse])
        doubted = [row for row in runs if row["unsure"] > UNSURE]
        others = [row for row in runs if row["unsure"] <= UNSURE]
        of = [_accuracy(some, by) for some in (others, doubted) for by in ("nearest", "mixture")]
        without.append([*who, *_whose([row["mixture_share"] for row in runs]), len(others), *of[:2], len(doubted), *of[2:]])
    heads = ["sites", "placed", "own group", "half and half", "another group", "no group", "joined, alone 5 points better"]
    parts = [section("Placed with labels", f"{table(heads, with_labels)}\n\n{sources(rows)}")]
    by = ["by the nearest group", "by the mixture"]
    heads = ["sites", "placed", "own group", "half and half", "another group", "not doubted", *by, "doubted", *by]
    return "\n".join([*parts, section("Placed without labels", table(heads, without))])


def small_tables(folder: Path) -> str:
    """Write how often small tables that are alike stay together, and whether the result is ever worse than a simple strategy."""
    rows = read(folder / "results.jsonl")
    groups, worth = [], []
    for case in dict.fromkeys(row["case"] for row in rows):
        runs = [row for row in rows if row["case"] == case]
        together = sum(row["k"] == 1 for row in runs)
        said = [sum(row["choice"] == choice for row in runs) for choice in ("this run", "undecided")]
        groups.append([case, len(runs), f"{together} ({100 * together / len(runs):.0f} %)", *said, len(runs) - sum(said)])
        for name, title in BASELINES.items():
            if not all(name in row["gains"] for row in runs):
                continue
            found = [row["gains"][name] for row in runs]
            gained = 100 * mean(gain for gain, _, _ in found)
            accuracies = [f"{100 * mean(row['accuracy'][key] for row in runs):.1f}" for key in ("run", name)]
            signs = [sum(high < 0 for _, _, high in found), sum(low > 0 for _, low, _ in found)]
            worth.append([case, title, *accuracies, f"{gained:+.1f}", *signs])
    heads = ["sites", "runs", "one group", "said: as this run", "said: the simplest, for now", "said: another training"]
    versus = ["sites", "against", "this run", "the other", "gain in points", "runs clearly worse", "runs clearly better"]
    parts = [section("Groups and what is said", f"{table(heads, groups)}\n\n{sources(rows)}"), section("Accuracy", table(versus, worth))]
    return "\n".join(parts)


def _calibration(rows: Sequence[Row], cases: Sequence[str]) -> str:
    head = ["sites", "right", "false splits", "false merges", "silent", "pairs of one law refused", "pairs of two laws linked"]
    rows = [r for r in rows if r["case"] in cases]
    lines = [[case or "all", *_counted([r for r in rows if case in (None, r["case"])])] for case in [*cases, None]]
    return f"{table(head, lines)}\n\n{sources(rows)}"


def _counted(rows: Sequence[Row]) -> list[str]:
    """Counts over runs, and over pairs of all runs; dashes where there are none."""
    if not rows:
        return ["–"] * (4 + len(PAIRS))
    runs = [f"{sum(r[key] for r in rows)} of {len(rows)}" for key in ("right", "false_split", "false_merge", "silent")]
    return [*runs, *(f"{sum(r[of][what] for r in rows)} of {sum(r[of]['pairs'] for r in rows)}" for of, what in PAIRS)]


def _tolerances(rows: Sequence[Row]) -> str:
    head = ["scenario", "seed", "sites (validation)", "groups", "q", "fixed ε", "ARI at 0.025"]
    head += [f"{title}: in / out, ARI" for title in WAYS.values()] + ["blocks, inside: mean, sd"]
    lines = []
    for r in sorted(rows, key=lambda r: (r["scenario"], r["seed"])):
        interval = r["fixed_interval"]
        fixed = (
            "none" if interval is None else f"above {interval[0]:.3f}" if interval[1] is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
        )
        inside = r["auto"]["blocks"]["inside"]
        cells = [
            r["scenario"],
            r["seed"],
            f"{r['clients']} ({r['validation']})",
            r["groups"],
            f"{r['q']:.2f}",
            fixed,
            f"{r['ari_at_0.025']:.2f}",
        ]
        lines.append([*cells, *(_in_out([r["auto"][way]]) for way in WAYS), f"{inside['mean']:+.2f}, {inside['sd']:.2f}"])
    return f"{table(head, lines)}\n\n{sources(rows)}"


def _in_out(found: Sequence[Row]) -> str:
    """Return the largest value inside a group and the smallest between groups, and ARI or how many are right."""
    outs = [one["standard_errors"]["out"] for one in found]
    out = "–" if outs[0] is None else f"{min(outs):.1f}"
    right = sum(one["ari"] == 1.0 for one in found)
    last = f"{found[0]['ari']:.2f}" if len(found) == 1 else f"{right} of {len(found)}"
    return f"{max(one['standard_errors']['in'] for one in found):.1f} / {out}, {last}"


def _digits(rows: Sequence[Row]) -> str:
    head = ["clients per rotation (validation)", "q", "seeds", "a fixed ε exists", "0.025 is right"]
    head += [f"{title}: in / out, right" for title in WAYS.values()] + ["wrong with a doubt", "right with a doubt"]
    lines = []
    for size in sorted({r["per_group"] for r in rows}):
        for first, last in ((0, 4), (5, 9), (10, 19)):
            own = [r for r in rows if r["per_group"] == size and first <= r["seed"] <= last]
            blocks = [r["auto"]["blocks"] for r in own]
            wrong, right = ([b for b in blocks if (b["ari"] == 1.0) == wanted] for wanted in (False, True))
            cells = [f"{size} ({own[0]['validation']})", f"{own[0]['q']:.2f}", f"{first} to {last}"]
            cells += [f"{sum(test(r) for r in own)} of {len(own)}" for test in (_separable, _fixed_is_right)]
            cells += [_in_out([r["auto"][way] for r in own]) for way in WAYS]
            lines.append([*cells, *(f"{sum(bool(b['doubts']) for b in some)} of {len(some)}" for some in (wrong, right))])
    note = '"in" is the largest value over the seeds, and "out" the smallest. A doubt warns that the clusters should not be called certain.'
    return f"{note}\n\n{table(head, lines)}\n\n{sources(rows)}"


def _separable(row: Row) -> bool:
    return row["fixed_interval"] is not None


def _fixed_is_right(row: Row) -> bool:
    return bool(row["ari_at_0.025"] == 1.0)


def privacy_noise(folder: Path) -> str:
    names = {
        "digits": "Rotated digits, two clients per rotation",
        "digits-90": "Rotated digits, at most 90 samples a side",
        "mnist-cnn": "Rotated MNIST at small scale, the paper's CNN",
        "mnist": "Rotated MNIST at small scale, a smaller CNN",
        "mnist-512": "Rotated MNIST at small scale, 512 validation images, a smaller CNN",
    }
    parts = []
    for name, title in names.items():
        rows = read(folder / f"{name}.jsonl")
        caption, body = privacy.table(rows).strip().split("\n", 1)
        parts.append(section(title, f"{caption}.\n\n{body.strip()}\n\n{sources(rows)}"))
    null = [
        [r["ratio"], r["p"], "∞" if r["epsilon"] is None else f"{r['epsilon']:g}", r["sigma"], r["mean"], r["deviation"], r["largest"]]
        for r in read(folder / "null.jsonl")
    ]
    note = (
        "The table shows W between samples of one law, in calibrated standard errors, over 100 draws. "
        "The tolerance accounts for the noise if the mean is 0 and the deviation 1."
    )
    head = ["projection ratio", "p", "ε per release", "σ", "mean", "deviation", "largest"]
    parts.append(section("Does the tolerance account for the noise?", f"{note}\n\n{table(head, null)}"))
    return "\n".join(parts)


def liars(folder: Path) -> str:
    note = (
        "The table shows by how many points the mean test accuracy of the other nine clients changed against a run without the liar. "
        "In brackets is the group that lost most. The number of seeds follows."
    )
    found = {name: read(folder / f"{name}.jsonl") for name in ("liars", "liars-cpu", "backdoor", "backdoor-600")}
    parts = []
    for name, title in (("liars", "One liar among ten"), ("liars-cpu", "Two more lies, in bf16 on a CPU")):
        body = "\n".join(trust.liars_table(found[name]))
        parts.append(section(title, f"{note}\n\n{body}\n\n{sources(found[name])}"))
    for name, title in (
        ("backdoor", "Backdoor MNIST at small scale"),
        ("backdoor-600", "Backdoor MNIST with 600 train images: the attackers' networks have not learned the cue"),
    ):
        body = "\n".join(trust.backdoor_table(found[name]))
        parts.append(section(title, f"{body}\n\n{sources(found[name])}"))
    return "\n".join(parts)
