"""Markdown tables of how fast the engines are and how runs grow, for ``benchmarks/results.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.result_tables import Row, read, section, sources, table


def performance(folder: Path) -> str:
    sessions = _sessions(read(folder / "h200.jsonl"))
    newest: dict[str, tuple[str, list[Row]]] = {}
    for head, rows in sessions:
        machine = head["machine"]
        about = f"{machine['gpu']} ({machine['processor']}, {machine['cores']} cores), torch {machine['torch']}, commit {head['commit']}."
        for part in {row["part"] for row in rows}:
            newest[part] = about, [row for row in rows if row["part"] == part]
    return "\n".join(
        [
            section("GPU: one SGD step", _steps(*newest["gpu-steps"])),
            section("GPU: whole runs on Rotated MNIST at paper scale", _whole_runs(*newest["gpu-runs"])),
            section("GPU: comparing all pairs of 40 clients", _pairs(*newest["gpu-pairs"])),
            section("CPU: the server's part with large models", _server(read(folder / "server.jsonl"))),
            section("CPU: many clients, grouped by benefit", _scale(read(folder / "scale.jsonl"))),
        ]
    )


def _sessions(rows: Sequence[Row]) -> list[tuple[Row, list[Row]]]:
    """Divide lines into measuring sessions; each begins with a line about the machine."""
    found: list[tuple[Row, list[Row]]] = []
    for row in rows:
        if "machine" in row:
            found.append((row, []))
        else:
            found[-1][1].append(row)
    return found


def _steps(about: str, rows: Sequence[Row]) -> str:
    note = "Images are random, in batches of 64. Values are medians of three repeats. The bare loop has torch's default precision."
    shown = [r for r in rows if "ms_per_step" in r]
    lines = [
        [r["network"], r["contestant"], f"{r['ms_per_step']:.3f}", f"{r['ms_best']:.3f}", r["images_per_s"], f"{r['ratio']:.3f}"]
        for r in shown
    ]
    head = ["network", "contestant", "ms per step", "best", "images/s", "ratio to the bare loop"]
    return f"{note} {about}\n\n{table(head, lines)}"


def _whole_runs(about: str, rows: Sequence[Row]) -> str:
    ratios: Row = next(r["total_over_oracle"] for r in rows if "total_over_oracle" in r)
    lines = []
    for r in (r for r in rows if r.get("run") in ratios):
        took = {"decide": 0.0, **r["seconds"]}
        seconds = [f"{took[phase]:.2f}" for phase in ("train", "embed", "transport", "decide", "evaluate", "total")]
        share = f"{100 * (took['embed'] + took['transport'] + took['decide']) / took['train']:.2f} %"
        lines.append(
            [
                r["run"],
                *seconds,
                f"{ratios[r['run']]:.3f}",
                share,
                r["peak_gib"],
                f"{100 * r['accuracy']:.2f}, {100 * r['worst']:.2f}",
                r["ari"],
            ]
        )
    head = [
        "run",
        "train s",
        "embed s",
        "transport s",
        "decide s",
        "evaluate s",
        "whole run s",
        "ratio to Oracle",
        "comparing / train",
        "GPU peak GiB",
    ]
    note = "The runs have 40 clients, 10 rounds of 10 local epochs, bf16 and seed 0. They follow each other in one process."
    return f"{note} {about}\n\n{table([*head, 'accuracy, worst site', 'ARI'], lines)}"


def _pairs(about: str, rows: Sequence[Row]) -> str:
    lines = []
    for wanted in ("auto", 0.025):
        own = [r for r in rows if r.get("tolerance") == wanted and r["repeat"] > 0]
        columns = [[r[key] for r in own] for key in ("seconds", "embed", "transport")]
        cells = [f"{median(column):.2f} ({min(column):.2f} to {max(column):.2f})" for column in columns]
        lines.append([wanted, *cells, f"{own[0]['solved']} of {own[0]['problems']}"])
    head = ["tolerance", "seconds", "embedding", "transport", "problems solved exactly"]
    return f"The table shows median and range of three repeats after a first run. {about}\n\n{table(head, lines)}"


def _server(rows: Sequence[Row]) -> str:
    """Seconds outside all phases, newest sources that have all methods."""
    sessions: dict[str, list[Row]] = {}
    source = ""
    for row in rows:
        source = row.get("sources", source)
        if "method" in row:
            sessions.setdefault(source, []).append(row)
    commit = max(sessions, key=lambda c: (len({r["method"] for r in sessions[c]}), list(sessions).index(c)))
    own = sessions[commit]
    methods = dict.fromkeys(r["method"] for r in own)
    lines = [[m, *(f"{median(r[key] for r in own if r['method'] == m):.1f}" for key in ("rest", "total"))] for m in methods]
    note = (
        "Medians of three runs with 18 clients of ResNet18 and very little training in three rounds, two cores of an AMD EPYC, torch 2.13"
    )
    return f"{note} (commit {commit}).\n\n{table(['method', 'seconds outside all phases', 'seconds of the run'], lines)}"


def _scale(rows: Sequence[Row]) -> str:
    """One line per number of clients and pairing, and exponents between the smallest and the largest number."""

    def comparing(r: Row) -> float:
        return float(r["seconds"]["embed"] + r["seconds"]["transport"])

    def sent(r: Row) -> float:
        return float(sum(r["bytes"].values()))

    lines = [
        [
            f"{r['clients']:,}",
            r["pairing"],
            *(f"{r['seconds'].get(phase, 0.0):.1f}" for phase in ("train", "embed", "transport", "decide", "evaluate", "wall")),
            f"{comparing(r) * r['rounds'] / r['seconds']['train']:.2f}",
            f"{sent(r) / 1e9:.2f}",
            f"{r['peak_gib']:.2f}",
            f"{r['report_bytes'] / 1e6:.2f}",
            f"{r['k']} (ARI {r['ari']:.2f})",
            r["load"],
        ]
        for r in rows
    ]
    head = [
        "clients",
        "pairing",
        "train s",
        "embed s",
        "transport s",
        "decide s",
        "test s",
        "whole run s",
        "comparing / ten epochs",
        "GB sent",
    ]
    note = (
        "Clients have tables of 300 × 16 from four groups and train the default perceptron in two rounds of ten epochs, with one seed and "
        "without fine-tuning and baselines. Two rules were chosen after looking at runs like these, of seed 0: that one side of a split "
        "must gain a twentieth of its loss, and when representatives are enough. "
        "The two cores do nothing else, and the last column is the load average. Clients are compared once. "
        f"{sources(rows)}"
    )
    grown = [r for r in rows if r["pairing"] == "auto"]
    if len(grown) > 1:
        small, large = grown[0], grown[-1]
        times = math.log(large["clients"] / small["clients"])
        found = {
            name: math.log(of(large) / of(small)) / times
            for name, of in (("bytes", sent), ("comparing", comparing), ("memory", lambda r: r["peak_gib"]))
        }
        said = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
        note += f" Exponents from {small['clients']:,} to {large['clients']:,} clients: {said}."
    return f"{note}\n\n{table([*head, 'peak GiB', 'report MB', 'groups found', 'load'], lines)}"
