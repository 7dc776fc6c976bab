"""Every label of the paper has its file; three are made at smoke scale without data, the others where there are data."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.data import standins
from typer.testing import CliRunner

from emdcfl.cli import studies as command  # registers the command
from emdcfl.cli.app import app
from emdcfl.core.errors import ConfigError
from emdcfl.paper import reproduce as module
from emdcfl.paper.reproduce import SCALES, Context, find, listing, reproduce, specs
from emdcfl.runs.config import Config
from emdcfl.studies.paper_values import tables

SPECS = dict(specs())


def make(name: str, out: Path, **options: Any) -> tuple[dict[str, Any], Path]:
    context = Context(find(name), SCALES["smoke"], out, (0,), Config().engine, say=lambda text: None, **options)
    return reproduce(context), context.place


def test_every_table_of_the_paper_is_there() -> None:
    assert {n for n, s in specs().items() if s.element == "table"} == set(tables())


def test_every_label_of_the_papers_source_is_there() -> None:
    source = os.environ.get("EMDCFL_PAPER")
    if not source:
        pytest.skip("EMDCFL_PAPER does not name the paper's source")
    labels = re.findall(r"\\label\{(tab|fig):(\w+)\}", Path(source).read_text(encoding="utf-8"))
    assert {f"{kind}:{name}" for kind, name in labels} == {row["label"] for row in listing()}


def test_every_file_describes_something_that_can_be_run() -> None:
    for spec in specs().values():
        assert spec.title and spec.kind
        if spec.kind in ("comparison", "timing"):
            names = [choice.name for choice in spec.choices()]
            assert names[:3] == ["oracle", "emdcfl", "emdcfl"]
            wanted = set(tables()[spec.name].rows)
            assert set(names) == wanted
    with pytest.raises(ConfigError, match="did you mean 'pacs'"):
        find("pacss")
    assert find("tab:pacs") is find("pacs")


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few MNIST-like files."""
    standins.mnist(tmp_path / "data", 300, 300)
    monkeypatch.setenv("EMDCFL_DATA", str(tmp_path / "data"))
    return tmp_path


@pytest.mark.slow
def test_overview(tmp_path: Path) -> None:
    about, place = make("overview", tmp_path)
    assert about["complete"]
    assert Image.open(place / "figure.png").size[0] > 1000
    assert json.loads((place / "about.json").read_text())["seconds"] > 0


def test_samples_of_backdoor_mnist(mnist: Path) -> None:
    _, place = make("cmnist", mnist / "out")
    assert np.asarray(Image.open(place / "figure.png").convert("RGB")).std() > 0


@pytest.mark.slow
def test_partial_participation(mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table: two methods, three levels of participation; what it ran is found by the next table."""
    short = replace(find("pp"), scenarios=("rotated-mnist",), methods="oracle,emdcfl:tolerance=auto", participants=(0.25, 0.75))
    monkeypatch.setattr(module, "specs", lambda: {**SPECS, "pp": short})
    about, place = make("pp", mnist / "out")
    text = (place / "table.md").read_text()
    assert "### rotated-mnist (participants 2)" in text and "### rotated-mnist (participants 6)" in text
    assert "smoke test only" in text
    rows = [json.loads(line) for line in (place / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and {r["settings"]["run"]["participants"] for r in rows} == {2, 6}
    assert about["complete"]
    before = (mnist / "out" / "smoke" / "results.jsonl").read_text()
    again, _ = make("pp", mnist / "out")
    assert (mnist / "out" / "smoke" / "results.jsonl").read_text() == before
    assert again["seconds"] >= sum(r["seconds"]["total"] for r in rows) - 0.1  # what was found finished counts


def test_list_is_for_people_and_machines(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["reproduce", "--list", "--json", "--out", str(tmp_path)])
    rows = json.loads(shown.output)
    assert len(rows) == 28
    assert {"name", "label", "title", "took"} <= set(rows[0])
    for row in rows:
        for took in row["took"]:
            assert took["scale"] in SCALES and took["seconds"] > 0 and took["hardware"]
    assert "tab:mnistmax_cifarmax" in CliRunner().invoke(app, ["reproduce", "--list"], env={"COLUMNS": "200"}).output


def test_a_time_limit_is_that_of_all_tables_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, given = iter((0.0, 10.0, 70.0)), []
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(
        command, "reproduce", lambda context: given.append(context.time_limit) or {"files": [], "seconds": 0.0, "notes": []}
    )
    done = CliRunner().invoke(app, ["reproduce", "pacs", "pp", "--time-limit", "100", "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0 and given == [90.0, 30.0]


def test_command_line_refuses_what_it_cannot_mean() -> None:
    for arguments, reason in (([], "got none"), (["pacs", "--scale", "huge"], "unknown scale"), (["nothing"], "no table or figure")):
        done = CliRunner().invoke(app, ["reproduce", *arguments])
        assert isinstance(done.exception, ConfigError)
        assert reason in str(done.exception)
