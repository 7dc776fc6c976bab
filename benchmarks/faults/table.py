"""The table of docs/results/tables/reliability.md, from the rows of ``faults.jsonl``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ANY = "kill -9 at a random moment"
WRITES = "kill -9 at a random write"
TERM = "SIGTERM at a random moment"
DISK = "disk full, over quota, read-only or failing from a random write on"
PAIR = "a second command on the same directory"
DAMAGED = "damaged file"
FLOWER = "kill -9 of a server or node of a Flower federation"
INPUTS = "bad input"
FAULTS = (ANY, WRITES, TERM, DISK, PAIR, DAMAGED, FLOWER)

BAD = ("wrong", "lost", "crash", "orphans")
"""What a row tells even if its fault came too late to be counted."""

Row = dict[str, Any]


def write_table(rows: Sequence[Row]) -> tuple[str, bool]:
    """Return the tables as Markdown, and whether nothing was wrong, lost or a crash."""
    lines = [
        "| fault | runs | faults injected | finished | stopped with advice | wrong results | data lost | crashes |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    clean = True
    for kind in FAULTS:
        own = [row for row in rows if row["kind"] == kind and (row["faults"] or any(row.get(key) for key in BAD))]
        if not own:
            continue
        told = sum(bool(row.get("told")) and not row["finished"] for row in own)
        bad = [sum(any(row.get(key) for key in keys) for row in own) for keys in (["wrong"], ["lost"], ["crash", "orphans"])]
        finished = sum(row["finished"] for row in own)
        clean &= not any(bad) and finished + told == len(own)
        cells = [kind, len(own), sum(row["faults"] for row in own), finished, told, *bad]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    inputs = [row for row in rows if row["kind"] == INPUTS]
    if inputs:
        lines += ["", "| bad input | tried | refused in one line | accepted | not ended in two minutes | crashes |"]
        lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
        for what in sorted({row["what"] for row in inputs}):
            own = [row for row in inputs if row["what"] == what]
            crashes = sum(row["crash"] for row in own)
            clean &= not crashes
            slow = sum(row["slow"] for row in own)
            refused = sum(row["code"] == 2 and not row["crash"] for row in own)
            accepted = sum(row["code"] == 0 and not row["crash"] for row in own)
            lines.append(f"| {what} | {len(own)} | {refused} | {accepted} | {slow} | {crashes} |")
    return "\n".join(lines) + "\n", clean
