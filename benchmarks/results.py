"""The tables of ``docs/results/README.md``, made from the rows in ``docs/results/data``, ours beside the paper's.

    python benchmarks/results.py                       # write the page's tables anew
    python benchmarks/results.py --check               # say whether the page is in step; exit 1 where it is not
    python benchmarks/results.py --take FILE           # first take in rows that 'benchmarks/paper.py' or 'emdcfl compare' made
    python benchmarks/results.py --take FILE --replace # and let them replace older rows of the same method, settings and seed

Below a table stands which of its rows are from which commit.

Every difference from the paper above two standard deviations is listed below its table with its sentence of
``docs/results/differences.toml``; one without a sentence is said to have none, and fails ``--check``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from emdcfl.paper.differences import PAPER_TRAINING, Difference, differences, full_size
from emdcfl.studies.results import ResultRow, read_results
from emdcfl.studies.tables import build, by_label, markdown, sample_key

HERE = Path(__file__).parents[1] / "docs/results"
BEGIN, END = "<!-- tables: begin (benchmarks/results.py writes what is between these lines) -->", "<!-- tables: end -->"
SCENARIOS = (
    "rotated-mnist", "pacs", "backdoor-mnist", "rotated-cifar10", "backdoor-cifar10", "rotated-mnist-two", "rotated-mnist-min",
    "mnist-base", "rotated-cifar10-two", "rotated-cifar10-min", "cifar10-base",
)  # fmt: skip
UNEXPLAINED = "no sentence yet"
SHORTER = "Shorter than the paper's 10 rounds of 10 local epochs, so its accuracies are no target here."


@dataclass(frozen=True)
class Sentence:
    """What is known, or guessed, of a difference; empty lists stand for everything."""

    text: str
    scenarios: Sequence[str] = ()
    methods: Sequence[str] = ()
    metrics: Sequence[str] = ()

    def covers(self, difference: Difference) -> bool:
        mine = ((self.scenarios, difference.scenario.split(" ")[0]), (self.methods, difference.method), (self.metrics, difference.metric))
        return all(not wanted or value in wanted for wanted, value in mine)


def read_sentences(path: Path) -> list[Sentence]:
    return [Sentence(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("difference", [])] if path.exists() else []


def read_rows(folder: Path) -> list[ResultRow]:
    """Return the rows at paper scale, scenarios in the order of the page."""
    return [as_now(row) for name in SCENARIOS if (path := folder / f"{name}.jsonl").exists() for row in read_results(path)]


def as_now(row: ResultRow) -> ResultRow:
    """Leave out an option that older rows name and that says nothing: with a given tolerance no blocks are averaged anyway."""
    method = row["settings"]["method"]
    if method.get("tolerance", "auto") == "auto" or method.get("average_blocks") is not False:
        return row
    kept = {key: value for key, value in method.items() if key != "average_blocks"}
    return {**row, "settings": {**row["settings"], "method": kept}}


def in_time(row: ResultRow) -> str:
    """Return how far a run went that is not of the paper's size."""
    rounds, epochs = row["settings"]["run"]["rounds"], row["settings"]["training"]["local_epochs"]
    if epochs == PAPER_TRAINING["local_epochs"]:
        return f", after round {rounds}"
    return f": {'1 round' if rounds == 1 else f'{rounds} rounds'} of {epochs} local epochs"


def kinds(rows: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    """Divide rows into tables: what was trained alike, with as many participants."""
    found: dict[str, list[ResultRow]] = {}
    for row in rows:
        run = row["settings"]["run"]
        title = row["scenario"] if run.get("participants") is None else f"{row['scenario']}, {run['participants']} participants a round"
        found.setdefault(title if full_size(row) else f"{title}{in_time(row)}", []).append(row)
    return found


def origins(rows: Sequence[ResultRow]) -> str:
    """Say from which commit the rows of a table are."""
    found: dict[str, list[str]] = {}
    for label, members in by_label(rows).items():
        for commit in dict.fromkeys(row.get("commit") for row in members):
            found.setdefault("no commit" if commit is None else f"commit {commit}", []).append(label)
    said = "; ".join(f"{commit}: {', '.join(labels)}" for commit, labels in found.items())
    return f"{said[0].upper()}{said[1:]}.\n"


def page(rows: Sequence[ResultRow], sentences: Sequence[Sentence]) -> tuple[str, list[Difference]]:
    """Return the tables with their differences, and the differences without a sentence."""
    blocks, open_ = [], []
    for title, members in kinds(rows).items():
        table = markdown(build(members), leave_out=("seconds",)).split("\n", 2)[2]
        by_text: dict[str, list[Difference]] = {}
        for difference in differences(members):
            said = next((s.text for s in sentences if s.covers(difference)), UNEXPLAINED)
            by_text.setdefault(said, []).append(difference)
        open_ += by_text.get(UNEXPLAINED, [])
        told = [f"- {'; '.join(d.text() for d in same)}: {said}" for said, same in by_text.items()]
        listed = "Above two standard deviations:\n\n" + "\n".join(told) + "\n" if told else ""
        sizes = "" if full_size(members[0]) else f"{SHORTER}\n\n"
        blocks.append(f"### {title}\n\n{sizes}{table}\n{origins(members)}\n{listed}".rstrip() + "\n")
    return "\n".join(blocks), open_


def with_tables(text: str, tables: str) -> str:
    """Put the tables between their marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n{END}{rest.split(END)[1]}"


def take(source: Path, folder: Path, *, replace: bool = False) -> int:
    """Add the lines of new rows, as they are, to the file of their scenario; say how many there were.

    ``replace`` drops the rows that were there for the same cell and seed, or with the same config: the table would show the older one.
    """
    read_results(source)  # whatever is damaged is an error before anything is taken
    added = 0
    for line in source.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        path = folder / f"{row['scenario']}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        known = [json.loads(old) for old in lines]
        if row in known or (not replace and any(row["config"] == old["config"] for old in known)):
            continue
        same = sample_key(as_now(row))
        older = [replace and (old["config"] == row["config"] or sample_key(as_now(old)) == same) for old in known]
        kept = [text for text, gone in zip(lines, older, strict=True) if not gone]
        path.write_text("".join(f"{text}\n" for text in [*kept, line]), encoding="utf-8")
        added += 1
    return added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path, nargs="*", default=[])
    parser.add_argument("--replace", action="store_true", help="with --take: rows of the same cell and seed that are there already go")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--folder", type=Path, default=HERE)
    args = parser.parse_args()
    for source in args.take:
        print(f"{take(source, args.folder / 'data', replace=args.replace)} new rows of {source}")
    tables, open_ = page(read_rows(args.folder / "data"), read_sentences(args.folder / "differences.toml"))
    place = args.folder / "README.md"
    text = place.read_text(encoding="utf-8")
    wanted = with_tables(text, tables)
    for difference in open_:
        print(f"no sentence: {difference.scenario}: {difference.text()}")
    if not args.check:
        place.write_text(wanted, encoding="utf-8")
        return
    if text != wanted:
        print(f"{place} is not what the rows give; run python benchmarks/results.py")
    sys.exit(int(text != wanted or bool(open_)))


if __name__ == "__main__":
    main()
