"""``--json``: every command that ends by itself has it, and standard output is then JSON and nothing else."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

from emdcfl.cli import compare, data, federation, node, run, start, studies, use  # noqa: F401  each adds its commands
from emdcfl.cli.app import answer, app

UNTIL_STOPPED = {"federation serve", "federation metrics", "federation attach", "node serve"}
TINY = ["--set", "training.local_epochs=1", "--set", "scenario.clients_per_group=1"]


def commands(group: Any, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        where = f"{path} {name}".strip()
        if isinstance(command, click.Group) or hasattr(command, "commands"):
            yield from commands(command, where)
        else:
            yield where, command


def test_every_command_that_ends_has_it() -> None:
    found = {name for name, command in commands(typer.main.get_command(app)) if not any("--json" in p.opts for p in command.params)}
    assert found == UNTIL_STOPPED


@pytest.mark.parametrize("as_json", [True, False])
def test_a_path_with_bytes_that_are_no_text_is_printed_as_an_escape(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    path, screen = os.fsdecode(b"run\xff"), io.TextIOWrapper(io.BytesIO(), "utf-8", "strict")  # as in most locales
    monkeypatch.setattr("sys.stdout", screen)
    answer([path], [path], as_json=as_json)
    screen.seek(0)
    printed = screen.read()
    assert json.loads(printed) == [path] if as_json else printed == "run\\udcff\n"


def table(path: Path) -> Path:
    rows = "".join(f"{i % 7},{i % 11},{'ny'[i % 2]}\n" for i in range(60))
    path.write_text(f"a,b,label\n{rows}", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("before", "command", "keys"),
    [
        ([], ["init", "my.toml"], {"config"}),
        ([], ["data", "show", "rotated-digits"], {"picture", "notes"}),
        ([], ["sweep", "--ratios", "0.5", "--solvers", "exact", "--samples", "32", *TINY], None),
        ([["run", "--method", "local", "--rounds", "1", *TINY, "--out", "run", "--quiet"]], ["report", "run"], {"report"}),
        ([], ["node", "init", "home", "--data", "a.csv", "--name", "a"], {"home", "public_key", "fingerprint"}),
        ([["node", "init", "home", "--data", "a.csv"]], ["node", "fingerprint", "home"], {"fingerprint"}),
        ([["node", "init", "home", "--data", "a.csv"]], ["node", "rotate", "home"], {"home", "public_key", "fingerprint"}),
        ([["node", "init", "home", "--data", "a.csv"]], ["node", "check", "home"], None),
        ([["node", "init", "home", "--data", "a.csv"]], ["node", "data", "home"], None),
        ([["node", "init", "home", "--data", "a.csv"]], ["node", "log", "home"], None),
        ([], ["federation", "init", "fed", "--nodes", "2"], {"folder", "nodes"}),
        ([["federation", "init", "fed", "--nodes", "2"]], ["federation", "renew", "fed"], {"valid_until"}),
        ([["federation", "init", "fed", "--nodes", "2"]], ["federation", "down", "fed"], {"stopped"}),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) and value and isinstance(value[0], str) else None,
)
def test_standard_output_is_json(cli: Any, tmp_path: Path, before: list[list[str]], command: list[str], keys: set[str] | None) -> None:
    if command[0] == "federation":
        pytest.importorskip("flwr", reason="federations need the extra 'flower'")
    table(tmp_path / "a.csv")
    for one in before:
        assert cli(*one).code == 0
    ended = cli(*command, "--json")
    assert ended.code == 0, ended
    found = json.loads(ended.out)
    assert keys is None or set(found) == keys


def test_an_error_leaves_standard_output_empty(cli: Any) -> None:
    ended = cli("report", "nothing", "--json")
    assert ended.code == 2 and ended.out == "" and ended.err.startswith("error: ")
