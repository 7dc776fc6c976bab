"""The page of ``emdcfl data check``, and the repairs that ``--fix`` writes."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from tests.data.own.test_cleaning import WORDS, write
from tests.e2e.shell import called

import emdcfl
from emdcfl.data.own import check_folder, load_folder
from emdcfl.data.own.checking.check import check_options, check_site
from emdcfl.data.own.checking.columns import ColumnProfile, Doubt, SiteColumn
from emdcfl.data.own.checking.fix import propose, write_recipe
from emdcfl.data.own.checking.page import data_page
from emdcfl.data.own.checking.profiling import profile_columns, with_units
from emdcfl.data.own.parts import Part, Raw
from emdcfl.report.page import write_data_page
from emdcfl.runs.config import load, override


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """Three sites with every trap that a column can be."""
    for number, site in enumerate(("north", "south", "west")):
        columns: dict[str, Callable[[int], Any]] = {
            "": lambda i: i,
            "patient_id": lambda i, n=number: f"P{7919 * (i + 100 * n) % 9973}",
            "visit": lambda i: f"{i % 28 + 1}.3.2024",
            "scanner": lambda i, n=number: f"S{n}",
            "dose": lambda i: -999 if i % 20 == 3 else i / 8,
            "pulse": lambda i, n=number: "refused" if n == 1 and i % 30 == 4 else 60 + i % 9,
            "code": lambda i: "xy"[i % 2],
            "ward": lambda i: "ab"[i % 3 == 0],
            "proline": lambda i, n=number: (300 + i) / (1000 if n == 2 else 1),
        }
        if site == "west":
            columns["extra"] = lambda i: i % 5
        write(tmp_path / "sites" / f"{site}.csv", ["Benign " if site == "south" else "benign", "malignant"], 90, number, **columns)
    return tmp_path / "sites"


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [(-120.912, -120.693, "-120.91 to -120.69"), (0.3004, 0.3894, "0.3 to 0.389"), (-121.0, -120.5, "-121 to -120.5"), (5.5, 5.5, "5.5")],
)
def test_ranges_have_digits_that_tell_them_apart(low: float, high: float, shown: str) -> None:
    others = {"low": (low - 0.9, low - 0.5), "same": (low, high)} if low < 0 else {"large": (900.0, 1600.0)}
    ranges = {"here": (low, high), **others}
    column = ColumnProfile("longitude", "number", {site: SiteColumn(9, 0, *both) for site, both in ranges.items()})
    assert column.range_at("here") == shown


def test_columns_have_kinds_doubts_and_ranges(traps: Path) -> None:
    report = check_folder(traps)
    doubts = {column.name: column.doubt for column in report.columns}
    assert doubts["size"] is doubts["age"] is doubts["ward"] is None
    assert [doubts[name] for name in ("Unnamed: 2", "patient_id", "visit", "scanner", "dose", "pulse", "code", "extra")] == [
        *(Doubt.ROWS, Doubt.IDS, Doubt.DATES, Doubt.PER_SITE, Doubt.CODE, Doubt.TEXT_AMONG_NUMBERS, Doubt.LABEL_COPY, Doubt.SOME_SITES)
    ]
    (line,) = (note for note in report.notes if "units" in note)
    assert doubts["proline"] == Doubt.UNITS and "'proline' at west lies apart" in line and "west 0.3 to 0.389" in line
    found = {column["name"]: column for column in report.as_dict()["columns"]}
    assert found["dose"]["sites"]["west"] == {"rows": 90, "missing": 0, "low": -999.0, "high": 11.125}
    assert found["ward"]["sites"]["west"]["words"] == ["a", "b"]
    assert "words" not in found["patient_id"]["sites"]["west"] and found["patient_id"]["sites"]["west"]["different"] == 90
    assert not found["Unnamed: 2"]["feature"]
    json.dumps(report.as_dict())


def test_what_is_said_of_all_sites_counts_every_site(tmp_path: Path) -> None:
    day = {"a": lambda i: f"2024-01-{i % 28 + 1:02}", "b": lambda i: f"{i % 28 + 1:02}.03.2024"}
    for start, site in enumerate("ab"):
        told = {"patient_id": lambda i, start=start: 7 * (i + 30 * start) % 80, "seen": day[site]}
        write(tmp_path / f"{site}.csv", WORDS, **told, due=day["a"] if site == "a" else lambda i: ("early", "late")[i % 2])
    columns = {column.name: column for column in check_folder(tmp_path).columns}
    assert columns["patient_id"].doubt == Doubt.IDS and columns["patient_id"].range_over() == "70 different"
    assert columns["seen"].doubt == Doubt.DATES and columns["seen"].range_over() == "2024-01-01 to 2024-01-28; 28 different"
    assert columns["due"].range_over() == "2024-01-01 to 2024-01-28; early, late"


def test_all_that_stops_a_run_is_told_at_once(tmp_path: Path) -> None:
    columns: dict[str, Callable[[int], Any]] = {
        "who": lambda i: f"P{7919 * i % 9973}",
        "seen": lambda i: f"{i % 28 + 1}.{i // 28 + 1}.24",
    }
    for site, more in {"a": {}, "b": {"dose": lambda i: i}, "c": {"puls": lambda i: i}}.items():
        write(tmp_path / f"{site}.csv", WORDS, n=5 if site == "c" else 250, **columns, **more)
    errors = check_folder(tmp_path).errors
    told = ("'c'.* has 5 samples", "'who' has 250", "'seen' has 250", "'a'.* lacks the column 'dose'", "'a'.* lacks the column 'puls'")
    assert len(errors) == len(told) and all(re.search(one, error) for one, error in zip(told, errors, strict=True)), errors


def test_numbered_sites_are_listed_by_number(tmp_path: Path) -> None:
    for number in (9, 10, 101):
        write(tmp_path / f"{number}.csv", WORDS, seed=number)
    report = check_folder(tmp_path)
    assert [client.name for client in report.clients] == ["10", "101", "9"]
    assert [row[0] for block in data_page(report).blocks if block.title == "Sites" for row in block.rows] == ["9", "10", "101"]


def test_terminal_and_html_say_the_same(traps: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (traps / "north.csv").rename(traps / "a <b>.csv")
    printed = " ".join(called(capfd, "data", "check", traps, "--html", tmp_path / "page.html").out.split())
    page = (tmp_path / "page.html").read_text()
    page = re.sub('<span class="option">(.*?)</span>', r"\1", page)
    blocks = data_page(check_folder(traps)).blocks
    assert [block.title for block in blocks if block.rows] == ["Sites", "Classes", "Columns", "Signature"]
    for block in blocks:
        assert block.title in page
        for sentence in block.sentences if block.kind != "sign" else ():
            assert " ".join(sentence.split()) in printed
            assert sentence.replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;") in page
    assert "a <b>" not in page and "http:" not in page and "https:" not in page and "src=" not in page


def test_repairs_make_the_folder_ready(traps: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "fix.toml"
    ended = called(capfd, "data", "check", traps, "--fix", recipe)
    assert ended.code == 0 and "with them: ready to run" in ended.out
    options = tomllib.loads(recipe.read_text())["scenario"]
    assert options["merge_labels"] and options["date"] == ["visit"] and sorted(options["missing"]) == ["-999", "refused"]
    assert sorted(options["drop"]) == ["code", "extra", "patient_id", "scanner"]
    assert check_folder(traps).errors  # the files stay as they are
    report = json.loads(called(capfd, "data", "check", recipe, "--json").out)
    assert report["ok"] and report["classes"] == ["benign", "malignant"] and len(report["repairs"]) == 3
    assert [column["name"] for column in report["columns"] if column["feature"]] == [
        "size",
        "age",
        "visit",
        "dose",
        "pulse",
        "ward",
        "proline",
    ]
    result = emdcfl.fit(recipe, rounds=1, local_epochs=1, method="fedavg", settings={"personalize.mode": "off"})
    assert list(result.clients) == ["north", "south", "west"] and result.about.classes == ("benign", "malignant")
    moved = override(load(recipe), {"scenario": "folder", "scenario.path": "elsewhere"}, "command line").scenario.options
    assert moved["path"] == "elsewhere" and moved["drop"] == options["drop"]  # emdcfl run RECIPE --data elsewhere
    assert "exists; choose another file" in called(capfd, "data", "check", traps, "--fix", recipe).err
    again, page = tmp_path / "again.toml", tmp_path / "page.html"
    ended = called(capfd, "data", "check", traps, "--fix", again, "--html", page, "--json")
    assert ended.code == 0 and json.loads(ended.out)["fix"] == str(again)
    assert again.read_text() == recipe.read_text() and page.is_file()


def test_small_sites_and_columns_that_a_site_left_empty_are_repaired(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, recipe = tmp_path / "data", tmp_path / "fix.toml"
    for seed, site in enumerate("abcde"):
        n = 4 if site in "de" else 60
        empty = site in "cd"
        write(
            data / f"{site}.csv", WORDS, n=n, seed=seed, dose=lambda i, e=empty: "" if e else i % 7, room=lambda i, n=n: i if n > 9 else ""
        )
    ended = called(capfd, "data", "check", data, "--fix", recipe)
    assert ended.code == 0 and "with them: ready to run" in ended.out
    text = recipe.read_text()
    options = tomllib.loads(text)["scenario"]
    assert options["leave_out"] == ["d", "e"] and "dose" in options["drop"] and "# no value at c," in text
    # flags add to the lists of a config
    report = json.loads(called(capfd, "data", "check", recipe, "--drop", "age", "--leave-out", "c", "--json").out)
    assert [client["name"] for client in report["clients"]] == ["a", "b"]
    left = {column["name"] for column in report["columns"] if not column["feature"]} | {"age", "dose"}
    assert not left & {column["name"] for column in report["columns"] if column["feature"]}
    (problem,) = check_folder(data).errors
    assert "d (4), e (4)" in problem and "place them later without their labels" in problem
    wrong = tmp_path / "wrong"
    for site in "abcdef":  # the column of sites may be a wrong one
        write(wrong / f"{site}.csv", WORDS, n=60 if site in "ab" else 4)
    assert "leave_out" not in propose(lambda tried: check_options(wrong, tried), {})[0]


@pytest.mark.parametrize(("again", "option"), [(12, "group"), (1, "drop")])
def test_patients_of_whom_some_come_again_stay_in_one_split(tmp_path: Path, again: int, option: str) -> None:
    for seed, site in enumerate("ab"):
        write(tmp_path / f"{site}.csv", WORDS, n=100, seed=seed, patient=lambda i: 7 * (i if i < 100 - again else i - 50))
    options = propose(lambda tried: check_options(tmp_path, tried), {})[0]
    assert options[option] == ("patient" if option == "group" else ["patient"])


def test_one_value_at_one_of_several_sites_is_no_doubt(tmp_path: Path) -> None:
    """A node's owner who drops it would have other columns than the partners."""
    for site in "ab":
        write(tmp_path / f"{site}.csv", WORDS, n=60, ward=lambda i: "north")
    (alone,) = [one for one in check_site(tmp_path / "a.csv", "a").columns if one.name == "ward"]
    assert alone.doubt is None and alone.range_at("a") == "north"
    assert [one.doubt for one in check_folder(tmp_path).columns if one.name == "ward"] == [Doubt.ONE_VALUE]


def test_facts_about_sites_are_not_taken_for_other_units(tmp_path: Path) -> None:
    """Of one number per school, one is always the largest; at one school it changed."""
    for k, site in enumerate("abcd"):
        write(tmp_path / f"{site}.csv", WORDS, n=60, seed=k, size_of_class=lambda i, k=k: 20 + 3 * k + (k == 1 and i > 30))
    assert not [note for note in check_folder(tmp_path).notes if "lies apart" in note]


@pytest.mark.parametrize("shuffled", [False, True])
def test_rows_in_the_order_of_a_time_are_a_series(tmp_path: Path, shuffled: bool) -> None:
    order = np.random.default_rng(0).permutation(60) if shuffled else np.arange(60)
    for seed, site in enumerate("ab"):
        write(tmp_path / f"{site}.csv", WORDS, n=60, seed=seed, year=lambda i: 1990 + order[i] // 3, datum=lambda i: 1990 + order[i] / 3)
    said = [note for note in check_folder(tmp_path).notes if "in the order of column" in note]
    assert [note.endswith("use --split time:datum") for note in said] == [True] * (not shuffled)
    assert not [note for note in check_options(tmp_path, {"split": "time:datum"}).notes if "in the order of" in note]


def test_a_repair_that_only_a_person_can_make_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", WORDS, n=60, born=lambda i: f"{i % 9 + 1}/3/1960", patient=lambda i: i // 2 * 31)
    write(tmp_path / "b.csv", ["0", "1"], n=60, born=lambda i: f"{i % 9 + 1}/4/1960", patient=lambda i: i // 2 * 37)
    options, reasons, report = propose(lambda tried: check_options(tmp_path, tried), {})
    text = write_recipe(str(tmp_path), options, reasons)
    assert options["group"] == "patient" and options["drop"] == ["born"] and "label_map" not in options
    assert "# label_map: labels are numbers at b (0, 1)" in text and "day or month first" in text
    assert report.ok and tomllib.loads(text)["scenario"]["group"] == "patient"


def test_a_recipe_is_one_line_per_entry_whatever_a_column_is_called() -> None:
    name = 'a"]\npath = "/etc'
    text = write_recipe("x", {"drop": [name]}, {f"drop.{name}": "two\nlines"})
    assert tomllib.loads(text)["scenario"] == {"name": "folder", "path": "x", "drop": [name]}


def test_images_are_told_by_size_and_colour(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site, size in {"a": 8, "b": 9}.items():
        for kind in ("cat", "dog"):
            (tmp_path / site / kind).mkdir(parents=True)
            for i in range(10):
                shape = (size, size) if i else (size, size, 3)
                Image.fromarray(rng.integers(0, 255, shape, np.uint8)).save(tmp_path / site / kind / f"{i}.png")
    (tmp_path / "b" / "cat" / "copy.png").write_bytes((tmp_path / "a" / "cat" / "1.png").read_bytes())
    (tmp_path / "b" / "cat" / "torn.png").write_bytes(b"torn")
    report = check_folder(tmp_path)
    assert report.clients[0].images == {"8×8 grey": 18, "8×8 RGB": 2}
    sizes = next(block.rows for block in data_page(report).blocks if block.title.startswith("Images"))
    assert sizes[0] == ("a", "8×8 grey (18), 8×8 RGB (2)")
    mixed = replace(report.clients[0], images={f"{20 + 3 * i}×90 RGB": 1 for i in range(90)} | {"8×8 grey": 2})
    sizes = next(block.rows for block in data_page(replace(report, clients=(mixed,))).blocks if block.title.startswith("Images"))
    assert sizes == (("a", "20–287×90 RGB (90 in 90 sizes), 8×8 grey (2)"),)
    assert report.repeats is not None and report.repeats.across == {("a", "b"): 1}
    blocks = {block.title: block.sentences for block in data_page(report).blocks}
    assert "Images as they are stored" in blocks and "Columns" not in blocks
    assert ["torn.png" in sentence for sentence in blocks["Left out"]] == [True]
    assert "torn.png" not in str(blocks["Look at this first"])
    wanted = check_options(tmp_path, {"size": 12, "model": "pooled_cnn"})
    assert (wanted.shape, wanted.model["name"]) == ((3, 12, 12), "pooled_cnn")


def test_many_categories_are_cut_to_the_frequent_ones_and_identifiers_are_refused(tmp_path: Path) -> None:
    for site in "ab":
        write(tmp_path / f"{site}.csv", WORDS, n=900, icd=lambda i: f"C{i % 300 if i % 3 else i % 30}")
    scenario = load_folder(tmp_path)
    words = next(column["words"] for column in scenario.encoding["columns"] if column["name"] == "icd")
    assert len(words) == 200 and {f"C{i}" for i in range(0, 30, 3)} <= set(words)
    assert any("'icd' has 210 different texts" in note for note in scenario.notes)


def test_a_wide_table_is_summarised(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site in "ab":
        rows = [[*(f"{x:.3f}" for x in rng.normal(size=400)), "xy"[i % 2]] for i in range(40)]
        head = ",".join([*(f"g{k}" for k in range(400)), "label"])
        (tmp_path / f"{site}.csv").write_text("\n".join([head, *(",".join(row) for row in rows)]))
    report = check_folder(tmp_path)
    (block,) = (block for block in data_page(report).blocks if block.title == "Columns")
    assert len(block.rows) == 200 and any("200 number" in sentence for sentence in block.sentences)
    assert not any(column.doubt for column in report.columns)
    write_data_page(report, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count("<tr>") < 230


def test_what_repeats_at_many_sites_is_cut_and_explained(tmp_path: Path) -> None:
    for number in range(25):
        write(tmp_path / f"s{number:02}.csv", WORDS, ward=lambda i: "abc"[i % 3])
    page = data_page(check_options(tmp_path, {"only": ["ward"]}))
    (said,) = (block.sentences for block in page.blocks if block.title == "Equal samples")
    assert "more with --json" in said[-2] and "chance explains" in said[-1]


def test_sites_with_few_validation_samples_share_one_line(tmp_path: Path) -> None:
    for site in "abcdef":
        write(tmp_path / f"{site}.csv", WORDS)
    assert [n.partition(":")[0] for n in check_folder(tmp_path).notes if "validation samples" in n] == ["clients a, b, c, d, e, f"]


def test_numbers_of_cases_that_tell_the_label_are_suspected_and_other_counts_are_not(tmp_path: Path) -> None:
    for site in "ab":
        write(
            tmp_path / f"{site}.csv",
            WORDS,
            90,
            case=lambda i: 14 * (i // 12) + i % 2,
            ward=lambda i: 7 * (i // 6),
            beds=lambda i: 7 * i % 105,
        )
    report = check_folder(tmp_path)
    assert {column.name: column.doubt for column in report.columns} == {
        "size": None,
        "age": None,
        "case": Doubt.CASES,
        "ward": None,
        "beds": None,
    }
    assert any("'case' (one class per value)" in note and "--group case" in note for note in report.notes)


def test_a_column_by_which_sites_were_divided_is_no_matter_of_units(tmp_path: Path) -> None:
    for number, site in enumerate("abc"):
        write(tmp_path / f"{site}.csv", WORDS, years=lambda i, n=number: 20 * n + i % 9 + 0.5)
    report = check_folder(tmp_path)
    assert {column.name: column.doubt for column in report.columns}["years"] == Doubt.RANGES
    assert any("'years' (one range per site)" in note for note in report.notes) and not any("units" in note for note in report.notes)


def test_short_codes_as_text_are_no_numbers_with_another_decimal_mark() -> None:
    """A column of a database's export, whose wards are text: 59 words are categories."""
    wards = pa.table({"ward": [f"{i % 59:03d}" for i in range(600)]})
    raw = Raw("a", "a.parquet", {"train": Part(wards, np.array(["ill", "ill", "well", "well", "well"] * 120))}, label="label")
    assert profile_columns([raw], "label")["ward"].doubt is None


def test_a_site_apart_is_found_among_30_000() -> None:
    def column(sites: int, odd: int) -> ColumnProfile:
        ranges = {f"s{i}": SiteColumn(9, 0, 0.0 + 99 * (i == odd), 1.0 + 99 * (i == odd), {f"w{i}": 9}) for i in range(sites)}
        return ColumnProfile("x", "number", ranges)

    assert [with_units(column(3, odd)).odd for odd in (0, 2, 9)] == [("s0",), ("s2",), ()]
    many = column(30_000, 5)  # minutes, were each site looked at beside each other
    assert with_units(many).odd == ("s5",)
    assert len(many.words) == 30_000
