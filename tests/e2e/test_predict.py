"""``emdcfl predict`` on many files: one that cannot be read costs no other its predictions."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.shell import Ended


@pytest.fixture
def sites(cli: Callable[..., Ended], tmp_path: Path) -> Path:
    """Two sites' tables and a run on them."""
    for site in "ab":
        lines = ["x,z,label", *(f"{i % 7},{i % 3},{'ny'[i % 2]}" for i in range(40))]
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / f"{site}.csv").write_text("\n".join(lines))
    assert cli("run", "--data", "d", "--rounds", 1, "--local-epochs", 1, "--no-baselines", "--quiet", "--out", "run").code == 0
    (tmp_path / "new.csv").write_text("x,z\n1,2\n3,4\n")
    (tmp_path / "torn.csv").write_text("x,z\n1,2,3\n")
    return tmp_path


@pytest.mark.parametrize("whose", [("--client", "a"), ("--new-site",)])
def test_one_unreadable_file_is_named_and_costs_no_other_prediction(cli: Any, sites: Path, whose: tuple[str, ...]) -> None:
    ended = cli("predict", "run", "new.csv", "torn.csv", "none.csv", "d", "new.csv", *whose)
    assert ended.code == 2
    assert [line.split("\t")[0] for line in ended.out.splitlines()] == ["new.csv:1", "new.csv:2"] * 2
    errors = ended.err.splitlines()
    assert all(line.startswith("error: ") and file in line for line, file in zip(errors, ("torn.csv", "none.csv", "d/*"), strict=True))
    nothing = cli("predict", "run", "torn.csv", "none.csv", *whose, "--json")
    assert nothing.code == 2 and nothing.out == "" and len(nothing.err.splitlines()) == 2


def test_predictions_are_written_as_a_table(cli: Any, sites: Path) -> None:
    arguments = ("predict", "run", "new.csv", "none.csv", "--client", "a", "--out", "out/found.csv")
    ended = cli(*arguments)
    assert ended.code == 2 and ended.out == "2 predictions in out/found.csv\n" and "none.csv" in ended.err
    with (sites / "out" / "found.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    found = json.loads(cli("predict", "run", "new.csv", "--client", "a", "--json").out)
    for row, one in zip(rows, found, strict=True):
        assert f"{row['file']}:{row['row']}" == one["input"] and row["class"] == one["class"]
        assert {name: float(row[f"probability of {name}"]) for name in "ny"} == one["probabilities"]
    again = cli(*arguments)
    assert again.code == 2 and "found.csv exists already" in again.err
