"""A server uses the survey to copy a table: names declared as categories, labels of its choice, many splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.attacks.hostile import HostileServer

ROWS = 400


def table(path: Path, rows: int = ROWS) -> None:
    lines = ["age,surname,ward,note,label"]
    for i in range(rows):
        lines.append(
            f"{20 + i % 70}.{i},Surname{i},{'north' if i % 3 else 'south'},{'x' * (70 if i % 9 == 0 else 1)},{'ill' if i % 2 else 'well'}"
        )
    path.write_text("\n".join(lines), encoding="utf-8")


def node(tmp_path: Path, rows: int = ROWS, toml: str = "") -> HostileServer:
    table(tmp_path / "table.csv", rows)
    return HostileServer(tmp_path / "home", toml=f"data = {str(tmp_path / 'table.csv')!r}\n{toml}")


def measure(server: HostileServer, *, numeric: Any = (), categorical: Any = (), seed: Any = 0) -> dict[str, Any]:
    request = {"question": "measure", "seed": seed, "label": "label", "numeric": list(numeric), "categorical": list(categorical)}
    return server.send("survey", request)


def test_numbers_declared_categorical_are_not_listed(tmp_path: Path) -> None:
    said = measure(node(tmp_path), categorical=["age"])
    assert "policy.categorical" in said["failure"]
    assert "20" not in said["failure"].replace("200", "")


@pytest.mark.parametrize("rows", [ROWS, 60])
def test_surnames_are_not_listed_whether_they_are_many_or_few(tmp_path: Path, rows: int) -> None:
    said = measure(node(tmp_path, rows), categorical=["surname"])
    assert "surname" in said["failure"]
    assert "Surname" not in said["failure"]


def test_free_text_is_not_listed(tmp_path: Path) -> None:
    assert "64 characters" in measure(node(tmp_path), categorical=["note"])["failure"]


def test_one_refused_column_refuses_the_whole_answer(tmp_path: Path) -> None:
    assert "reply" not in measure(node(tmp_path), numeric=["age"], categorical=["ward", "surname"])


@pytest.mark.parametrize("column", ["surname", "age"])
def test_a_column_of_names_or_numbers_is_no_label(tmp_path: Path, column: str) -> None:
    server = node(tmp_path)
    said = server.send("survey", {"question": "describe", "seed": 0, "label": column})
    assert "reply" not in said


@pytest.mark.parametrize("question", ["describe", "measure"])
@pytest.mark.parametrize("seed", [1, 47, True, 0.0, "0"])
def test_other_splits_are_not_surveyed(tmp_path: Path, question: str, seed: Any) -> None:
    request = {"question": question, "seed": seed, "label": "label", "numeric": ["age"], "categorical": []}
    assert "policy.split_seed" in node(tmp_path).send("survey", request)["failure"]


def test_an_honest_survey_is_answered(tmp_path: Path) -> None:
    server = node(tmp_path)
    assert server.send("survey", {"question": "describe", "seed": 0, "label": None})["reply"]["labels"] == ["ill", "well"]
    reply = measure(server, numeric=["age"], categorical=["ward"])["reply"]
    assert reply["words"] == {"ward": ["north", "south"]}


def test_the_operator_may_allow_a_column_of_codes(tmp_path: Path) -> None:
    (tmp_path / "codes.csv").write_text("code,label\n" + "\n".join(f"{i % 4},{i % 2}" for i in range(80)))
    server = HostileServer(tmp_path / "home", toml=f"data = {str(tmp_path / 'codes.csv')!r}\n[policy]\ncategorical = ['code']")
    assert measure(server, categorical=["code"])["reply"]["words"] == {"code": ["0", "1", "2", "3"]}
