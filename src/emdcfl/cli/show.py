"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from emdcfl.runs.outputs import read_reading
from emdcfl.runs.scoring import MetricsRow

MOST_SENTENCES = 9
"""Sentences about the clusters printed; all of them are in ``reading.json``."""

MOST_FAULTS = 10
"""Most failures, quarantines and flags that are printed; all are in ``summary.json``."""

NOTES = 8
"""Most notes that are printed."""


def terminal() -> Console:
    """Return a command's console. It prints text, never markup: names and paths are the user's, and may hold brackets or :100:."""
    return Console(markup=False, emoji=False, highlight=False)


def percent(value: float | None) -> str:
    """Write a share as a percentage with one digit, a dash for none."""
    return "–" if value is None else f"{value:.1%}"


def shorten(names: Sequence[str], most: int = 12) -> str:
    """Join names, leaving out the middle of a long list."""
    if len(names) <= most:
        return ", ".join(names)
    return ", ".join(names[: most - 2]) + f", … {len(names) - most + 1} more …, {names[-1]}"


def show_result(console: Console, summary: Mapping[str, Any], rows: Sequence[MetricsRow], out: Path) -> None:
    """Print clusters and their members, accuracy, agreement, and where the time went."""
    console.print()
    if summary["clusters"] is not None:
        console.print(_clusters(summary, rows))
    parts = []
    for variant, score in summary["accuracy"]["variants"].items():
        name = "" if len(summary["accuracy"]["variants"]) == 1 else f"{variant} "
        parts.append(Text.assemble(f"{name}accuracy ", (percent(score["mean"]), "bold"), f", worst client {percent(score['worst'])}"))
    if summary["clusters"] is not None:
        ari = f"ARI = {summary['ari']:.2f}" if summary["ari"] is not None else "no true groups to compare with"
        parts.append(Text(f"K = {summary['k']}, {ari}"))
    head = Text.assemble((summary["method"], "bold"), f" on {summary['scenario']}, seed {summary['seed']}: ")
    console.print(head + Text("; ").join(parts), soft_wrap=True)
    reading = read_reading(out)
    for sentence in reading["sentences"][:MOST_SENTENCES] if reading else []:
        console.print(f"  {sentence}", soft_wrap=True)
    for doubt in reading["doubts"] if reading else []:
        console.print(Text.assemble("  ", ("doubt:", "yellow"), f" {doubt}"), soft_wrap=True)
    seconds = summary["seconds"]
    times = " · ".join(f"{phase} {seconds.get(phase, 0.0):.1f} s" for phase in ("train", "embed", "transport", "evaluate"))
    console.print(f"time: {times} · total {seconds.get('total', 0.0):.1f} s", soft_wrap=True)
    for failure in summary["failures"][:MOST_FAULTS]:
        text = f"missing: {failure['client']} in round {failure['round']} ({failure['task']}): {failure['reason']}"
        console.print(text, soft_wrap=True)
    for entry in summary.get("quarantined", [])[:MOST_FAULTS]:
        text = f"quarantined for the {entry['for']}: {entry['client']} in round {entry['round']} ({entry['task']}): {entry['reason']}"
        console.print(text, soft_wrap=True)
    for flag in summary.get("flags", [])[:MOST_FAULTS]:
        text = f"stands out: {flag['what']} of {flag['client']}, {flag['value']:.3g} against a median of {flag['typical']:.3g}"
        rounds = f" (in {flag['times']} rounds from round {flag['first']} on)" if flag["times"] > 1 else f" (round {flag['first']})"
        console.print(text + rounds, soft_wrap=True)
    for note in summary["notes"][:NOTES]:
        console.print(f"note: {note}", soft_wrap=True)
    if len(summary["notes"]) > NOTES:
        console.print(f"note: {len(summary['notes']) - NOTES} more notes in summary.json")
    console.print(f"run directory: {out}", soft_wrap=True)


def _clusters(summary: Mapping[str, Any], rows: Sequence[MetricsRow]) -> Table:
    score = {r["client"]: next(iter(r["accuracy"].values())) for r in rows if r["accuracy"]}
    table = Table(title="Clusters found", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("cluster", justify="right")
    table.add_column("clients", justify="right")
    table.add_column("members", overflow="fold")
    if summary["groups"] is not None:
        table.add_column("true groups", overflow="fold")
    table.add_column("accuracy", justify="right")
    table.add_column("worst", justify="right")
    for k in sorted(set(summary["clusters"])):
        at = [i for i, label in enumerate(summary["clusters"]) if label == k]
        names = [summary["clients"][i] for i in at]
        cells = [str(k), str(len(names)), shorten(names)]
        if summary["groups"] is not None:
            cells.append(", ".join(dict.fromkeys(str(summary["groups"][i]) for i in at)))
        own = [score[n] for n in names if n in score]
        cells += [percent(sum(own) / len(own) if own else None), percent(min(own) if own else None)]
        table.add_row(*cells)
    return table


def show_worth(console: Console, summary: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the clustered run beside one model for all and every site alone, and say what grouping gained."""
    from emdcfl.runs.baselines import BASELINES, verdict

    table = Table(title="Is grouping worth it?", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("training")
    table.add_column("models", justify="right")
    table.add_column("accuracy", justify="right")
    table.add_column("worst client", justify="right")
    named = {f"{summary['k']} group{'s' if summary['k'] != 1 else ''} ({summary['method']})": summary}
    named |= {f"{BASELINES[name]} ({name})": other for name, other in others.items()}
    for what, one in named.items():
        table.add_row(what, str(one["k"]), percent(one["accuracy"]["mean"]), percent(one["accuracy"]["worst"]))
    console.print(table)
    console.print(verdict(summary, others), soft_wrap=True)
