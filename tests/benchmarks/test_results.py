"""The generated tables of docs/results: made from the rows, one cell per method and settings, every difference explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import results
from emdcfl.studies.results import read_results
from emdcfl.studies.tables import by_label

DATA = results.HERE / "data"


def with_settings(row: dict[str, Any], table: str, **values: Any) -> dict[str, Any]:
    """Return a row whose settings differ."""
    return {**row, "settings": {**row["settings"], table: {**row["settings"][table], **values}}}


def test_tables_are_up_to_date_and_every_difference_is_explained() -> None:
    texts, unexplained = results.pages(results.HERE)
    assert not unexplained
    assert not results.stale(results.HERE / "tables", texts), "run make results"


def test_a_difference_without_a_sentence_is_found() -> None:
    text, unexplained = results.comparison(results.read_rows(DATA), [])
    assert unexplained and results.UNEXPLAINED in text


def test_a_changed_or_foreign_file_is_stale(tmp_path: Path) -> None:
    for name in ("same.md", "changed.md", "foreign.md"):
        (tmp_path / name).write_text("text")
    assert results.stale(tmp_path, {"same.md": "text", "changed.md": "other", "missing.md": ""}) == [
        "changed.md",
        "foreign.md",
        "missing.md",
    ]


def test_rows_are_taken_once_and_replace_older_ones_where_asked(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    old = read_results(DATA / "pacs.jsonl")[0]
    new = {**old, "config": "another engine", "settings": {**old["settings"], "engine": {**old["settings"]["engine"], "streams": 3}}}
    other = {**old, "config": "another seed", "seed": old["seed"] + 1}
    for name, rows in (("old", [old]), ("new", [new, other])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"config": "cut o')
    place = tmp_path / "data/pacs.jsonl"
    assert results.take(tmp_path / "old", tmp_path / "data") == 1 and results.take(tmp_path / "old", tmp_path / "data") == 0
    assert results.take(tmp_path / "new", tmp_path / "data") == 2 and len(read_results(place)) == 3
    place.unlink()
    results.take(tmp_path / "old", tmp_path / "data")
    assert results.take(tmp_path / "new", tmp_path / "data", replace=True) == 2
    assert [row["config"] for row in read_results(place)] == ["another engine", "another seed"]
    again = {**new, "commit": "0123456789ab"}
    (tmp_path / "again").write_text(json.dumps(again) + "\n")
    assert results.take(tmp_path / "again", tmp_path / "data") == 0
    assert results.take(tmp_path / "again", tmp_path / "data", replace=True) == 1
    assert {row["config"]: row["commit"] for row in read_results(place)}["another engine"] == "0123456789ab"
    assert results.take(tmp_path / "again", tmp_path / "data", replace=True) == 0


def test_an_option_that_only_some_rows_know_does_not_divide_them() -> None:
    row = next(r for r in read_results(DATA / "pacs.jsonl") if r["settings"]["method"].get("tolerance") == 0.025)
    old, new = with_settings(row, "method", average_blocks=False), {**row, "seed": 1}
    assert list(by_label(results.comparable([old, new]))) == ["EMD-CFL (average_blocks False, tolerance 0.025)"]
    differing = [with_settings(old, "method", alpha=0.01), with_settings(old, "method", alpha=0.02), new]
    assert len(by_label(results.comparable(differing))) == 3


def test_a_shorter_run_has_a_table_of_its_own() -> None:
    row = next(r for r in read_results(DATA / "rotated-mnist.jsonl") if r["method"] == "oracle")
    first, short = with_settings(row, "run", rounds=1), with_settings(row, "training", local_epochs=2)
    assert list(results.kinds([row, first, short])) == [
        "rotated-mnist",
        "rotated-mnist, after round 1",
        "rotated-mnist: 10 rounds of 2 local epochs",
    ]
    text, unexplained = results.comparison([first, {**row, "commit": None}], [])
    assert text.count(results.SHORTER) == 1 and {d.scenario for d in unexplained} <= {"rotated-mnist"}
    assert f"Commit: {row['commit']}." in text and "Commit: not recorded." in text
