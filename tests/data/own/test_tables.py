from __future__ import annotations

import csv
from datetime import date, time, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from emdcfl.core.errors import DataError
from emdcfl.data.own import check_folder, load_folder, load_site, read_inputs
from emdcfl.data.own.cleaning import Cleaning
from emdcfl.data.own.frames import encode, from_tables, site_from_table
from emdcfl.data.own.splitting import SplitRule
from emdcfl.data.own.tables import Numeric, TableEncoding, number_values, pool, summarise
from emdcfl.data.scenarios.folder import folder as read_scenario


def rows(n: int = 60, shift: float = 0.0, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {"age": round(rng.normal(50 + shift, 10), 3), "sex": rng.choice(["f", "m"]), "ward": rng.choice(["a", "b", "c"]), "label": i % 3}
        for i in range(n)
    ]


def write(path: Path, table: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, shift in enumerate((0, 0, 40)):
        write(tmp_path / "sites" / f"site{i}.csv", rows(shift=shift, seed=i, n=60 + 20 * i))
    return tmp_path / "sites"


def test_one_file_per_client(folder: Path) -> None:
    scenario = load_folder(folder)
    assert [s.name for s in scenario.sites] == ["site0", "site1", "site2"]
    assert [(len(s.train), len(s.val), len(s.tests["test"])) for s in scenario.sites] == [(36, 12, 12), (48, 16, 16), (60, 20, 20)]
    assert scenario.classes == ("0", "1", "2")
    assert scenario.groups is None
    assert scenario.k is None
    assert scenario.model.as_dict() == {"name": "mlp", "options": {"classes": 3, "features": 6}}
    assert all(np.bincount(s.val.y, minlength=3).min() >= 3 for s in scenario.sites)


def test_a_new_site_has_classes_if_the_run_has(tmp_path: Path) -> None:
    """Numbers that might be measurements at a site so small are classes of the run."""
    for name, n in (("a", 400), ("b", 400), ("new", 100)):
        write(tmp_path / name / "all.csv", [{**row, "label": i % 25} for i, row in enumerate(rows(n))])
    new = (tmp_path / "new").rename(tmp_path.parent / f"{tmp_path.name}-new")
    scenario = load_folder(tmp_path)
    site, _ = load_site(new, encoding=scenario.encoding, classes=scenario.classes)
    assert sum(map(len, site.splits.values())) == 100


def test_runs_inside_the_folder_are_no_sites(folder: Path) -> None:
    for run in (folder / "mine", folder / "runs" / "one", folder / "runs" / "two"):
        (run / "state").mkdir(parents=True)
        (run / "config.toml").touch()
    assert [s.name for s in load_folder(folder).sites] == ["site0", "site1", "site2"]
    (folder / "runs" / "three").mkdir()
    with pytest.raises(DataError, match=r"both tables \(site0\.csv, …\) and sub-folders \(runs, …\)"):
        load_folder(folder)


def test_statistics_are_pooled_so_shifts_survive(folder: Path) -> None:
    scenario = load_folder(folder)
    age = torch.cat([s.train.x[:, 0] for s in scenario.sites]).double()
    assert abs(float(age.mean())) < 1e-5
    assert abs(float(age.std(unbiased=False)) - 1) < 1e-5
    assert float(scenario.sites[2].train.x[:, 0].mean()) - float(scenario.sites[0].train.x[:, 0].mean()) > 1


def test_pooled_moments_equal_those_of_all_rows_together() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(1e9 + 1000 * i, 3 + i, 50 + i) for i in range(4)]
    encoding = pool([summarise(pa.table({"x": part}), ["x"], []) for part in parts], "y")
    together = np.concatenate(parts)
    column = encoding.columns[0]
    assert column.mean == pytest.approx(together.mean(), rel=1e-15)
    assert column.std == pytest.approx(together.std(), rel=1e-9)


def test_one_table_with_a_client_column(tmp_path: Path) -> None:
    table = [{**row, "hospital": f"h{i % 4}"} for i, row in enumerate(rows(200))]
    path = write(tmp_path / "all.csv", table)
    scenario = load_folder(path, client="hospital")
    assert [s.name for s in scenario.sites] == ["h0", "h1", "h2", "h3"]
    assert sum(len(s.train) + len(s.val) + len(s.tests["test"]) for s in scenario.sites) == 200
    assert "hospital" not in [c["name"] for c in scenario.encoding["columns"]]
    with pytest.raises(DataError, match="--client COLUMN"):
        load_folder(path)


def test_given_splits_are_kept(tmp_path: Path) -> None:
    for client in ("a", "b"):
        write(tmp_path / "d" / client / "train.csv", rows(50))
        write(tmp_path / "d" / client / "test.csv", rows(30, seed=1))
    scenario = load_folder(tmp_path / "d")
    assert [(len(s.train) + len(s.val), len(s.tests["test"])) for s in scenario.sites] == [(50, 30)] * 2


def test_gaps_and_categories(tmp_path: Path) -> None:
    for client in ("a", "b"):
        table: list[dict[str, Any]] = rows(60)
        table[0]["age"] = ""
        table[1]["sex"] = ""
        write(tmp_path / "d" / f"{client}.csv", table)
    scenario = load_folder(tmp_path / "d")
    columns = scenario.encoding["columns"]
    assert [c["name"] for c in columns] == ["age", "sex", "ward"]
    assert columns[0]["gaps"]
    assert columns[1]["words"] == ["f", "m"]
    every = torch.cat([s.x for site in scenario.sites for s in (site.train, site.val, site.tests["test"])])
    gap = every[every[:, 1] == 1]
    assert gap.shape == (2, 7)
    assert torch.all(gap[:, 0] == 0)
    assert sorted(every[:, 2:4].sum(dim=1).unique().tolist()) == [0, 1]


def test_parquet_tsv_and_dates(tmp_path: Path) -> None:
    days = np.datetime64("2024-01-01") + np.arange(60)
    for client in ("a", "b"):
        (tmp_path / "d").mkdir(exist_ok=True)
        pq.write_table(
            pa.table({"when": pa.array(days), "ok": pa.array([True, False] * 30), "y": ["p", "q"] * 30}),
            tmp_path / "d" / f"{client}.parquet",
        )
    scenario = load_folder(tmp_path / "d")
    assert scenario.classes == ("p", "q")
    assert scenario.sites[0].train.x.shape[1] == 2
    assert float(scenario.sites[0].train.x.abs().max()) < 3


def test_times_to_the_microsecond_are_days(tmp_path: Path) -> None:
    for site in ("a", "b"):
        write(tmp_path / f"{site}.csv", [{**row, "at": f"2024-01-{1 + i % 28:02d} 12:00:00.{i:06d}"} for i, row in enumerate(rows())])
    at = next(c for c in load_folder(tmp_path).encoding["columns"] if c["name"] == "at")
    assert 19723.5 < at["mean"] < 19751 and 5 < at["std"] < 10


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        *((kind, 3.0) for kind in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"), pa.duration("s"), pa.duration("ns"))),
        *((kind, 1.0) for kind in (pa.date32(), pa.date64())),
    ],
)
def test_times_are_seconds_and_dates_are_days_however_they_are_stored(kind: pa.DataType, expected: float) -> None:
    value = date(1970, 1, 2) if pa.types.is_date(kind) else time(0, 0, 3) if pa.types.is_time(kind) else timedelta(seconds=3)
    assert number_values(pa.chunked_array([pa.array([value, None], kind)])).tolist()[0] == expected


@pytest.mark.parametrize("missing", [None, "-9"])
def test_integers_of_more_digits_than_a_float_holds_are_read(tmp_path: Path, missing: str | None) -> None:
    for site in ("a", "b"):
        write(tmp_path / f"{site}.csv", [{**row, "visit": 20240101123456789 + 1000 * (i % 7)} for i, row in enumerate(rows())])
    visit = next(c for c in load_folder(tmp_path, cleaning=Cleaning.of(missing=missing)).encoding["columns"] if c["name"] == "visit")
    assert visit["mean"] == pytest.approx(20240101123459789, abs=1000)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["007", "7"], ["007", "7"]),
        (["1.1", "1.10"], ["1.1", "1.10"]),
        (["12345678901234567890", "12345678901234567891"], ["12345678901234567890", "12345678901234567891"]),
        (["10.0", "20.0", ""], ["10", "20"]),
        (["1", "02", "?"], ["02", "1"]),
    ],
)
def test_sites_are_called_as_they_are_written(tmp_path: Path, names: list[str], expected: list[str]) -> None:
    path = write(tmp_path / "all.csv", [{**row, "site": names[i % len(names)]} for i, row in enumerate(rows(90))])
    assert [site.name for site in load_folder(path, client="site").sites] == expected


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_blank_is_no_label(tmp_path: Path, suffix: str) -> None:
    for site in "ab":
        frame = pd.DataFrame([{**row, "label": ["no", "yes", " ", ""][i % 4]} for i, row in enumerate(rows())])
        getattr(frame, f"to_{suffix}")(tmp_path / f"{site}.{suffix}", index=False)
    scenario = load_folder(tmp_path)
    assert scenario.classes == ("no", "yes")
    assert any("rows without a label left out: 30" in note for note in scenario.notes)


def test_text_is_text_in_whichever_of_arrows_types(tmp_path: Path) -> None:
    ward, dose, label = ([f"{word}{unit}" for word in words] * 20 for words, unit in (("pqr", ""), ("123", " mg"), ("xyx", "")))
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        columns = {name: pa.array(words, kind) for name, words in (("ward", ward), ("dose", dose), ("label", label))}
        pq.write_table(pa.table(columns), tmp_path / f"{kind}.parquet")
    sites = load_folder(tmp_path).sites
    assert sites[0].train.x.shape == (36, 4)
    assert all(len({tuple(row) for row in site.train.x.tolist()}) == 3 for site in sites)


def test_what_is_no_number_in_parquet_is_a_gap(tmp_path: Path) -> None:
    labels = [float("nan") if i == 4 else float(i % 2) for i in range(60)]
    who = [float("nan") if i < 4 else float(i // 5) for i in range(60)]
    for site in ("a", "b"):
        pq.write_table(pa.table({"x": np.arange(60.0), "who": who, "label": labels}), tmp_path / f"{site}.parquet")
    scenario = load_folder(tmp_path, rule=SplitRule(group="who"))
    assert scenario.classes == ("0", "1")
    assert any("rows without a label left out: 1" in note for note in scenario.notes)
    assert any("rows without who, by which they are split, left out: 4" in note for note in scenario.notes)


def test_small_sites_can_be_left_out(tmp_path: Path) -> None:
    table = [{**row, "site": site} for site, n in (("a", 60), ("b", 60), ("c", 9), ("d e", 2)) for row in rows(n=n)]
    path = write(tmp_path / "all.csv", table)
    with pytest.raises(DataError, match=r"c \(9\), d e \(2\).*--leave-out 'c,d e'"):
        load_folder(path, client="site")
    about = {"client": "site", "leave_out": "c,d e"}
    scenario = read_scenario(path=str(path), **about)
    assert [site.name for site in scenario.sites] == ["a", "b"]
    assert any("take no part (--leave-out): c, d e" in note for note in scenario.notes)
    assert [site.name for site in from_tables(pd.DataFrame(table), about).sites] == ["a", "b"]
    with pytest.raises(DataError, match="no such site: did you mean 'c'"):
        read_scenario(path=str(path), client="site", leave_out=["C"])


@pytest.mark.parametrize("text", ["", "age,label\n1,2,3", "other\n1"])
def test_files_of_a_site_that_is_left_out_are_not_read(folder: Path, text: str) -> None:
    (folder / "site-9.csv").write_text(text)
    assert any("site-9.csv" in error for error in check_folder(folder).errors)
    assert "site-9" not in [site.name for site in load_folder(folder, leave_out=("site-9",)).sites]
    (folder / "site-8.csv").write_text("")
    (error,) = check_folder(folder, leave_out=("site-9",)).errors
    assert "site-8.csv" in error
    with pytest.raises(DataError, match="leaves no site"):
        load_folder(folder, leave_out=tuple(path.stem for path in folder.iterdir()))


def test_encoding_survives_json(folder: Path) -> None:
    scenario = load_folder(folder)
    again = TableEncoding.from_dict(scenario.encoding)
    assert again.as_dict() == scenario.encoding
    assert again.width == 6


def test_new_site_and_prediction(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scenario = load_folder(folder)
    new = rows(80, seed=9)
    new[0]["ward"] = "unheard of"
    new[1]["label"] = 7
    path = write(tmp_path / "new.csv", new)
    site, notes = load_site(path, encoding=scenario.encoding, classes=scenario.classes)
    assert site.name == "new"
    assert len(site.train) + len(site.val) + len(site.tests["test"]) == 79
    assert any("new.csv): train samples left out because" in note and "(7): 1" in note for note in notes)
    assert any("ward 'unheard of'" in note for note in notes)
    x, names = read_inputs([path], encoding=scenario.encoding)
    (said,) = caplog.messages
    assert str(path) in said and "ward 'unheard of'" in said
    assert x.shape == (80, 6)
    assert float(x[0, 3:].sum()) == 0
    assert names[0] == f"{path}:1"
    unlabelled = write(tmp_path / "u.csv", [{"sex": "f", "age": 50, "ward": "a"}])
    assert read_inputs([unlabelled], encoding=scenario.encoding)[0].shape == (1, 6)
    lacking = write(tmp_path / "lacking.csv", [{"sex": "f"}])
    with pytest.raises(DataError, match=r"lacking\.csv lacks the columns age, ward; add .* empty cells"):
        read_inputs([lacking], encoding=scenario.encoding)
    capitals = write(tmp_path / "capitals.csv", [{"sex": "f", "AGE": 50, "Ward": "a"}])
    with pytest.raises(DataError, match=r"lacks the columns age, ward; rename AGE, Ward"):
        read_inputs([capitals], encoding=scenario.encoding)
    genes = TableEncoding("y", tuple(Numeric(f"g{i}", 0.0, 1.0, gaps=False) for i in range(40)))
    with pytest.raises(DataError, match=r"; rename G0, .*G11$"):  # the first ones: comparing all names with all may take minutes
        genes.encode(pa.table({f"G{i}": [1.0] for i in range(40)}), "genes.csv")
    with pytest.raises(DataError, match="no such file"):
        read_inputs([tmp_path / "none.csv"], encoding=scenario.encoding)


@pytest.mark.parametrize(
    ("words", "few"),
    [(["true", "false", "maybe"], ["true", "false"]), (["007", "012", "x1"], ["007", "012"]), (["none", "much"], ["none"])],
)
def test_words_that_look_like_something_else_are_words_where_others_have_them(tmp_path: Path, words: list[str], few: list[str]) -> None:
    def table(wards: list[str]) -> list[dict[str, Any]]:
        return [{**row, "ward": wards[i % 7 % len(wards)]} for i, row in enumerate(rows())]

    for site in ("a", "b"):
        write(tmp_path / "sites" / f"{site}.csv", table(words))
    fewer = write(tmp_path / "sites" / "c.csv", table(few))
    scenario = load_folder(tmp_path / "sites")
    ward = next(c for c in scenario.encoding["columns"] if c["name"] == "ward")
    assert ward["words"] == sorted(words)
    assert torch.all(scenario.sites[2].train.x[:, 3:].sum(1) == 1)
    assert not any("'ward'" in note for note in scenario.notes)
    assert torch.all(read_inputs([fewer], encoding=scenario.encoding)[0][:, 3:].sum(1) == 1)
    site, _ = load_site(fewer, encoding=scenario.encoding, classes=scenario.classes)
    assert torch.all(site.train.x[:, 3:].sum(1) == 1)


def test_a_new_site_with_few_labels_has_those_of_the_run(folder: Path, tmp_path: Path) -> None:
    scenario = load_folder(folder)
    new = write(tmp_path / "new.csv", [{**row, "label": ["true", "false"][i % 2]} for i, row in enumerate(rows())])
    site, _ = load_site(new, encoding=scenario.encoding, classes=("false", "maybe", "true"))
    assert set(site.train.y.tolist()) == {0, 2}
    site, _ = load_site(new, encoding=scenario.encoding, classes=("False", "True"))  # truth values in training, too
    assert set(site.train.y.tolist()) == {0, 1}


def test_frame_is_read_as_the_file_it_came_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = [{"age": -999 if i % 5 == 0 else i, "flag": ["true", "false", "maybe"][i % 7 % 3], "label": "xy"[i % 2]} for i in range(60)]
    for site in ("a", "b"):
        write(tmp_path / "sites" / f"{site}.csv", table)
    encoding = load_folder(tmp_path / "sites", cleaning=Cleaning.of(missing=["-999"])).encoding
    new = write(tmp_path / "new.csv", [row for row in table if row["flag"] != "maybe"])
    frame = pd.read_csv(new)
    assert frame["flag"].dtype == bool and -999 in frame["age"].tolist()
    assert torch.equal(encode(frame, encoding), read_inputs([new], encoding=encoding)[0])
    assert not caplog.messages
    encode(frame.assign(flag="never"), encoding)
    assert "flag 'never'" in caplog.text
    classes, marks = ["x", "y"], {"missing": ["-999"]}
    of_frame, _ = site_from_table("c", frame, marks, encoding=encoding, classes=classes)
    of_file, _ = load_site(new, encoding=encoding, classes=classes, name="c", cleaning=Cleaning.of(**marks))
    assert torch.equal(of_frame.train.x, of_file.train.x)


def test_missing_label_column(folder: Path) -> None:
    write(folder / "site1.csv", [{"age": 1, "sex": "f", "ward": "a"}] * 30)
    with pytest.raises(DataError, match=r"client 'site1': .*site1\.csv: .*--label COLUMN"):
        load_folder(folder)


def test_measurements_and_identifiers_are_not_classes(tmp_path: Path) -> None:
    for client in ("a", "b"):
        write(tmp_path / "d" / f"{client}.csv", [{"x": i, "y": i + 0.5} for i in range(60)])
        write(tmp_path / "e" / f"{client}.csv", [{"x": f"{client}{i}" * 2, "y": i % 2} for i in range(300)])
    with pytest.raises(DataError, match=r"client 'a' .* label column 'y' has 60 different numbers .* --task regression"):
        load_folder(tmp_path / "d")
    with pytest.raises(DataError, match=r"column 'x' has .* different texts.* looks like identifiers"):
        load_folder(tmp_path / "e")


def test_warnings_name_file_and_client(folder: Path) -> None:
    table: list[dict[str, Any]] = rows(60)
    table[0]["label"] = 9
    table[1]["label"] = ""
    write(folder / "site0.csv", table)
    scenario = load_folder(folder)
    assert any("client 'site0'" in n and "site0.csv" in n and "only one sample of class 9" in n for n in scenario.notes)
    assert any("client 'site0'" in n and "rows without a label left out: 1" in n for n in scenario.notes)
    assert any("site0, site1, site2" in n and "12 to 20 validation samples" in n and "may not be compared" in n for n in scenario.notes)


def test_labels_unseen_in_training_are_left_out(tmp_path: Path) -> None:
    for client in ("a", "b"):
        write(tmp_path / "d" / client / "train.csv", rows(50))
        write(tmp_path / "d" / client / "test.csv", [*rows(30), {**rows(1)[0], "label": 5}])
    scenario = load_folder(tmp_path / "d")
    assert len(scenario.sites[0].tests["test"]) == 30
    assert any("clients a, b: test samples left out" in n and "(5): 1" in n for n in scenario.notes)


def test_a_site_without_training_rows_is_told_what_to_do(tmp_path: Path) -> None:
    write(tmp_path / "d" / "a" / "all.csv", rows(60))
    for split, n in {"val": 20, "test": 30}.items():
        write(tmp_path / "d" / "b" / f"{split}.csv", rows(n))
    with pytest.raises(DataError, match=r"client 'b' .* no training samples, only 20 of val and 30 of test; .*--leave-out"):
        load_folder(tmp_path / "d")


def test_sites_with_too_few_rows_are_named_and_can_be_left_out(tmp_path: Path) -> None:
    write(tmp_path / "d" / "a.csv", rows(60))
    write(tmp_path / "d" / "b.csv", rows(5))
    with pytest.raises(DataError, match=r"client 'b' \(.*b\.csv\) has 5 samples; at least 10 .*emdcfl place RUN FILE --unlabelled"):
        load_folder(tmp_path / "d")
    write(tmp_path / "d" / "c.csv", rows(9))
    with pytest.raises(DataError, match=r"2 clients have fewer than 10 samples: b \(5\), c \(9\)"):
        load_folder(tmp_path / "d")
    with pytest.raises(DataError, match=r"60 clients have fewer than 10 samples: .* and 55 more") as caught:
        load_folder(write(tmp_path / "one.csv", [{"who": f"row {i}", **row} for i, row in enumerate(rows(60))]), client="who")
    assert len(str(caught.value)) < 400


def test_check_reports_sizes_and_balance(folder: Path) -> None:
    report = check_folder(folder)
    assert report.ok
    first = report.as_dict()["clients"][0]
    assert first["sizes"] == {"train": 36, "val": 12, "test": 12}
    assert first["labels"] == first["spelled"] == {"0": 20, "1": 20, "2": 20}
    assert report.kind == "table"
    assert report.model["name"] == "mlp"


def test_check_names_every_site_that_options_do_not_fit(folder: Path) -> None:
    for options in ({"rule": SplitRule(time="when")}, {"cleaning": Cleaning.of(date="ward")}):
        errors = check_folder(folder, **options).errors
        assert len(errors) == 1 and "site0.csv" in errors[0] and errors[0].endswith("the same at site1, site2")
