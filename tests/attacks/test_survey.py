"""A server uses the survey to copy a table: names declared as categories, labels of its choice, many splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from PIL import Image
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
    assert "reply" in server.send("survey", {"question": "describe", "seed": 0, "label": "label"}), "nor the first one asked for"


@pytest.mark.parametrize("question", ["describe", "measure"])
@pytest.mark.parametrize("seed", [1, 47, True, 0.0, "0"])
def test_other_splits_are_not_surveyed(tmp_path: Path, question: str, seed: Any) -> None:
    request = {"question": question, "seed": seed, "label": "label", "numeric": ["age"], "categorical": []}
    assert "policy.split_seed" in node(tmp_path).send("survey", request)["failure"]


def test_another_label_column_would_divide_the_rows_anew_and_is_refused(tmp_path: Path) -> None:
    server = node(tmp_path)
    first = measure(server, numeric=["age"])["reply"]
    said = server.send("survey", {"question": "measure", "seed": 0, "label": "ward", "numeric": ["age"], "categorical": []})
    assert "label in node.toml" in said["failure"]
    assert measure(server, numeric=["age"])["reply"] == first


def test_an_owner_names_the_label_column_whatever_the_server_says(tmp_path: Path) -> None:
    server = node(tmp_path, toml="label = 'ward'")
    assert server.send("survey", {"question": "describe", "seed": 0, "label": "label"})["reply"]["label"] == "ward"


@pytest.mark.parametrize("values", [1, 2, 4])
def test_mean_and_spread_of_few_values_are_not_told(tmp_path: Path, values: int) -> None:
    rows = "".join(f"{i},{90 + i if i < values else ''},{i % 2}\n" for i in range(40))
    (tmp_path / "train.csv").write_text("age,viral load,label\n" + rows)
    for part in ("val", "test"):
        (tmp_path / f"{part}.csv").write_text("age,viral load,label\n1,2,0\n3,4,1\n")
    server = HostileServer(tmp_path / "home", toml=f"data = {str(tmp_path)!r}")
    moments = measure(server, numeric=["age", "viral load"])["reply"]["numeric"]
    assert moments["viral load"] == {"count": 0, "mean": 0.0, "deviation": 0.0, "missing": 40}
    assert moments["age"]["count"] == 40


@pytest.mark.parametrize("kind", ["numeric", "categorical"])
def test_the_label_column_is_not_measured(tmp_path: Path, kind: str) -> None:
    (tmp_path / "codes.csv").write_text("age,label\n" + "\n".join(f"{i},{i % 2}" for i in range(80)))
    server = HostileServer(tmp_path / "home", toml=f"data = {str(tmp_path / 'codes.csv')!r}\n[policy]\ncategorical = ['label']")
    assert "how many samples each class has" in measure(server, **{kind: ["label"]})["failure"]


def test_the_same_column_asked_for_many_times_is_refused(tmp_path: Path) -> None:
    assert "each column once" in measure(node(tmp_path), numeric=["age"] * 10_000)["failure"]


def test_columns_that_the_owner_keeps_back_are_neither_named_nor_measured(tmp_path: Path) -> None:
    server = node(tmp_path, toml="[policy]\ncolumns = ['age']")
    assert server.send("survey", {"question": "describe", "seed": 0, "label": "label"})["reply"]["columns"] == {"age": True}
    assert "policy.columns" in measure(server, categorical=["ward"])["failure"]


def test_a_column_that_the_owner_keeps_back_is_no_label_unless_he_says_so(tmp_path: Path) -> None:
    question, kept = {"question": "describe", "seed": 0, "label": "ward"}, "[policy]\ncolumns = ['age']"
    assert "policy.columns" in node(tmp_path, toml=kept).send("survey", question)["failure"]
    assert not (tmp_path / "home" / "state" / "label").exists(), "a refused column is not the first one asked for"
    assert node(tmp_path, toml=f"label = 'ward'\n{kept}").send("survey", question)["reply"]["labels"] == ["north", "south"]


@pytest.mark.parametrize("shape", [[1, 8, 1], [1, 1, 8], [3, 64, 63]])
def test_strips_that_would_show_the_mean_image_are_not_measured(tmp_path: Path, shape: list[int]) -> None:
    """Of a shape that is no square the middle is cut out: means of wider and wider strips give those of every column."""
    assert "squares" in images(tmp_path).send("survey", {"question": "measure", "seed": 0, "shape": shape})["failure"]


def test_the_size_that_is_asked_for_does_not_choose_which_images_count(tmp_path: Path) -> None:
    """A strip of an image was too large for one size and read for another: a site's images were divided in two ways."""
    server = images(tmp_path)
    Image.new("L", (1, 400), 9).save(tmp_path / "site" / "cat" / "strip.png")
    said = [server.send("survey", {"question": "measure", "seed": 0, "shape": [1, size, size]})["reply"] for size in (8, 1024)]
    assert said[0]["count"] / 8**2 == said[1]["count"] / 1024**2
    assert said[0]["sums"].item() / said[0]["count"] == pytest.approx(said[1]["sums"].item() / said[1]["count"])


@pytest.mark.parametrize("shape", [[3, 4096, 4096], [1, 1, 10**7], [3, 0, 8], [3, 8]])
def test_images_are_not_measured_at_sizes_that_fill_the_memory(tmp_path: Path, shape: list[int]) -> None:
    server = images(tmp_path)
    assert "policy.image_size" in server.send("survey", {"question": "measure", "seed": 0, "shape": shape})["failure"]
    assert server.send("survey", {"question": "measure", "seed": 0, "shape": [1, 8, 8]})["reply"]["count"] > 0


def test_whatever_the_survey_is_asked_no_surname_age_or_note_is_told(tmp_path: Path) -> None:
    server = node(tmp_path)
    columns = ["age", "surname", "ward", "note", "label", "none"]
    said = [
        server.send(
            "survey", {"question": question, "seed": seed, "label": label, "numeric": list(numeric), "categorical": list(categorical)}
        )
        for question in ("describe", "measure", "", None)
        for label in (None, *columns)
        for seed in (0, 1)
        for numeric, categorical in (([], []), (["age"], ["ward"]), ([], ["surname"]), (["surname"], []), (columns, columns))
    ]
    told = repr(said)
    assert sum("reply" in answer for answer in said) >= 4
    assert "Surname" not in told and "xxxx" not in told
    ages = {f"{20 + i % 70}.{i}" for i in range(100, ROWS)}
    assert not {age for age in ages if f"'{age}'" in told or f" {age}," in told}


def images(tmp_path: Path) -> HostileServer:
    for name in ("cat", "dog"):
        (tmp_path / "site" / name).mkdir(parents=True)
        for i in range(12):
            Image.new("L", (8, 8), i).save(tmp_path / "site" / name / f"{i}.png")
    return HostileServer(tmp_path / "home", toml=f"data = {str(tmp_path / 'site')!r}")


def test_an_honest_survey_is_answered(tmp_path: Path) -> None:
    server = node(tmp_path)
    assert server.send("survey", {"question": "describe", "seed": 0, "label": None})["reply"]["labels"] == ["ill", "well"]
    reply = measure(server, numeric=["age"], categorical=["ward"])["reply"]
    assert reply["words"] == {"ward": ["north", "south"]}


def test_the_operator_may_allow_a_column_of_codes(tmp_path: Path) -> None:
    (tmp_path / "codes.csv").write_text("code,label\n" + "\n".join(f"{i % 4},{i % 2}" for i in range(80)))
    server = HostileServer(tmp_path / "home", toml=f"data = {str(tmp_path / 'codes.csv')!r}\n[policy]\ncategorical = ['code']")
    assert measure(server, categorical=["code"])["reply"]["words"] == {"code": ["0", "1", "2", "3"]}
