"""What a hospital brings: labels and columns that are not as they should be are named, and repaired where asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from emdcfl.core.errors import ConfigError, DataError
from emdcfl.data import scenarios
from emdcfl.data.own import check_folder, from_arrays, load_folder, load_site, read_inputs
from emdcfl.data.own.checking.check import check_options
from emdcfl.data.own.checking.fix import propose
from emdcfl.data.own.cleaning import Cleaning
from emdcfl.data.own.formats.readers import read_file
from emdcfl.data.own.tables import CellRules

WORDS = ["benign", "malignant"]


def write(path: Path, labels: list[str], n: int = 40, seed: int = 0, **columns: Callable[[int], Any]) -> Path:
    """Write a table of two numbers, further columns (a function of the row) and a label."""
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(["size", "age", *columns, "label"])]
    for i in range(n):
        cells = [round(rng.normal(), 3), round(rng.normal(50, 9), 1), *(f(i) for f in columns.values()), labels[i % len(labels)]]
        lines.append(",".join(map(str, cells)))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def about(notes: tuple[str, ...], word: str) -> list[str]:
    return [note for note in notes if word in note]


def test_spellings_of_a_label_are_named_and_merged(tmp_path: Path) -> None:
    for site, labels in {"a": WORDS, "b": ["BENIGN ", "malignant"], "c": WORDS}.items():
        write(tmp_path / f"{site}.csv", labels)
    (line,) = about(check_folder(tmp_path).notes, "spelled")
    assert "'BENIGN' at b" in line and "'benign' at a, c" in line and "--merge-labels" in line
    assert about(load_folder(tmp_path).notes, "spelled") == [line]
    merged = scenarios.build("folder", path=str(tmp_path), merge_labels=True)
    assert merged.classes == ("benign", "malignant") and not about(merged.notes, "spelled")
    site, _ = load_site(
        write(tmp_path / "new" / "d.csv", ["Benign", "MALIGNANT"]),
        encoding=merged.encoding,
        classes=merged.classes,
        cleaning=Cleaning(merge_labels=True),
    )
    assert set(site.train.y.tolist()) == {0, 1}


def test_class_folders_are_merged_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site, kinds in {"a": ["cat", "dog"], "b": ["Cat", "dog"]}.items():
        for kind in kinds:
            (tmp_path / site / kind).mkdir(parents=True)
            for i in range(10):
                Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8)).save(tmp_path / site / kind / f"{i}.png")
    (line,) = about(check_folder(tmp_path).notes, "spelled")
    assert "'Cat' at b" in line and "'cat' at a" in line
    assert load_folder(tmp_path, cleaning=Cleaning(merge_labels=True)).classes == ("cat", "dog")


def test_numbers_beside_words_are_named_and_mapped(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", WORDS)
    write(tmp_path / "b.csv", ["0", "1"])
    (line,) = about(check_folder(tmp_path).notes, "numbers at b (0, 1) and words at a")
    assert "--label-map" in line
    mapped = load_folder(tmp_path, cleaning=Cleaning.of(label_map="0=benign, 1=malignant"))
    assert mapped.classes == ("benign", "malignant") and not about(mapped.notes, "numbers at")
    for wrong in ("0", "0=", "=benign"):
        with pytest.raises(ConfigError, match="OLD=NEW"):
            Cleaning.of(label_map=wrong)


def test_labels_that_no_other_site_has_are_named_and_mapped(tmp_path: Path) -> None:
    for site, labels in {"a": ["hi", "lo"], "b": ["high", "LOW"], "c": ["lo", "hi"]}.items():
        write(tmp_path / f"{site}.csv", labels)
    (line,) = about(check_folder(tmp_path).notes, "--label-map")
    assert "b (LOW, high)" in line and "a (" not in line and "c (" not in line
    mapped = load_folder(tmp_path, cleaning=Cleaning.of(label_map="high=hi,LOW=lo"))
    assert mapped.classes == ("hi", "lo") and not about(mapped.notes, "share no label")
    _, reasons, _ = propose(lambda tried: check_options(tmp_path, tried), {})
    assert "b (LOW, high)" in reasons["label_map"] and "merge_labels" not in reasons
    write(tmp_path / "b.csv", ["lo", "higher"])
    assert not about(check_folder(tmp_path).notes, "--label-map")  # a class that one site has is no doubt where it shares others


def test_numbers_to_predict_in_other_units_at_a_site_are_named(tmp_path: Path) -> None:
    for seed, site in enumerate("abc"):
        unit = 0.001 if site == "b" else 1
        write(tmp_path / f"{site}.csv", [f"{(20 + i) * unit:g}" for i in range(40)], seed=seed)
    asked = Cleaning.of(task="regression")
    (line,) = about(check_folder(tmp_path, cleaning=asked).notes, "to predict")
    assert "('label') at b" in line and "b 0.02 to 0.059; a 20 to 59" in line and "--drop" not in line
    assert about(load_folder(tmp_path, cleaning=asked).notes, "to predict") == [line]
    rng = np.random.default_rng(0)
    sites = {site: (rng.normal(size=(40, 2)), rng.normal(size=40) + (9 if site == "b" else 0)) for site in "abc"}
    (line,) = about(from_arrays(sites, task="regression").notes, "to predict")
    assert " at b" in line


def test_columns_in_other_units_than_in_training_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for seed, site in enumerate("ab"):
        write(tmp_path / f"{site}.csv", WORDS, seed=seed, dose=lambda i: 200 + 9 * i)
    trained = load_folder(tmp_path)
    about_run = {"encoding": trained.encoding, "classes": trained.classes}
    grams = write(tmp_path / "new" / "grams.csv", WORDS, dose=lambda i: (200 + 9 * i) / 1000)
    (line,) = about(load_site(grams, **about_run)[1], "training")
    assert "'dose' (mean 0.376, in training 3" in line and "age" not in line
    read_inputs([grams], encoding=trained.encoding)
    assert "'dose' (mean 0.376" in caplog.text
    caplog.clear()
    other = write(tmp_path / "new" / "higher.csv", WORDS, seed=5, dose=lambda i: 400 + 20 * i)  # another site, not other units
    assert not about(load_site(other, **about_run)[1], "training")
    read_inputs([other], encoding=trained.encoding)
    assert "training" not in caplog.text


def test_names_of_sites_in_several_spellings_are_named(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.csv", WORDS, site=lambda i: ["Oslo", "oslo ", "Rome", "Nice"][i // 2 % 4], n=160)
    (line,) = about(check_folder(rows, client="site").notes, "names of sites")
    assert "'Oslo', 'oslo'" in line and "Rome" not in line


def test_letters_that_mean_different_things_stay_apart_and_arrays_are_named(tmp_path: Path) -> None:
    for site in "ab":
        write(tmp_path / f"{site}.csv", ["a", "b", "1.5"])
    assert not about(load_folder(tmp_path).notes, "spelled")
    x = np.random.default_rng(0).normal(size=(40, 3))
    scenario = from_arrays({"a": (x, np.array(["no", "yes"] * 20)), "b": (x, np.array(["No", "yes"] * 20))})
    (line,) = about(scenario.notes, "spelled")
    assert "'No' at b" in line and "--merge" not in line


@pytest.mark.parametrize("gap", ["N/A", "NA", "-", "?", "nan", "", " ", "n.a.", "None", "–"])
def test_marks_of_missing_numbers_are_gaps(tmp_path: Path, gap: str) -> None:
    blank: Callable[[int], Any]
    for site, blank in {"a": lambda i: gap, "b": lambda i: i}.items():
        write(tmp_path / f"{site}.csv", WORDS, n=300, dose=lambda i: gap if i % 9 == 0 else i / 8, blank=blank)
    scenario = load_folder(tmp_path)
    dose, other = scenario.encoding["columns"][2:]
    assert (dose["name"], dose["gaps"], other["name"], other["gaps"]) == ("dose", True, "blank", True)
    rows = np.concatenate([split.x for site in scenario.sites for split in (site.train, site.val, site.tests["test"])])
    assert rows[:, 3].sum() == 2 * len(range(0, 300, 9)) and rows[:, 5].sum() == 300


def test_words_stay_words(tmp_path: Path) -> None:
    for site in "ab":
        write(tmp_path / f"{site}.csv", ["-", "+"], rhesus=lambda i: "-+"[i % 2], smokes=lambda i: ["none", "much"][i % 2])
    scenario = load_folder(tmp_path)
    assert scenario.classes == ("+", "-")
    assert [column["words"] for column in scenario.encoding["columns"][2:]] == [["+", "-"], ["much", "none"]]


def test_columns_that_are_no_features_are_named_and_dropped(tmp_path: Path) -> None:
    for number, site in enumerate("ab"):
        rows = write(
            tmp_path / f"{site}.csv",
            WORDS,
            patient_id=lambda i, n=number: 7919 * (i + 50 * n) % 9973,
            visit=lambda i: f"2024-01-{i % 28 + 1:02d}",
            seen=lambda i: f"{i % 28 + 1}.3.2024",
            unit=lambda i: "mg",
            scanner=lambda i, n=number: f"type {n}",
            ward=lambda i: i % 3,
        ).read_text()
        numbered = [f"{i - 1 if i else ''},{line}" for i, line in enumerate(rows.splitlines())]
        (tmp_path / f"{site}.csv").write_text("\n".join(numbered))
    (line,) = about(check_folder(tmp_path).notes, "no features")
    for text in ("'patient_id' (identifiers)", "'visit' (dates)", "'seen' (dates)", "'unit' (one value)"):
        assert text in line
    assert "--drop patient_id,visit,seen,unit,scanner, or read dates with --date seen" in line and "ward" not in line
    assert about(load_folder(tmp_path).notes, "no features") == [line]
    (index,) = about(load_folder(tmp_path).notes, "numbers the rows")
    assert "'Unnamed: 0'" in index and "left out" in index
    assert load_folder(tmp_path, cleaning=Cleaning(only=("Unnamed: 0",))).sites[0].train.x.shape[1] == 1
    dropped = scenarios.build("folder", path=str(tmp_path), drop="patient_id,visit,seen,unit,scanner")
    chosen = scenarios.build("folder", path=str(tmp_path), only=["ward", "age", "size"])
    for scenario in (dropped, chosen):
        assert [column["name"] for column in scenario.encoding["columns"]] == ["size", "age", "ward"]
        assert not about(scenario.notes, "no features")
    with pytest.raises(DataError, match=r"--drop patientid: .* did you mean 'patient_id'"):
        load_folder(tmp_path, cleaning=Cleaning(drop=("patientid",)))
    with pytest.raises(DataError, match="'label' is the label"):
        load_folder(tmp_path, cleaning=Cleaning(drop=("label",)))
    with pytest.raises(ConfigError, match="got both"):
        Cleaning.of(drop="a", only="b")


def test_measurements_are_not_suspected(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 400, 200).tolist()
    for site in "ab":
        write(tmp_path / f"{site}.csv", WORDS, cells=lambda i: counts[i], sex=lambda i: "fm"[counts[i] % 2], device=lambda i: "xyz"[i % 3])
    assert not about(check_folder(tmp_path).notes, "no features")


def test_a_column_at_some_sites_only_names_the_remedy(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", WORDS, dose=lambda i: i % 7)
    write(tmp_path / "b.csv", WORDS, Dose=lambda i: i % 7)
    with pytest.raises(DataError, match=r"client 'b' .* lacks the column 'dose' .* rename its column 'Dose'.* --drop dose,Dose"):
        load_folder(tmp_path)
    assert load_folder(tmp_path, cleaning=Cleaning(drop=("dose", "Dose"))).sites[0].train.x.shape[1] == 2


@pytest.mark.parametrize(("mark", "point"), [(";", ","), (";", "."), ("\t", ","), ("|", "."), (",", ".")])
def test_delimiter_and_decimal_point_are_detected(tmp_path: Path, mark: str, point: str) -> None:
    for site in "ab":
        path = write(tmp_path / f"{site}.csv", WORDS, note=lambda i: '"x"', dose=lambda i: "-" if i == 3 else i / 8)
        path.write_text(path.read_text().replace(",", mark).replace(".", point).replace('"x"', '"a, b; c"'))
    scenario = load_folder(tmp_path)
    kinds = {column["name"]: "words" in column for column in scenario.encoding["columns"]}
    assert kinds == {"size": False, "age": False, "dose": False, "note": True}
    assert abs(next(column["mean"] for column in scenario.encoding["columns"] if column["name"] == "age") - 50) < 5


@pytest.mark.parametrize(
    ("lines", "numbers"),
    [
        ("price;size;clock\n1.020;0,5;12.30\n990;1,75;8.15\n1.234,5;2,25;9.45", {"price": [1020, 990, 1234.5], "size": [0.5, 1.75, 2.25]}),
        ('price,size\n"1,020",0.5\n990,1.75\n"1,234.5",2.25', {"price": [1020, 990, 1234.5], "size": [0.5, 1.75, 2.25]}),
        ('price,size\n"1020,5","0,5"\n"990","1,75"', {"price": [1020.5, 990], "size": [0.5, 1.75]}),
        ("size, cm;n;town\n1,5;1;Ålesund\n2,5;2;Ås", {"size, cm": [1.5, 2.5], "n": [1, 2], "town": ["Ålesund", "Ås"]}),
        ('size;n;note\n1,5;1;"a\nb"\n2,5;2;5 x', {"size": [1.5, 2.5], "n": [1, 2], "note": ["a\nb", "5 x"]}),
        ("size\tn\n1,234\t1\n2,345\t2", {"size": [1.234, 2.345], "n": [1, 2]}),
    ],
)
def test_numbers_are_read_as_their_writers_meant_them(tmp_path: Path, lines: str, numbers: dict[str, list[Any]]) -> None:
    path = tmp_path / "a.csv"
    path.write_text(lines + "\n", encoding="utf-8")
    table = read_file(path).to_pydict()
    assert {name: table.pop(name) for name in numbers} == numbers
    assert table in ({}, {"clock": ["12.30", "8.15", "9.45"]})


def test_text_among_decimal_commas_does_not_make_measurements_identifiers(tmp_path: Path) -> None:
    for site in "ab":
        path = write(tmp_path / f"{site}.csv", WORDS, dose=lambda i: "k.A" if i == 3 else i / 8)
        path.write_text(path.read_text().replace(",", ";").replace("k.A", "k_A").replace(".", ","))
    (line,) = about(check_folder(tmp_path).notes, "'dose'")
    assert "1 cells of text ('k_A')" in line and "identifiers" not in line


def test_identifiers_are_seen_at_sites_of_any_size(tmp_path: Path) -> None:
    for site, n in {"a": 12, "b": 40, "c": 250}.items():
        write(tmp_path / f"{site}.csv", WORDS, n, pid=lambda i: f"P{i}", case_no=lambda i: 7 * i % 1009, ward=lambda i: f"w{i % 3}")
    (line,) = about(check_folder(tmp_path).notes, "may be no features")
    assert "'pid' (identifiers or free text)" in line and "'case_no' (identifiers)" in line and "ward" not in line


def test_a_column_that_a_site_left_empty_is_named(tmp_path: Path) -> None:
    for site in "abc":
        write(tmp_path / f"{site}.csv", WORDS, dose=lambda i, s=site: "" if s == "b" else i / 8, pulse=lambda i: "" if i % 2 else i)
    (line,) = about(check_folder(tmp_path).notes, "without any value")
    assert "'dose' at b;" in line and "--drop dose" in line and "pulse" not in line


def test_dates_that_one_site_writes_otherwise_are_dates(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", WORDS, seen=lambda i: f"2024-03-{i % 28 + 1:02d}")
    write(tmp_path / "b.csv", WORDS, seen=lambda i: f"{i % 28 + 1}.3.2024")
    notes = check_folder(tmp_path).notes
    assert about(notes, "'seen' (dates)") and "--date seen" in about(notes, "holds text in")[0]
    scenario = load_folder(tmp_path, cleaning=Cleaning(cells=CellRules(dates=(("seen", "auto"),))))
    assert scenario.sites[0].train.x.shape[1] == 3 and not about(scenario.notes, "holds text in")


def test_an_index_that_pandas_wrote_into_parquet_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", WORDS)
    table = read_file(write(tmp_path / "b.csv", WORDS))
    (tmp_path / "b.csv").unlink()
    pq.write_table(table.append_column("__index_level_0__", pa.array(range(7, 7 + len(table)))), tmp_path / "b.parquet")
    scenario = load_folder(tmp_path)
    assert about(scenario.notes, "'__index_level_0__'") and scenario.sites[1].train.x.shape[1] == 2


def test_no_file_vanishes_without_a_word(tmp_path: Path) -> None:
    for site in "ab":
        write(tmp_path / "tables" / f"{site}.csv", WORDS)
    (tmp_path / "tables" / "read me.txt").touch()
    assert about(load_folder(tmp_path / "tables").notes, "not read: read me.txt")
    (tmp_path / "tables" / "c.ods").touch()
    with pytest.raises(DataError, match=r"c\.ods cannot be read as it is: save the table as CSV"):
        load_folder(tmp_path / "tables")
    with pytest.raises(DataError, match="save the table as CSV"):
        load_folder(tmp_path / "tables" / "c.ods")
    rng = np.random.default_rng(0)
    for site in "ab":
        for kind in ("cat", "dog"):
            (tmp_path / "images" / site / kind).mkdir(parents=True)
            for i in range(10):
                Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8)).save(tmp_path / "images" / site / kind / f"{i}.png")
    (tmp_path / "images" / "a" / "cat" / "scan.nii").touch()
    (tmp_path / "images" / "a" / "stray.png").touch()
    (line,) = about(load_folder(tmp_path / "images").notes, "left out")
    assert "scan.nii" in line and "stray.png" in line and "client 'a'" in line


def test_a_label_typo_names_the_nearest_column_once(tmp_path: Path) -> None:
    for site in "abc":
        write(tmp_path / f"{site}.csv", WORDS, **{f"reading {k}": lambda i: i % 5 for k in range(30)})
    (error,) = check_folder(tmp_path, label="lable").errors
    assert "did you mean 'label'?" in error and "reading" not in error and error.endswith("the same at b, c")
    with pytest.raises(DataError, match=r"client 'a'.*did you mean 'label'\?$"):
        load_folder(tmp_path, label="lable")


def test_dates_become_days_and_new_files_are_read_the_same_way(tmp_path: Path) -> None:
    forms: dict[str, Callable[[int], str]] = {
        "a": lambda i: f"{i % 28 + 1}.3.2024",
        "b": lambda i: f"2024-03-{i % 28 + 1:02d}",
        "c": lambda i: "" if i == 5 else f"3/{i % 28 + 1}/2024",
    }
    for site, form in forms.items():
        write(tmp_path / "d" / f"{site}.csv", WORDS, seen=form)
    scenario = scenarios.build("folder", path=str(tmp_path / "d"), date="seen")
    column = next(column for column in scenario.encoding["columns"] if column["name"] == "seen")
    assert (column["date"], column["gaps"]) == ("auto", True)
    assert abs(column["mean"] - 19797) < 5  # mid-March 2024, in days since 1970
    assert not about(scenario.notes, "no features")
    x, _ = read_inputs([tmp_path / "d" / "a.csv", tmp_path / "d" / "b.csv"], encoding=scenario.encoding)
    assert torch.equal(x[:40, 2], x[40:, 2])  # the same days, written differently
    by_time = scenarios.build("folder", path=str(tmp_path / "d"), date="seen", split="time:seen")
    assert [len(site.train) for site in by_time.sites] == [24, 24, 23]


def test_years_of_two_digits_are_not_read_into_another_century(tmp_path: Path) -> None:
    def days(years: range, form: str = "") -> float:
        for site in ("a", "b"):
            write(tmp_path / f"{site}.csv", ["x", "y"], seen=lambda i: f"17.11.{years[i % len(years)]:02d}")
        found = load_folder(tmp_path, cleaning=Cleaning.of(date=f"seen{form}")).encoding["columns"]
        return float(next(column["mean"] for column in found if column["name"] == "seen"))

    assert days(range(20, 24)) == pytest.approx((np.datetime64("2022-05-19") - np.datetime64("1970-01-01")).astype(int), abs=200)
    with pytest.raises(
        DataError, match="'seen': its years have two digits, .* read as 2040 to 2068; write four digits, or --date COLUMN:%d"
    ):
        days(range(40, 69))
    assert days(range(40, 69), ":%d.%m.%y") > 25_000  # somebody said so
    with pytest.raises(DataError, match="read as 1969 to 2068; write four digits$"):
        days(range(45, 95), ":%d.%m.%y")


def test_dates_that_may_be_read_in_two_ways_or_none_are_not_guessed(tmp_path: Path) -> None:
    for site in "ab":
        write(tmp_path / f"{site}.csv", WORDS, seen=lambda i: f"{i % 9 + 1}/3/2024", typo=lambda i: "soon" if i == 6 else "2024-03-01")
    with pytest.raises(DataError, match=r"a\.csv: column 'seen'.* %d/%m/%Y or %m/%d/%Y; say which.* or write YYYY-MM-DD"):
        load_folder(tmp_path, cleaning=Cleaning.of(date="seen"))
    days = load_folder(tmp_path, cleaning=Cleaning.of(date="seen:%d/%m/%Y")).encoding["columns"][2]
    assert abs(days["mean"] - 19787) < 2
    with pytest.raises(DataError, match=r"a\.csv: column 'typo'.*%Y-%m-%d.* in row 7;") as caught:
        load_folder(tmp_path, cleaning=Cleaning.of(date="typo"))
    assert "soon" not in str(caught.value)
    with pytest.raises(DataError, match=r"--date sen: .* did you mean 'seen'"):
        load_folder(tmp_path, cleaning=Cleaning.of(date="sen"))


@pytest.mark.parametrize(("form", "second"), [("{}/3/2024", "2024-03-02"), ("3/{}/2024", "2024-02-03")])
def test_few_rows_are_dated_as_all_sites_date_theirs(tmp_path: Path, form: str, second: str) -> None:
    for site in "ab":
        write(tmp_path / "d" / f"{site}.csv", WORDS, seen=lambda i: form.format(i % 28 + 1))
    file = write(tmp_path / "new.csv", WORDS, n=20, seen=lambda i: f"{i % 9 + 1}/3/2024")
    scenario = load_folder(tmp_path / "d", cleaning=Cleaning.of(date="seen"))
    x, _ = read_inputs([write(tmp_path / "few.csv", WORDS, n=2, seen=lambda i: f"{i + 1}/3/2024")], encoding=scenario.encoding)
    seen = scenario.encoding["columns"][2]
    days = (np.datetime64(second) - np.datetime64("1970-01-01")).astype(int)
    assert float(x[1, 2]) * seen["std"] + seen["mean"] == pytest.approx(days, abs=0.01)
    load_site(file, encoding=scenario.encoding, classes=scenario.classes, cleaning=Cleaning.of(date="seen"))


@pytest.mark.parametrize(("mark", "blame"), [("-999", "'dose' holds -999"), ("refused", "'refused'")])
def test_marks_of_missing_values_are_suspected_and_read_where_asked(tmp_path: Path, mark: str, blame: str) -> None:
    for site in "ab":
        write(tmp_path / f"{site}.csv", WORDS, n=60, dose=lambda i: mark if i % 20 == 3 else i / 8)
    (line,) = about(check_folder(tmp_path).notes, "--missing")
    assert blame in line
    scenario = scenarios.build("folder", path=str(tmp_path), missing=mark)
    dose = scenario.encoding["columns"][2]
    assert dose["gaps"] and 3 < dose["mean"] < 4.5 and not about(scenario.notes, "--missing")
    x, _ = read_inputs([tmp_path / "a.csv"], encoding=scenario.encoding)
    assert x[:, 3].sum() == 3


def test_rows_with_gaps_are_left_out_where_asked_of_new_files_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for site in "ab":
        write(tmp_path / f"{site}.csv", WORDS, dose=lambda i: "" if i % 10 == 3 else i / 8, ward=lambda i: "" if i == 0 else "xy"[i % 2])
    scenario = load_folder(tmp_path, cleaning=Cleaning.of(gaps="drop-rows"))
    assert sum(len(split) for split in (scenario.sites[0].train, scenario.sites[0].val, scenario.sites[0].tests["test"])) == 35
    assert about(scenario.notes, "missing values left out") and not scenario.encoding["columns"][2]["gaps"]
    about_run: dict[str, Any] = {"encoding": scenario.encoding, "classes": scenario.classes}
    site, notes = load_site(tmp_path / "b.csv", cleaning=Cleaning.of(gaps="drop-rows"), **about_run)
    assert torch.equal(site.train.x, scenario.sites[1].train.x) and about(notes, "missing values left out")
    with caplog.at_level("WARNING", "emdcfl"):
        x, rows = read_inputs([tmp_path / "a.csv"], encoding=scenario.encoding)
    assert len(x) == len(rows) == 35 and not any(row.endswith((":1", ":4")) for row in rows) and ": 5" in caplog.text
    with pytest.raises(ConfigError, match="--gaps mean or drop-rows"):
        Cleaning.of(gaps="median")


def test_columns_that_copy_the_label_are_suspected(tmp_path: Path) -> None:
    for number, site in enumerate("ab"):
        write(
            tmp_path / f"{site}.csv",
            WORDS,
            code=lambda i: i % 2 + 7,
            score=lambda i, n=number: (i % 2) * 10 + i / 100 + n,
            icd=lambda i: ["D24", "D23", "C50", "C51"][2 * (i % 2) + (i % 3 == 0)],
            ward=lambda i: "xy"[i % 3 == 0],
        )
    (line,) = about(check_folder(tmp_path).notes, "no features")
    for name in ("code", "score", "icd"):
        assert f"'{name}' (copies the label)" in line
    assert "ward" not in line


def test_copies_across_splits_and_sites_are_counted(tmp_path: Path) -> None:
    for number, site in enumerate("abc"):
        path = write(tmp_path / f"{site}.csv", WORDS, seed=number)
        head, *rows = path.read_text().splitlines()
        path.write_text("\n".join([head, *rows, *(rows[:20] if site == "a" else []), ""]))
    extra = (tmp_path / "a.csv").read_text().splitlines()[1:6]
    (tmp_path / "c.csv").write_text((tmp_path / "c.csv").read_text() + "\n".join(extra) + "\n")
    report = check_folder(tmp_path)
    assert report.repeats is not None and report.repeats.across == {("a", "c"): 5} and report.repeats.held["a"] > 2
    assert about(report.notes, "samples at two sites: 5 of site c at site a") and about(report.notes, "equal a training sample")
    assert about(load_folder(tmp_path).notes, "samples at two sites")


def test_rows_that_coincide_by_chance_are_no_copies(tmp_path: Path) -> None:
    rng = random.Random(0)
    for site in "abcd":
        rows = [f"{rng.gauss(60, 10):.0f},{rng.gauss(1, 0.3):.2f},{rng.choice('xy')},{i % 2}" for i in range(400)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["age,dose,ward,label", *rows]))
    report = check_folder(tmp_path)
    assert report.repeats is not None and max(report.repeats.across.values()) > 8 and not about(report.notes, "samples at two sites")


def test_a_few_rows_that_coincide_at_two_of_many_tiny_sites_are_no_copies(tmp_path: Path) -> None:
    rng = random.Random(0)
    for site in range(40):
        rows = [f"{rng.gauss(6, 0.3):.2f},{rng.randint(-5, 5)},{i % 2}" for i in range(30)]
        rows[:15] = rows[:15] if site else [f"{i},{i},{i % 2}" for i in range(15)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["grade,age,label", *rows]))
    report = check_folder(tmp_path)
    assert report.repeats is not None and max(report.repeats.across.values()) >= 3 and not about(report.notes, "samples at two sites")
    (tmp_path / "7.csv").write_text((tmp_path / "0.csv").read_text())
    assert about(check_folder(tmp_path).notes, "samples at two sites: 30 of site 7 at site 0;")
