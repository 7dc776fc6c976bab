"""``emdcfl compare``: many methods, many seeds, one table."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from emdcfl.cli.app import Device, Jobs, Scale, TimeLimit, app, complete_methods, complete_scenarios, print_json
from emdcfl.cli.own_data import own_data
from emdcfl.cli.run import build_config, whose_data
from emdcfl.cli.show import draw_table, tell
from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.core.metric import metric_of, score_of
from emdcfl.core.schema import Reply
from emdcfl.runs.config import config_keys
from emdcfl.runs.loop import NoOpObserver
from emdcfl.runs.watching.progress import Pace, terminal
from emdcfl.studies import compare as studies
from emdcfl.studies.results import Results, read_results
from emdcfl.studies.table_files import against_text, interval_text, records, write_tables
from emdcfl.studies.tables import METRICS, UNSEEN_HEADS, Column, Table, build, unseen_cells, unseen_rows


@app.command("compare")
@own_data(after="data")
def compare_(
    own: dict[str, Any],
    scenario: Annotated[
        str | None,
        typer.Option(
            help="See 'emdcfl data list'. With --merge and without a scenario, nothing is run.", autocompletion=complete_scenarios
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Your own files instead: a folder of sites, or one table.")] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="all, or a list a,b,c. +ft adds fine-tuning at every site. Options follow colons: emdcfl:tolerance=0.025.",
            autocompletion=complete_methods,
        ),
    ] = "all",
    seeds: Annotated[str, typer.Option(help="Seeds, for example 0,1,2 or 0-4.")] = "0,1,2",
    out: Annotated[Path, typer.Option(help="Folder of results.jsonl and the tables.")] = Path("runs/compare"),
    scale: Scale = None,
    config: Annotated[Path | None, typer.Option(help="Config file (TOML) to start from.", show_default=False)] = None,
    time_limit: TimeLimit = None,
    jobs: Jobs = 1,
    rounds: Annotated[int | None, typer.Option(help="Global rounds T.", show_default="the scenario's")] = None,
    local_epochs: Annotated[int | None, typer.Option(help="Local epochs E per round.", show_default="the scenario's")] = None,
    personalize: Annotated[
        str | None, typer.Option(help="Every client fine-tunes its model after the last round: off, on or if-it-pays.", show_default="off")
    ] = None,
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="Hold every site out once, place it without labels, and test it.")
    ] = False,
    folds: Annotated[
        int | None, typer.Option(help="Hold sites out in this many folds instead; neighbours in the list share a fold.", show_default=False)
    ] = None,
    device: Device = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Set any key of all runs, for example --set training.lr=0.1; repeatable.")
    ] = None,
    keep_runs: Annotated[
        bool, typer.Option("--keep-runs", help="Keep run directories, so that an interrupted run continues where it stopped.")
    ] = False,
    merge: Annotated[list[Path] | None, typer.Option(help="Add the rows of another results.jsonl (or its folder); repeatable.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the table at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON and nothing else.")] = False,
) -> None:
    """Run methods × seeds on a scenario or your own data. Skip runs already in --out. Write tables (md, tex, csv) and report.html."""
    settings = set_ or []
    refused = next((s for s in settings if s.strip().startswith(("method", "privacy", "run.seed"))), None)
    if refused is not None:
        how = "give --seeds" if "run.seed" in refused else "options of a method go with its name, as in --methods emdcfl:tolerance=0.03"
        raise ConfigError(f"--set {refused}: {how}")
    if scenario is None and data is None and config is None and not merge:
        raise ConfigError("expected --scenario or --data (what to run) or --merge (what to take in), got none; see 'emdcfl data list'")
    console, wanted = terminal(), []
    if scenario is not None or data is not None or config is not None:
        flags = whose_data(scenario, data, own, config) | config_keys(
            rounds=rounds, local_epochs=local_epochs, scale=scale, personalize=personalize, device=device
        )
        base = build_config(config, flags, settings)
        if leave_one_out or folds is not None:
            chosen, numbers = studies.parse_methods(methods, base), studies.parse_seeds(seeds)
            wanted = [one for seed in numbers for fold in studies.folds_of(base, folds) for one in studies.configs(fold, chosen, [seed])]
        else:
            asked = studies.parse_methods(methods, base)
            chosen = studies.with_fine_tuning(base, asked)
            wanted = studies.configs(base, chosen, studies.parse_seeds(seeds))
            if len(chosen) > len(asked) and not (quiet or as_json):
                others = ", and +ft after the methods that shall fine-tune" if base.personalize.wanted else ""
                why = "one model fine-tuned at home is what grouping has to beat"
                tell(console, f"{chosen[-1].name} is added: {why}; --personalize off leaves it out{others}")
    logging.getLogger("emdcfl").setLevel(logging.WARNING if quiet or as_json else logging.INFO)
    with ComparisonProgress(console, quiet=quiet or as_json) as screen:
        outcome = studies.compare(wanted, out, jobs=jobs, time_limit=time_limit, keep_runs=keep_runs, merge=merge or [], watch=screen)
    conclude(console, out, outcome, as_json=as_json)


def conclude(console: Console, out: Path, outcome: studies.ComparisonOutcome, *, as_json: bool = False) -> None:
    """Write the tables and the page, print the tables or all numbers as JSON, and say what is missing."""
    from emdcfl.report import write_report

    results = read_results(out) if (out / "results.jsonl").exists() else []
    if results:
        table = write_tables(results, out)
        unseen = unseen_rows(results)
        write_report(out)
        if as_json:
            counts = {"found": outcome.found, "ran": outcome.ran, "left": outcome.left, "failed": [str(d.job) for d in outcome.failed]}
            print_json({"runs": counts, "table": records(table), "unseen": unseen})
        else:
            print_tables(console, table)
            if unseen:
                held_out = draw_table(UNSEEN_HEADS, unseen_cells(unseen), left=("scenario", "method"), title="Sites held out of training")
                console.print(held_out)
    wanted = len(outcome.keys)
    there = f"{outcome.found + outcome.ran} of {wanted} runs are there ({outcome.ran} run now)"
    done = there if wanted else f"{len(results)} runs are there"
    left = f", {outcome.left} left by the time limit: start again to go on" if outcome.left else ""
    if not as_json:
        console.print(f"{done}{left}; results, tables and report.html in {out}", soft_wrap=True)
    if outcome.failed:
        raise ClientError(studies.describe_failures(outcome.failed))


class ComparisonProgress(NoOpObserver):
    """The table as it fills and the runs on their way, on a terminal; elsewhere a line per finished run, and per minute of a long one."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self.running: list[studies.Job] = []
        self.pace: Pace | None = None
        self.table: RichTable | None = None
        shown = console.is_terminal and not quiet
        self.live = Live(get_renderable=self._picture, console=console, transient=True, refresh_per_second=2) if shown else None

    def __enter__(self) -> ComparisonProgress:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def launch(self, job: studies.Job, number: int, total: int) -> None:
        if self.pace is None:
            self._say(f"{total - number + 1} of {total} runs to do")
        self.running.append(job)
        self.pace = Pace()

    def begin(self, index: int, total: int, participants: tuple[str, ...]) -> None:
        if self.pace is not None:
            self.pace.begin(index, total, participants)

    def reply(self, task: str, client: str, reply: Reply) -> None:
        if self.pace is None:
            return
        self.pace.reply(task, client, reply)
        if self.live is None and self.pace.due():
            self._say(f"{self.running[0]}: {self.pace}")

    def note(self, done: studies.Done, results: Results, ended: int, total: int) -> None:
        self.running = [job for job in self.running if job != done.job]
        if self.quiet or done.row is None:
            return
        row: dict[str, Any] = done.row
        score, text = score_of(row), metric_of(row).text
        scores = ", ".join(f"{v} {text(s['mean'])}" for v, s in score["variants"].items())
        ari = "" if row["ari"] is None else f", ARI {row['ari']:.2f}"
        said = f"{scores}, worst {text(score['worst'])}{ari}, {row['seconds']['total']:.0f} s"
        self._say(f"[{ended}/{total}] {done.job}: {said}")
        if self.live is not None:
            table = build(results.rows)
            self.table = rich_tables(table, table.columns[-1], self.console.width)[0] if table.columns else None

    def _say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, soft_wrap=True)

    def _picture(self) -> Group:
        # only a run by itself tells where it is; those in processes of their own are named
        where = (
            f"{self.running[0]}: {self.pace}"
            if len(self.running) == 1 and self.pace and self.pace.first
            else "; ".join(map(str, self.running))
        )
        return Group(*([] if self.table is None else [self.table]), Text(where, style="dim"))


def print_tables(console: Console, table: Table) -> None:
    """Print a comparison as tables that fit the terminal, with notes and intervals."""
    for column in table.columns:
        for one in rich_tables(table, column, console.width):
            console.print(one)
        for note in table.notes(column):
            console.print(note, soft_wrap=True, markup=False)
        if table.has_intervals(column):
            console.print(_intervals(table, column))


def rich_tables(table: Table, column: Column, width: int) -> list[RichTable]:
    """Return terminal tables of a scenario; numbers that do not fit beside the whole names go on in a table below."""
    labels = table.labels(column)
    blocks: list[list[_Numbers]] = [[]]
    room = width - max((cell_len(label) for label in labels), default=0) - 2
    for group in _numbers(table, column, labels):
        for numbers in group:
            needed = group if numbers is group[0] else [numbers]  # a score begins where the paper's fits beside it
            if blocks[-1] and sum(n.width for n in (*blocks[-1], *needed)) > room:
                blocks.append([])
            blocks[-1].append(numbers)
    found = []
    for i, block in enumerate(blocks):
        shown = RichTable(title=column.title if i == 0 else None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        shown.add_column("method", overflow="fold")
        for numbers in block:
            shown.add_column(numbers.head, justify="right", style="dim" if numbers.dim else "", no_wrap=True)
        for row, label in enumerate(labels):
            shown.add_row(Text(label), *(numbers.texts[row] for numbers in block))
        found.append(shown)
    return found


@dataclass(frozen=True)
class _Numbers:
    """A column of a terminal table."""

    head: str
    texts: list[Text]
    dim: bool = False

    @property
    def width(self) -> int:
        return max(cell_len(self.head), *(text.cell_len for text in self.texts)) + 3


def _numbers(table: Table, column: Column, labels: Sequence[str]) -> list[list[_Numbers]]:
    """Return the columns of each metric: ours, then those beside it."""
    found = []
    for metric in column.metrics:
        cells = [table.cells.get((label, column.key, metric)) for label in labels]
        best = table.best(column.key, metric)
        styles = ["bold" if label in best else "" for label in labels]
        texts = [Text("–" if c is None else c.text(metric), style) for c, style in zip(cells, styles, strict=True)]
        group = [_Numbers(METRICS[metric], texts)]
        for head, name in table.beside(column, metric).items():
            values = [None if cell is None else getattr(cell, name) for cell in cells]
            group.append(_Numbers(head, [Text("–" if value is None else value.text()) for value in values], dim=True))
        found.append(group)
    return [*found, [_Numbers("seeds", [Text(str(table.seeds(label, column))) for label in labels])]]


def _intervals(table: Table, column: Column) -> RichTable:
    """Return how sure the scores of a scenario are, and their differences from the best."""
    labels = [label for label in table.rows if (label, column.key, column.metrics[0]) in table.cells]
    rows = [(Text(label), interval_text(table, label, column), against_text(table, label, column)) for label in labels]
    heads = ("method", METRICS[column.metrics[0]], "against the best")
    return draw_table(heads, rows, left=("method",), title="How sure? 95% intervals")
