"""Whatever people's files hold, a scenario comes out whole and finite, or a ``DataError`` of one line does."""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image

from emdcfl.core.errors import DataError
from emdcfl.data.own import load_folder
from emdcfl.data.own.formats.images import read_image
from emdcfl.data.own.formats.readers import read_file

CELLS = st.one_of(
    st.sampled_from(["", "0", "1", "nan", "inf", "-1e308", "1e308", "NULL", "true", "2020-01-01", "x", "é", '"', "a,b", "\n", "9" * 30]),
    st.integers(-9, 9).map(str),
    st.floats().map(repr),
    st.text(max_size=3),
)


@st.composite
def tables(draw: st.DrawFn) -> str:
    names = draw(st.lists(st.sampled_from(["a", "b", "c", "label", "é", " ", ""]), min_size=1, max_size=4, unique=True))
    rows = draw(st.lists(st.lists(CELLS, min_size=len(names), max_size=len(names)), max_size=14))
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(names)
    writer.writerows(rows * draw(st.sampled_from([1, 4])))
    return buffer.getvalue()


@pytest.mark.slow
@settings(max_examples=120)
@given(tables(), tables(), st.booleans())
def test_any_two_tables_make_a_whole_scenario_or_an_error(one: str, two: str, same: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("one", one), ("two", one if same else two)):
            Path(folder, f"{name}.csv").write_text(text, encoding="utf-8", newline="")
        try:
            scenario = load_folder(folder)
        except DataError as error:
            assert str(error) and "\n" not in str(error)  # noqa: PT017
            return
    width = scenario.sites[0].train.x.shape[1]
    for site in scenario.sites:
        for split in (site.train, site.val, *site.tests.values()):
            assert split.x.dtype == torch.float32 and split.x.shape == (len(split.y), width) and len(split.y) > 0
            assert bool(torch.isfinite(split.x).all())
            assert int(split.y.min()) >= 0 and int(split.y.max()) < len(scenario.classes)


@settings(max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(["L", "RGB", "RGBA", "P", "1", "I;16"]),
    st.sampled_from([1, 3]),
    st.integers(4, 32),
)
def test_any_picture_comes_out_in_the_shape_asked_for(width: int, height: int, mode: str, channels: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.png")
        Image.new(mode, (width, height)).save(path)
        pixels = read_image(path, (channels, size, size))
    assert pixels.shape == (channels, size, size) and pixels.dtype == np.uint8


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x81,label\n1,x\n", "neither UTF-8 nor Windows-1252"),
        ("a,label\nWałbrzych,x\nBonn,y\n".encode("cp1250"), "neither UTF-8 nor Windows-1252"),
    ],
)
def test_odd_tables_are_refused_in_words(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=expected):
        read_file(tmp_path / "t.csv")


def test_a_shared_table_without_rows_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,site,label\n")
    with pytest.raises(DataError, match="no row has a value in the client column"):
        load_folder(tmp_path / "t.csv", client="site", label="label")
