"""Print the page of ``emdcfl data check``."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from emdcfl.cli.show import tell
from emdcfl.data.own.checking.page import Block, DataPage

MOST_ROWS = 24
"""Rows of a table on the terminal; the HTML page has more."""
PREFIX = {"problem": "problem: ", "note": "note: "}


def show_data_page(console: Console, page: DataPage) -> None:
    """Print the page, within the width of the terminal; the headline comes last, where a reader looks."""
    tell(console, Text.assemble((page.title, "bold")))
    if page.facts:
        tell(console, " · ".join(f"{name}: {value}" for name, value in page.facts))
    for block in page.blocks:
        if block.kind != "sign":  # nobody signs a terminal
            _show(console, block)
    if not any(block.kind == "problem" for block in page.blocks):  # an error says it otherwise
        console.print()
        console.print(Text(page.headline, "bold"))


def _show(console: Console, block: Block) -> None:
    console.print()
    if block.kind not in PREFIX:
        console.print(Text(block.title, "bold"))
    for sentence in block.sentences:
        tell(console, f"{PREFIX.get(block.kind, '')}{sentence}")
    if not block.rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(block.heads):
        table.add_column(head, justify="right" if i in block.right else "left", overflow="fold")
    for row in block.rows[:MOST_ROWS]:
        table.add_row(*row)
    console.print(table)
    if len(block.rows) > MOST_ROWS:
        console.print(f"{len(block.rows) - MOST_ROWS} more with --html FILE or --json")
