"""Excel workbooks, DICOM images, text in Windows-1252 and numbers with units are read like CSV, PNG, UTF-8 and plain numbers."""

from __future__ import annotations

import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pytest
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from emdcfl.core import optional
from emdcfl.core.errors import ConfigError, DataError
from emdcfl.data.own import check_folder, load_folder, read_inputs
from emdcfl.data.own.cleaning import Cleaning
from emdcfl.data.own.formats import spreadsheet
from emdcfl.data.own.formats.dicom import read_pixels
from emdcfl.data.own.formats.readers import read_file, read_units

ROWS: list[list[Any]] = [
    [
        20 + i % 50,
        round(i / 8, 3),
        "ab"[i % 3 == 0],
        datetime(2024, 3, i % 28 + 1),
        None if i == 4 else "N/A" if i == 5 else i,
        ["no", "yes"][i % 2],
    ]
    for i in range(40)
]
HEAD = ["age", "dose", "ward", "visit", "pulse", "label"]


def workbook(path: Path, rows: list[list[Any]], head: list[Any] | None = None) -> Path:
    book = openpyxl.Workbook()
    for row in [head or HEAD, *rows]:
        book.active.append(row)
    book.create_sheet("empty")
    book.save(path)
    return path


def test_a_workbook_is_the_table_that_a_csv_would_be(tmp_path: Path) -> None:
    workbook(tmp_path / "a.xlsx", ROWS)
    lines = [",".join("" if cell is None else str(cell.date() if isinstance(cell, datetime) else cell) for cell in row) for row in ROWS]
    (tmp_path / "b.csv").write_text("\n".join([",".join(HEAD), *lines]) + "\n")
    scenario = load_folder(tmp_path)
    assert [column["name"] for column in scenario.encoding["columns"]] == ["age", "dose", "visit", "pulse", "ward"]
    x, _ = read_inputs([tmp_path / "a.xlsx", tmp_path / "b.csv"], encoding=scenario.encoding)
    assert np.array_equal(x[:40], x[40:]) and x[:, scenario.encoding["columns"].index(scenario.encoding["columns"][3]) + 1].sum() == 4


@pytest.mark.parametrize("title", [["Export of 3/2024"], []])
def test_titles_above_the_names_are_passed_over_and_no_column_is_lost(tmp_path: Path, title: list[str]) -> None:
    book = openpyxl.Workbook()
    for row in [
        title,
        [],
        ["age", None, "label"],
        *([i, i / 2, "ab"[i % 2], "late" if i == 3 else None] for i in range(12)),
    ]:
        book.active.append(row)
    book.save(tmp_path / "t.xlsx")
    table = read_file(tmp_path / "t.xlsx")
    assert table.column_names == ["age", "Unnamed: 1", "label", "Unnamed: 3"] and table.num_rows == 12


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda p: p.write_bytes(b"no workbook"), r"west\.xlsx.*damaged, or no workbook"),
        (lambda p: _two_sheets(p), r"west\.xlsx.*2 sheets with a first row \(Sheet, more\)"),
        (
            lambda p: workbook(p, [[*row[:4], f"=A{i}*2", row[5]] for i, row in enumerate(ROWS, 2)]),
            r"west\.xlsx: the formula in cell E2 has no",
        ),
        (lambda p: _bomb(p), r"west\.xlsx: unpacks to .* MB"),
        (lambda p: openpyxl.Workbook().save(p), r"west\.xlsx.*no sheet with data"),
    ],
)
def test_workbooks_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, told: str) -> None:
    monkeypatch.setattr(spreadsheet, "UNPACKED", 1 << 20)
    make(tmp_path / "west.xlsx")
    with pytest.raises(DataError, match=told):
        read_file(tmp_path / "west.xlsx")


def _two_sheets(path: Path) -> None:
    book = openpyxl.load_workbook(workbook(path, ROWS))
    book.create_sheet("more").append(["x"])
    book.save(path)


def _bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/worksheets/sheet1.xml", bytes(1 << 21))


def dicom(path: Path, pixels: np.ndarray[Any, Any], *, syntax: Any = ExplicitVRLittleEndian, **more: Any) -> Path:
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID, meta.TransferSyntaxUID = (
        SecondaryCaptureImageStorage,
        generate_uid(),
        syntax,
    )
    found = FileDataset(str(path), {}, file_meta=meta, preamble=bytes(128))
    found.SOPClassUID, found.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    found.Rows, found.Columns = pixels.shape[-2:] if pixels.ndim == 2 or pixels.shape[-1] != 3 else pixels.shape[:2]
    found.SamplesPerPixel, found.PhotometricInterpretation = (3, "RGB") if pixels.shape[-1] == 3 else (1, "MONOCHROME2")
    if found.SamplesPerPixel == 3:
        found.PlanarConfiguration = 0
    found.BitsAllocated = 8 * pixels.itemsize
    found.BitsStored, found.PixelRepresentation = found.BitsAllocated, int(pixels.dtype.kind == "i")
    found.HighBit = found.BitsStored - 1
    for name, value in more.items():
        setattr(found, name, value)
    found.PixelData = pixels.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save_as(path, enforce_file_format=True)
    return path


def test_dicom_is_read_in_grey_values_that_mean_the_same_at_every_site(tmp_path: Path) -> None:
    ramp = np.arange(64, dtype=np.uint16).reshape(8, 8) * 64
    stored = {"BitsStored": 12, "HighBit": 11}
    plain = np.asarray(read_pixels(dicom(tmp_path / "a.dcm", ramp, **stored)))
    assert plain[0, 0] == 0 and plain[-1, -1] == round(255 * 63 * 64 / 4095)
    dark = np.asarray(read_pixels(dicom(tmp_path / "b.dcm", ramp // 2, **stored)))
    assert dark.max() < plain.max() / 1.9  # no stretching of single images
    assert np.array_equal(
        np.asarray(read_pixels(dicom(tmp_path / "c.dcm", ramp, PhotometricInterpretation="MONOCHROME1", **stored))), 255 - plain
    )
    hounsfield = dicom(
        tmp_path / "d.dcm", ramp, RescaleSlope=1, RescaleIntercept=-1024, WindowCenter=["40", "600"], WindowWidth=["400", "1500"]
    )
    windowed = np.asarray(read_pixels(hounsfield))
    assert windowed[0, 0] == 0 and windowed[-1, -1] == 255 and abs(int(windowed.ravel()[(1024 + 40) // 64]) - 102) < 2
    rgb = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    assert np.array_equal(np.asarray(read_pixels(dicom(tmp_path / "e.dcm", rgb))), rgb)


def test_folders_of_dicom_are_sites_and_odd_files_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site in "ab":
        for kind in ("sick", "well"):
            for i in range(10):
                dicom(tmp_path / site / kind / f"{i}.dcm", rng.integers(0, 4095, (8, 8), np.uint16), BitsStored=12, HighBit=11)
    dicom(tmp_path / "a" / "sick" / "film.dcm", rng.integers(0, 99, (3, 8, 8), np.uint8), NumberOfFrames=3)
    dicom(tmp_path / "a" / "sick" / "packed.dcm", rng.integers(0, 99, (8, 8), np.uint8), syntax=DeflatedExplicitVRLittleEndian)
    (tmp_path / "a" / "sick" / "cut.dcm").write_bytes((tmp_path / "a" / "sick" / "1.dcm").read_bytes()[:400])
    report = check_folder(tmp_path)
    assert report.ok and report.shape == (1, 8, 8) and report.clients[1].images == {"8×8 grey": 20}
    (line,) = (note for note in report.notes if "unreadable" in note)
    assert "3 (" in line and "film.dcm: it has 3 frames" in line and "deflated" in line and "cut.dcm" in line


@pytest.mark.parametrize(("suffix", "package", "extra"), [(".xlsx", "openpyxl", "excel"), (".dcm", "pydicom", "dicom")])
def test_without_the_package_one_line_names_file_and_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, package: str, extra: str
) -> None:
    for site in "ab":
        if suffix == ".dcm":
            for kind in "xy":
                dicom(tmp_path / site / kind / "1.dcm", np.zeros((8, 8), np.uint8))
        else:
            workbook(tmp_path / f"{site}.xlsx", ROWS)

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(optional.importlib, "import_module", missing)
    with pytest.raises(
        (DataError, ConfigError), match=rf"expected {package} to read .*{suffix}.*pip install 'emdcfl\[{extra}\]', or "
    ) as caught:
        load_folder(tmp_path)
    assert "\n" not in str(caught.value)


CITIES = ("Köln", "Nîmes", "Málaga")


def clinic(path: Path, encoding: str, dose: str = "{} mg", n: int = 60) -> Path:
    rows = [f"{20 + i % 50};{CITIES[i % 3]};{dose.format(f'{i / 8:.2f}'.replace('.', ','))};{'ja' if i % 2 else 'nein'}" for i in range(n)]
    path.write_bytes("\n".join(["Wärme in kWh/m³a;Stadt;Dosis;label", *rows]).encode(encoding))
    return path


def test_windows_text_gives_the_categories_of_utf8(tmp_path: Path) -> None:
    for name, encoding in {"a": "utf-8", "b": "cp1252", "c": "utf-8-sig"}.items():
        clinic(tmp_path / f"{name}.csv", encoding)
    scenario = load_folder(tmp_path)
    (city,) = [column for column in scenario.encoding["columns"] if "words" in column]
    assert city["words"] == sorted(CITIES)
    assert [note for note in scenario.notes if "b.csv" in note and "Windows-1252" in note]
    x, _ = read_inputs([tmp_path / "a.csv", tmp_path / "b.csv"], encoding=scenario.encoding)
    assert np.array_equal(x[:60], x[60:])


def test_numbers_with_a_unit_are_numbers_and_another_unit_is_refused(tmp_path: Path) -> None:
    for name, dose in {"a": "{} mg", "b": "{}mg", "c": "{} MG"}.items():
        clinic(tmp_path / f"{name}.csv", "utf-8", dose)
    scenario = load_folder(tmp_path)
    dosis = scenario.encoding["columns"][1]
    assert (dosis["name"], dosis["unit"]) == ("Dosis", "mg") and 3.5 < dosis["mean"] < 3.9
    assert any("'Dosis' (mg" in note for note in scenario.notes)
    clinic(tmp_path / "new.csv", "utf-8", "{} g")
    with pytest.raises(DataError, match=r"'Dosis' of .*new\.csv is in g, in training in mg; convert it"):
        read_inputs([tmp_path / "new.csv"], encoding=scenario.encoding)
    clinic(tmp_path / "c.csv", "utf-8", "{}")
    (tmp_path / "new.csv").unlink()
    plain = load_folder(tmp_path)
    assert plain.encoding == scenario.encoding and any("none at c" in doubt for doubt in plain.doubts)


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (["€ 1,200", "€ 950", "€ 12,300"], [1200.0, 950.0, 12300.0]),
        (["1.200 €", "950 €", "12.300 €"], [1200.0, 950.0, 12300.0]),
        (["1.200,50 €", "950,00 €", "n/a"], [1200.5, 950.0, None]),
        (["37,2 °C", "36.9 °C", "38,1 °C"], ["37,2", "36.9", "38,1"]),
        (["85%", "7%", "12"], [85.0, 7.0, 12.0]),
        (["1,234 mg", "0.5 mg", "2 mg"], [1234.0, 0.5, 2.0]),
        (["12a", "13a", "14a"], ["12a", "13a", "14a"]),
        (["007 B", "008 B", "012 B"], ["007 B", "008 B", "012 B"]),
        (["5 mg", "2 g", "3 ml"], ["5 mg", "2 g", "3 ml"]),
        (["5 mg"] * 9 + ["<1 mg"], ["5"] * 9 + ["<1 mg"]),
    ],
)
def test_what_is_a_number_with_a_unit(tmp_path: Path, cells: list[str], found: list[float | str | None]) -> None:
    (tmp_path / "t.csv").write_text("\n".join(["x\tlabel", *(f"{cell}\ta" for cell in cells)]), encoding="utf-8")
    assert read_units(read_file(tmp_path / "t.csv"))[0].column("x").to_pylist() == found


def test_classes_keep_their_units_and_numbers_to_predict_lose_them(tmp_path: Path) -> None:
    for name in "ab":
        rows = [f"{i};{i % 3 * 5 + 5} mg;{i * 7} €" for i in range(40)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x;dose;price", *rows]), encoding="utf-8")
    assert load_folder(tmp_path, label="dose").classes == ("10 mg", "15 mg", "5 mg")
    prices = load_folder(tmp_path, label="price", cleaning=Cleaning.of(task="regression"))
    assert prices.target is not None and 100 < prices.target.mean < 170
