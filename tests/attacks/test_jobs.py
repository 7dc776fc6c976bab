"""A server chooses data, sizes and encodings in a job: folders of the node, networks beyond its memory, names as categories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.attacks.hostile import HostileServer, digits_job
from tests.attacks.test_survey import images, node


@pytest.fixture
def server(tmp_path: Path) -> HostileServer:
    return HostileServer(tmp_path / "home")


@pytest.mark.parametrize("name", ["rotated-mnist", "pacs", "custom"])
def test_a_folder_of_the_servers_choice_is_not_read(server: HostileServer, name: str) -> None:
    data = {"scenario": name, "options": {"data_root": "/etc"}}
    assert "data folder" in server.refused("describe", job={"data": data})


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"name": "mlp", "options": {"features": 64, "classes": 10, "hidden": [2**19, 2**19]}}, "policy.parameters"),
        ({"name": "mlp", "options": {"features": 64, "classes": 10, "hidden": [2**40]}}, "up to 1048576"),
        ({"name": "mlp", "options": {"features": 64, "classes": 10, "hidden": [1] * 10**5}}, "lists of at most 256"),
        ({"name": "small_cnn", "options": {"size": 2**20}}, "policy.parameters"),
        ({"name": "small_cnn", "options": {"classes": -1}}, "cannot be built"),
    ],
)
def test_a_network_beyond_the_nodes_memory_is_refused_before_it_is_built(server: HostileServer, model: dict[str, Any], said: str) -> None:
    assert said in server.refused("describe", job={"model": model})


@pytest.mark.parametrize("changed", [{"size": 10**6}, {"size": 2.5}, {"std": [0.0]}, {"mean": [math.inf]}, {"scale": -math.inf}])
def test_preprocessing_out_of_range_is_refused(server: HostileServer, changed: dict[str, Any]) -> None:
    job = {"preprocess": {**digits_job()["preprocess"], **changed}}
    assert "reply" not in server.ask("describe", job=job)


@pytest.mark.parametrize("many", ["mean", "std"])
def test_a_mean_for_more_channels_than_there_are_does_not_multiply_every_sample(tmp_path: Path, many: str) -> None:
    """One image of 8×8 became one of 100,000 channels: a batch of them took gigabytes before the network refused it."""
    data = {"encoding": {"kind": "images", "shape": [1, 8, 8]}, "classes": ["cat", "dog"], "seed": 0}
    preprocess = {"mean": [0.5], "std": [0.5], "scale": 1.0, "size": None}
    server, model = images(tmp_path), {"name": "small_cnn", "options": {"size": 8}}
    assert "reply" in server.ask("describe", job={"model": model, "data": data, "preprocess": preprocess})
    said = server.refused("describe", job={"model": model, "data": data, "preprocess": {**preprocess, many: [0.5] * 10**5}})
    assert "for each channel or column" in said


MLP = {"name": "mlp", "options": {"features": 1, "classes": 2, "hidden": [4]}}
AGE = {"name": "age", "mean": 50.0, "std": 20.0, "gaps": False}
WARD = {"name": "ward", "words": ["north", "south"]}


def describe(server: HostileServer, encoding: dict[str, Any], classes: Sequence[str] = ("ill", "well")) -> dict[str, Any]:
    data = {"encoding": encoding, "classes": list(classes), "seed": 0}
    preprocess = {"mean": [0.0], "std": [1.0], "scale": 1.0, "size": None}
    return server.ask("describe", job={"model": MLP, "data": data, "preprocess": preprocess})


def test_an_honest_encoding_of_a_table_is_read(tmp_path: Path) -> None:
    assert describe(node(tmp_path), {"kind": "table", "label": "label", "columns": [AGE, WARD]})["reply"]["n"] > 100


def test_the_values_of_one_column_after_another_cannot_be_guessed_as_classes(tmp_path: Path) -> None:
    """How many classes are left out tells whether a guess occurs: of one column, whose words a describing survey would list."""
    (tmp_path / "visits.csv").write_text("age,visits,stage,label\n" + "\n".join(f"{i},{i % 7},{i % 4},{i % 2}" for i in range(280)))
    server = HostileServer(tmp_path / "home", toml=f"data = {str(tmp_path / 'visits.csv')!r}")
    encoding = {"kind": "table", "columns": [AGE]}
    assert "leaves out 6 of its classes" in describe(server, {**encoding, "label": "visits"}, ["5"])["failure"]
    assert "label in node.toml" in describe(server, {**encoding, "label": "stage"}, ["3"])["failure"]


@pytest.mark.parametrize(
    ("columns", "label"),
    [
        ([AGE, {"name": "surname", "words": ["Surname1", "Surname2"]}], "label"),
        ([{"name": "age", "words": ["20.0"]}], "label"),
        ([{"name": "note", "words": ["x"]}], "label"),
        ([AGE], "surname"),
        ([{**AGE, "std": 0.0}], "label"),
        ([{**AGE, "mean": math.nan}], "label"),
        ([{"name": "ward", "words": [str(i) for i in range(70_000)]}], "label"),
        ([{"name": "ward", "words": [str(i) for i in range(201)]}], "label"),
        ([{"name": f"{i}", "words": [str(k) for k in range(200)]} for i in range(400)], "label"),
        ([{**AGE, "gaps": 1000}], "label"),
        ([{**AGE, "gaps": 1}], "label"),
    ],
)
def test_names_as_categories_or_labels_and_absurd_encodings_are_refused(tmp_path: Path, columns: list[Any], label: str) -> None:
    assert "reply" not in describe(node(tmp_path), {"kind": "table", "label": label, "columns": columns})


@pytest.mark.parametrize("shape", [[3, 10**5, 10**5], [3, 8], [0, 8, 8], [3, 8.0, 8], [100, 8, 8]])
def test_images_of_absurd_shapes_are_refused(tmp_path: Path, shape: list[Any]) -> None:
    assert "policy.image_size" in str(describe(node(tmp_path), {"kind": "images", "shape": shape})["failure"])


@pytest.mark.parametrize("kind", ["arrays", "Table", None])
def test_a_table_is_not_taken_as_it_is_with_the_columns_that_are_kept_back(tmp_path: Path, kind: Any) -> None:
    """Of a table of numbers, arrays held all columns in their own units: a profile told the means of those that the owner keeps back."""
    (tmp_path / "table.csv").write_text("\n".join(["age,dose,label", *(f"{20 + i % 50},{i % 7},{i % 2}" for i in range(100))]))
    server = HostileServer(tmp_path / "home", toml=f"data = {str(tmp_path / 'table.csv')!r}\n[policy]\ncolumns = ['age']")
    assert "images or of a table" in describe(server, {"kind": kind, "label": "label", "columns": []}, ["0", "1"])["failure"]


@pytest.mark.parametrize("classes", [["ill"], [], ["ill", "other"]])
def test_classes_that_leave_out_samples_of_a_table_are_refused(tmp_path: Path, classes: list[str]) -> None:
    said = describe(node(tmp_path), {"kind": "table", "label": "label", "columns": [AGE]}, classes)
    assert "all its samples" in said["failure"]


def test_classes_have_no_say_in_how_rows_are_divided(tmp_path: Path) -> None:
    """A class that only the newest row has is in no training sample, and may be left out; then the split by time moved by one row, and
    the difference of two trainings in one batch of all was the gradient of that row, which shows it."""
    rows = [f"{i},{20 + i % 50},{'ill' if i % 2 else 'well'}" for i in range(102)]
    (tmp_path / "table.csv").write_text("\n".join(["day,age,label", *rows, "102,33,new"]))
    server = HostileServer(tmp_path / "home", toml=f"data = {str(tmp_path / 'table.csv')!r}\nsplit = 'time:day'")
    encoding = {"kind": "table", "label": "label", "columns": [AGE]}
    said = [describe(server, encoding, classes)["reply"] for classes in (["ill", "well"], ["ill", "well", "new"])]
    assert said[0]["n"] == said[1]["n"]


def test_classes_that_leave_out_images_are_refused(tmp_path: Path) -> None:
    server, encoding = images(tmp_path), {"kind": "images", "shape": [1, 8, 8]}
    assert "all its samples" in describe(server, encoding, ["cat"])["failure"]
    assert describe(server, encoding, ["cat", "dog", "owl"])["reply"]["n"] > 10


def test_a_second_label_column_is_refused(tmp_path: Path) -> None:
    server = node(tmp_path)
    assert "reply" in describe(server, {"kind": "table", "label": "label", "columns": [AGE]})
    assert "label in node.toml" in describe(server, {"kind": "table", "label": "ward", "columns": [AGE]}, ["north", "south"])["failure"]


def test_a_narrower_policy_holds_for_data_that_were_read_before(tmp_path: Path) -> None:
    server, encoding = node(tmp_path), {"kind": "table", "label": "label", "columns": [AGE, WARD]}
    assert "reply" in describe(server, encoding)
    with (server.home / "node.toml").open("a") as file:
        file.write("[policy]\ncolumns = ['age']\n")
    assert "policy.columns" in describe(server, encoding)["failure"]


def test_a_scenario_beside_an_encoding_hides_neither_splits_nor_columns(tmp_path: Path) -> None:
    encoding = {"kind": "table", "label": "label", "columns": [AGE, WARD]}
    data = {"encoding": encoding, "classes": ["ill", "well"], "seed": 7, "scenario": "rotated-digits", "options": {}}
    own = {"model": MLP, "data": data, "preprocess": {"mean": [0.0], "std": [1.0], "scale": 1.0, "size": None}}
    assert "got both" in node(tmp_path, toml="[policy]\ncolumns = ['age']").refused("describe", job=own)
    assert "got both" in HostileServer(tmp_path / "share").refused("describe", job={"data": {**data, "scenario": "nodes"}})


def test_an_error_names_no_column_that_the_owner_leaves_out_and_no_path(tmp_path: Path) -> None:
    server = node(tmp_path, toml="drop = ['surname']\n[policy]\ncolumns = ['age']")
    said = describe(server, {"kind": "table", "label": "surnam", "columns": [AGE]})["failure"]
    assert "surname" not in said and str(tmp_path) not in said and "emdcfl node data HOME" in said
    assert "serves its own files" in server.refused("describe")
