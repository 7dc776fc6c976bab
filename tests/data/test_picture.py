from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data import standins

from emdcfl.core.errors import DataError
from emdcfl.data.own import from_arrays
from emdcfl.data.picture import grid
from emdcfl.data.scenarios import build


def test_rows_per_group_and_a_small_file(tmp_path: Path) -> None:
    two, four = (grid(build("rotated-digits", groups=groups), tmp_path / f"{groups}.png") for groups in (2, 4))
    assert four.stat().st_size < 100_000
    with Image.open(two) as a, Image.open(four) as b:
        assert b.height > a.height + 100
        assert a.width == b.width


def test_backdoor_variant_has_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMDCFL_CACHE", str(tmp_path / "cache"))
    standins.mnist(tmp_path)
    scenario = build("backdoor-mnist", data_root=str(tmp_path), scale="smoke")
    with Image.open(grid(scenario, tmp_path / "a.png")) as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert ((pixels == (149, 52, 235)).all(axis=1)).any()


def test_tables_have_no_picture_and_other_formats_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    scenario = from_arrays([(rng.normal(size=(60, 3)), rng.integers(0, 2, 60)) for _ in range(2)])
    with pytest.raises(DataError, match="no picture"):
        grid(scenario, tmp_path / "a.png")
    with pytest.raises(DataError, match=r"expected a picture called \.png to write"):
        grid(build("rotated-digits"), tmp_path / "a.xyz")
