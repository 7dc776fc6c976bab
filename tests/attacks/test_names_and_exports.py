"""Names that move a cursor or begin a formula, and rows of results that nobody measured."""

from __future__ import annotations

import copy
import csv
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from emdcfl.cli.app import _Stderr
from emdcfl.core.errors import StoreError
from emdcfl.core.units import escaped, names
from emdcfl.report.svg import visible
from emdcfl.runs.watching.progress import terminal
from emdcfl.studies.compare import compare
from emdcfl.studies.results import Results, read_results
from emdcfl.studies.table_files import latex, markdown, tidy
from emdcfl.studies.tables import build

DATA = Path(__file__).parents[2] / "docs/results/data"
ESC = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


def honest() -> list[dict[str, Any]]:
    """Rows as they were measured."""
    return read_results(DATA / "rotated-digits.jsonl")


@pytest.mark.parametrize("text", [ESC, f"site {ESC}\nerror: forged", "\ud800"])
def test_names_are_shown_with_their_hidden_characters_escaped(text: str) -> None:
    assert escaped(text).isprintable()
    assert names([text]).isprintable()
    assert "\x1b" not in visible(text)
    assert escaped("Zürich – 東京 №1") == "Zürich – 東京 №1"


def test_a_terminal_gets_no_control_character_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.table import Table
    from rich.text import Text

    console = terminal()
    console.file = io.StringIO()
    table = Table(title=f"title {ESC}")
    table.add_column(f"column {ESC}")
    table.add_row(f"cell {ESC}")
    table.add_row(Text(f"text {ESC}"))
    for shown in (f"plain {ESC}", Text.assemble("styled ", (ESC, "bold")), table):
        console.print(shown, soft_wrap=True)
    written = console.file.getvalue()
    assert not set(written) & set("\x1b\x07\x9b\u202e")
    assert "\\x1b" in written


def test_a_log_line_gets_no_control_character_of_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    _Stderr().emit(logging.LogRecord("emdcfl", logging.WARNING, "", 0, f"client {ESC}", None, None))
    assert not set(capsys.readouterr().err) & set("\x1b\x07\x9b\u202e")


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)"])
def test_no_cell_of_a_table_is_a_formula(name: str) -> None:
    rows = honest()
    for row in rows:
        row["scenario"] = row["settings"]["scenario"]["name"] = name
        row["method"] = row["settings"]["method"]["name"] = name
    for cells in list(csv.reader(io.StringIO(tidy(build(rows)))))[1:]:
        assert not any(cell.startswith(("=", "+", "@")) for cell in cells)
        assert not any(cell.startswith("-") for cell in cells[:3])


def test_tables_get_no_control_character_of_a_name() -> None:
    rows = honest()
    for row in rows:
        row["scenario"] = row["settings"]["scenario"]["name"] = f"a {ESC}"
        row["method"] = row["settings"]["method"]["name"] = f"b {ESC}"
    table = build(rows)
    for write in (tidy, markdown, latex):
        assert not set(write(table)) & set("\x1b\x07\x9b\u202e")


@pytest.mark.parametrize("path", sorted(DATA.glob("*.jsonl")), ids=lambda path: path.name)
def test_rows_as_they_were_measured_are_taken_in(path: Path, tmp_path: Path) -> None:
    compare([], tmp_path, merge=[path])
    assert len(read_results(tmp_path)) == len(read_results(path))


FORGED: dict[str, tuple[tuple[str, ...], Any]] = {
    "accuracy above one": (("accuracy", "mean"), 7.5),
    "accuracy is text": (("accuracy", "mean"), "0.9"),
    "accuracy is NaN": (("accuracy", "worst"), float("nan")),
    "accuracy of a variant is infinite": (("accuracy", "variants", "test", "mean"), float("inf")),
    "variants are a list": (("accuracy", "variants"), []),
    "ari is a list": (("ari",), [1]),
    "ari is two": (("ari",), 2.0),
    "seed is true": (("seed",), True),
    "seed is negative": (("seed",), -1),
    "seconds without a total": (("seconds",), {}),
    "seconds are negative": (("seconds", "total"), -1.0),
    "config is a path": (("config",), "../../etc/passwd"),
    "method with an escape": (("method",), ESC),
    "method is very long": (("method",), "x" * 100_000),
    "scenario is a number": (("scenario",), 3),
    "an unknown key": (("shell",), "rm -rf"),
    "settings are a list": (("settings",), []),
    "settings with an unknown table": (("settings", "evil"), {}),
    "settings without a method": (("settings", "method"), 3),
    "a setting out of range": (("settings", "run", "rounds"), -5),
    "history of text": (("history",), ["x"]),
    "a round's score of text": (("history",), [{"round": 1, "k": 1, "ari": None, "mean": 0.5, "variants": {"clean": "x"}}]),
    "notes with an escape": (("notes",), [ESC]),
    "failures is a float": (("failures",), 0.5),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_row_is_refused_and_nothing_is_appended(what: str, tmp_path: Path) -> None:
    keys, value = FORGED[what]
    rows = copy.deepcopy(honest()[:2])
    at: Any = rows[1]
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    forged = tmp_path / "forged.jsonl"
    forged.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "sha256"}) + "\n" for row in rows))
    out = tmp_path / "out"
    with Results(out) as results:
        results.add(honest()[2:4])
    before = (out / "results.jsonl").read_bytes()
    with pytest.raises(StoreError, match=r"forged\.jsonl: "):
        compare([], out, merge=[forged])
    assert (out / "results.jsonl").read_bytes() == before
