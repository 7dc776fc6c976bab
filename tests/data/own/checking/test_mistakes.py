"""Fifty mistakes that people make with their own files: each ends in one line that names file, column or row, and the remedy."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from emdcfl.core.errors import EmdcflError
from emdcfl.data.own import check_folder
from emdcfl.data.own.cleaning import Cleaning
from emdcfl.data.own.splitting import SplitRule

COLUMNS = ["age", "dose", "ward", "label"]


def rows(seed: int, n: int = 60) -> list[list[str]]:
    rng = random.Random(seed)
    return [[f"{rng.gauss(50, 9):.1f}", f"{rng.gauss(1, 1):.3f}", rng.choice("ab"), "sick" if i % 2 else "well"] for i in range(n)]


def text(lines: list[list[str]], head: list[str] | None = None) -> str:
    return "\n".join(",".join(line) for line in [head or COLUMNS, *lines]) + "\n"


def change(path: Path, column: int, how: Callable[[int, str], str]) -> None:
    """Change a column of a table, row by row; the head is row 0."""
    lines = [line.split(",") for line in path.read_text().splitlines()]
    for i, line in enumerate(lines):
        line[column] = how(i, line[column])
    path.write_text("\n".join(",".join(line) for line in lines) + "\n")


def append(path: Path, *lines: str) -> None:
    path.write_text(path.read_text() + "".join(f"{line}\n" for line in lines))


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    for i, site in enumerate(("north", "south", "west")):
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / f"{site}.csv").write_text(text(rows(i)))
    return tmp_path / "d"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    rng = random.Random(0)
    for site in ("north", "south", "west"):
        for kind in ("sick", "well"):
            (tmp_path / "i" / site / kind).mkdir(parents=True)
            for i in range(12):
                Image.frombytes("L", (8, 8), rng.randbytes(64)).save(tmp_path / "i" / site / kind / f"{i}.png")
    return tmp_path / "i"


def everywhere(column: int, how: Callable[..., str]) -> Callable[[Path], None]:
    """Change a column at all sites; the function is also given the site."""

    def make(d: Path) -> None:
        for path in sorted(d.glob("*.csv")):
            change(path, column, partial(how, s=path.stem))

    return make


def data(d: Path, site: str = "west") -> Path:
    return d / f"{site}.csv"


def with_bytes(encoding: str) -> Callable[[Path], None]:
    return lambda d: data(d).write_bytes(data(d).read_text().replace("ward", "Stück").encode(encoding))


Mistake = tuple[Callable[[Path], Any], dict[str, Any], tuple[str, ...]]

TABLES: dict[str, Mistake] = {
    # files
    "an empty file": (lambda d: data(d).write_bytes(b""), {}, ("west.csv", "empty", "add")),
    "only a head": (lambda d: data(d).write_text(text([])), {}, ("west", "0 samples", "at least 10")),
    "no head": (lambda d: data(d).write_text(text(rows(2)[1:], rows(2)[0])), {}, ("west.csv", "first line", "names")),
    "five rows": (lambda d: data(d).write_text(text(rows(2, 5))), {}, ("west", "5 samples")),
    "a client column without a value": (
        lambda d: ([data(d, s).unlink() for s in ("north", "south")], change(data(d), 2, lambda i, c: ",2024-01-01" if i else "ward,day")),
        {"client": "ward", "cleaning": Cleaning.of(date="day")},
        ("west.csv", "no row has a value in the client column 'ward'", "--client"),
    ),
    "one site": (lambda d: [data(d, s).unlink() for s in ("north", "south")], {}, ("'west'", "two clients")),
    "spaces only": (lambda d: data(d).write_text(" \n \n"), {}, ("west.csv",)),
    "a row with a cell too many": (lambda d: append(data(d), "1,2,a,sick,5"), {}, ("west.csv", "expected 4", "got 5", "line 62")),
    "a title above the names": (lambda d: data(d).write_text("Export of 2024\n" + text(rows(2))), {}, ("west.csv", "lines above")),
    "a row cut off": (lambda d: append(data(d), "1,2"), {}, ("west.csv", "expected 4", "got 2", "line 62")),
    "a spreadsheet": (lambda d: data(d).rename(d / "west.xlsx"), {}, ("west.xlsx", "CSV")),
    "a spreadsheet called CSV": (
        lambda d: data(d).write_bytes(b"PK\x03\x04\x14\0\6\0\x08\0\0\0!\0" * 90),
        {},
        ("west.csv", "not a CSV", "spreadsheet"),
    ),
    "an archive": (lambda d: data(d).rename(d / "west.csv.gz"), {}, ("west.csv.gz", "unpack")),
    "a picture called CSV": (lambda d: Image.new("L", (9, 9)).save(data(d), "png"), {}, ("west.csv",)),
    "Parquet that is CSV": (lambda d: data(d).rename(d / "west.parquet"), {}, ("west.parquet", "not a table")),
    "UTF-16": (with_bytes("utf-16"), {}, ("west.csv", "UTF-8")),
    "Latin-1 head": (with_bytes("latin-1"), {}, ("west.csv", "UTF-8")),
    "Windows cells": (
        lambda d: data(d).write_bytes(data(d).read_text().replace(",a,", ",ä,").encode("cp1252")),
        {},
        ("west.csv", "read as Windows-1252"),
    ),
    "DOS cells": (
        lambda d: data(d).write_bytes(data(d).read_text().replace(",a,", ",Köln,").encode("cp850")),
        {},
        ("west.csv", "save it as UTF-8"),
    ),
    "other units": (
        everywhere(1, lambda i, cell, s: f"{cell} {'g' if s == 'west' else 'mg'}" if i else cell),
        {},
        ("'dose'", "mg at north, south", "g at west", "--drop dose"),
    ),
    "a file twice": (lambda d: shutil.copy(data(d), d / "west.tsv"), {}, ("west", "two tables")),
    "a folder among tables": (lambda d: (d / "old" / "more").mkdir(parents=True), {}, ("old", "both tables", "sub-folders")),
    "the wrong level": (
        lambda d: [(d / "all").mkdir(), *(data(d, s).rename(d / "all" / f"{s}.csv") for s in ("north", "south", "west"))],
        {},
        ("all", "3", "--data", "place"),
    ),
    "splits instead of sites": (
        lambda d: [data(d).unlink(), data(d, "north").rename(d / "train.csv"), data(d, "south").rename(d / "Test.csv")],
        {},
        ("train", "Test", "splits of one data set", "SITE/train"),
    ),
    "no such folder": (lambda d: d.rename(d.with_name("e")), {}, ("/d", "no such")),
    "an empty folder": (lambda d: [data(d, s).unlink() for s in ("north", "south", "west")], {}, ("/d", "no clients")),
    # labels
    "a label typo": (lambda d: None, {"label": "lable"}, ("'lable'", "'label'")),
    "a label in capitals at one site": (
        lambda d: change(data(d), 3, lambda i, v: v if i else "Label"),
        {"label": "label"},
        ("west.csv", "'Label'"),
    ),
    "labels spelled differently": (
        lambda d: change(data(d), 3, lambda i, v: v.title() if i else v),
        {},
        ("'Sick' at west", "--merge-labels"),
    ),
    "labels as codes": (lambda d: change(data(d), 3, lambda i, v: str(i % 2) if i else v), {}, ("numbers at west", "--label-map")),
    "measurements as labels": (lambda d: None, {"label": "dose"}, ("'dose'", "classes")),
    "no labels at a site": (lambda d: change(data(d), 3, lambda i, v: "" if i else v), {}, ("west", "without a label")),
    "a label missing": (lambda d: change(data(d), 3, lambda i, v: "" if i == 4 else v), {}, ("west", "without a label", "1")),
    "one class at a site": (lambda d: change(data(d), 3, lambda i, v: "sick" if i else v), {}, ("west", "same label")),
    "one class everywhere": (everywhere(3, lambda i, v, s: "sick" if i else v), {}, ("'sick'", "two classes")),
    "a class seen once": (lambda d: change(data(d), 3, lambda i, v: "sik" if i == 4 else v), {}, ("west", "sik")),
    "no label column at a site": (
        lambda d: change(data(d), 3, lambda i, v: v if i else "note"),
        {"label": "label"},
        ("west", "'label'", "--unlabelled"),
    ),
    # columns
    "case numbers": (everywhere(0, lambda i, v, s: str(4000 + 7 * i) if i else "Aufnahme"), {}, ("'Aufnahme' (identifiers)", "--drop")),
    "codes with a 0 ahead": (everywhere(0, lambda i, v, s: f"0{i * 37 % 61 + 100}" if i else "Ort"), {}, ("'Ort' (identifiers)", "--drop")),
    "two numbers in a cell": (everywhere(0, lambda i, v, s: f"{90 + i}/{i % 7 + 60}" if i else "RR"), {}, ("'RR' (two", "two columns")),
    "numbers with the other decimal mark": (
        everywhere(0, lambda i, v, s: f'"{i / 7:.2f}"'.replace(".", "," if i < 30 else ".") if i else "CRP"),
        {},
        ("'CRP' (numbers as text, or with another decimal mark", "--drop"),
    ),
    "words in several spellings": (everywhere(2, lambda i, v, s: v.upper() if i % 3 == 1 else v), {}, ("'A', 'a'", "write them alike")),
    "a column missing at a site": (lambda d: change(data(d), 1, lambda i, v: v if i else "weight"), {}, ("west", "'dose'", "--drop")),
    "a column name typo": (lambda d: change(data(d), 1, lambda i, v: v if i else "Dosee"), {}, ("west", "'Dosee'", "rename")),
    "two columns of one name": (lambda d: change(data(d), 1, lambda i, v: v if i else "age"), {}, ("west.csv", "'age'", "rename")),
    "words in a column of numbers": (
        lambda d: change(data(d), 1, lambda i, v: "high" if i == 9 else v),
        {},
        ("'dose'", "west", "'high'", "empty"),
    ),
    "units in a column of numbers": (lambda d: change(data(d), 1, lambda i, v: f"{v} mg" if i else v), {}, ("'dose'", "west")),
    "a number too large": (lambda d: change(data(d), 1, lambda i, v: "1e300" if i == 9 else v), {}, ("west.csv", "'dose'")),
    "an identifier": (everywhere(2, lambda i, v, s: f"P{i}{s}" if i else "patient"), {}, ("'patient'", "--drop")),
    "free text": (everywhere(2, lambda i, v, s: f"seen {i} {s}" * 2 if i else "remark"), {}, ("'remark'", "--drop")),
    "row numbers": (everywhere(2, lambda i, v, s: str(i - 1) if i else ""), {}, ("'Unnamed: 2'", "left out")),
    "the site as a column": (everywhere(2, lambda i, v, s: s if i else "clinic"), {}, ("'clinic'", "--drop")),
    "dates in words": (everywhere(2, lambda i, v, s: f"{i % 28 + 1}.3.2024" if i else "visit"), {}, ("'visit'", "dates")),
    "a wrong client column": (lambda d: [data(d, s).unlink() for s in ("north", "south")], {"client": "wrd"}, ("'wrd'", "'ward'")),
    "client and label the same": (lambda d: [data(d, s).unlink() for s in ("north", "south")], {"client": "label"}, ("'label'", "both")),
    "a typo in --drop": (lambda d: None, {"cleaning": Cleaning(drop=("doze",))}, ("'doze'", "'dose'")),
    "a typo in --split": (lambda d: None, {"rule": SplitRule(time="day")}, ("'day'", "age")),
    "text to split by time": (lambda d: None, {"rule": SplitRule(time="ward")}, ("'ward'", "--date ward")),
    "too few groups": (lambda d: None, {"rule": SplitRule(group="ward")}, ("'ward'", "2 different values", "3")),
}

IMAGES: dict[str, Mistake] = {
    "NIfTI": (lambda d: [p.rename(p.with_suffix(".nii")) for p in sorted((d / "west").rglob("*.png"))], {}, ("'west'", ".nii", "PNG")),
    "PNG as DICOM": (lambda d: [p.rename(p.with_suffix(".dcm")) for p in sorted((d / "west").rglob("*.png"))], {}, ("none of", ".dcm")),
    "an image cut off": (lambda d: (d / "west" / "sick" / "1.png").write_bytes(b"\x89PNG\r\n"), {}, ("west", "unreadable", "1.png")),
    "images without classes": (
        lambda d: [p.rename(d / "west" / f"{p.parent.name}{p.name}") for p in sorted((d / "west").rglob("*.png"))],
        {},
        ("'west'",),
    ),
    "a class folder that is empty": (
        lambda d: shutil.rmtree(d / "west" / "sick") or (d / "west" / "sick").mkdir(),
        {},
        ("west", "same label"),
    ),
    "one level too high": (
        lambda d: [(d / s).rename(d / "all" / s) for s in ("north", "south", "west") if (d / "all").mkdir(exist_ok=True) is None],
        {},
        ("'all'", "two clients", "folder that holds"),
    ),
    "a table beside the folders": (lambda d: (d / "labels.csv").write_text("x,y\n1,2\n"), {}, ("labels.csv", "both tables")),
    "class folders in capitals": (lambda d: (d / "west" / "sick").rename(d / "west" / "SICK"), {}, ("'SICK' at west", "--merge-labels")),
    "stray images": (lambda d: shutil.copy(d / "west" / "sick" / "1.png", d / "west" / "new.png"), {}, ("'west'", "new.png", "outside")),
    "an empty site": (lambda d: shutil.rmtree(d / "west") or (d / "west").mkdir(), {}, ("'west'", "nothing")),
    "a time for images": (lambda d: None, {"rule": SplitRule(time="day")}, ("images", "--split time")),
    "an expression that fits no name": (lambda d: None, {"rule": SplitRule(group="p(\\d)_")}, (".png", "--group", "rename")),
}


def told(folder: Path, options: dict[str, Any], words: tuple[str, ...]) -> None:
    try:
        report = check_folder(folder, **options)
        lines = [*report.errors, *report.notes]
    except EmdcflError as error:
        lines = [str(error)]
    assert any(all(word in line for word in words) for line in lines), lines
    assert len(lines) <= 4, lines
    assert all("\n" not in line and "Traceback" not in line for line in lines)


@pytest.mark.parametrize("mistake", TABLES)
def test_mistakes_with_tables_are_named(tables: Path, mistake: str) -> None:
    make, options, words = TABLES[mistake]
    make(tables)
    told(tables, options, words)


@pytest.mark.parametrize("mistake", IMAGES)
def test_mistakes_with_images_are_named(images: Path, mistake: str) -> None:
    make, options, words = IMAGES[mistake]
    make(images)
    told(images, options, words)
