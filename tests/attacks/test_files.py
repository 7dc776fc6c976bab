"""Files that lead elsewhere or unpack to more than they say: refused before anything is written, deleted or allocated."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image
from tests import tiny  # noqa: F401  registers the scenario

import emdcfl
from emdcfl.core.errors import DataError, StoreError
from emdcfl.data.own.folder import load_folder
from emdcfl.data.own.formats import spreadsheet
from emdcfl.data.own.formats.images import read_image
from emdcfl.report.load_run import read_run
from emdcfl.runs.config import Choice, Config, RunConfig
from emdcfl.runs.outputs import load_served
from emdcfl.runs.runner import run
from emdcfl.runs.store import RunStore
from emdcfl.runs.store.files import append_file, read_arrays, read_tensors, write_file, write_tensors

CONFIG = Config(scenario=Choice("tiny"), run=RunConfig(rounds=1))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the tiny scenario."""
    place = tmp_path_factory.mktemp("runs") / "honest"
    run(CONFIG, place)
    return place


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of somebody else, with files like those a run deletes."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "mine.safetensors").write_bytes(b"mine")
    (place / "round-9.json").write_bytes(b"mine")
    return place


@pytest.mark.slow
@pytest.mark.parametrize("name", ["models", "state/tensors", "state", "baselines"])
def test_a_linked_folder_is_refused_and_nothing_outside_is_deleted(name: str, honest: Path, outside: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(honest, place)
    if (place / name).exists():
        if name == "state":
            shutil.copytree(place / name, outside, dirs_exist_ok=True)
        shutil.rmtree(place / name)
    (place / name).symlink_to(outside)
    before = sorted(path.name for path in outside.iterdir())
    for attempt in (lambda: run(CONFIG, place, resume=True), lambda: RunStore.read(place)):
        with pytest.raises(StoreError, match="symbolic link"):
            attempt()
    assert sorted(path.name for path in outside.iterdir()) == before


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "state/metrics.jsonl", "state/run.json"])
def test_a_linked_file_is_refused_and_what_it_names_stays(name: str, honest: Path, outside: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(honest, place)
    target = outside / "mine.safetensors"
    (place / name).unlink(missing_ok=True)
    (place / name).symlink_to(target)
    with pytest.raises(StoreError):
        run(CONFIG, place, resume=True)
    assert target.read_bytes() == b"mine"


@pytest.fixture
def impatient() -> Iterator[None]:
    """Ends a test that waits for a pipe, to which nobody writes."""

    def end(number: int, frame: object) -> None:
        raise TimeoutError("it waits for ever")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["pipe", "link to a device", "link to a file of others"])
@pytest.mark.parametrize("name", ["summary.json", "config.toml", "metrics.jsonl", "models/index.json", "distances.npz"])
def test_whatever_reads_a_run_directory_waits_for_no_pipe_and_follows_no_link(
    name: str, kind: str, honest: Path, outside: Path, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    shutil.copytree(honest, place)
    assert (place / name).exists()
    (place / name).unlink()
    if kind == "pipe":
        os.mkfifo(place / name)
    else:
        (place / name).symlink_to("/dev/zero" if "device" in kind else outside / "mine.safetensors")
    client = json.loads((honest / "summary.json").read_text())["clients"][0]
    readers: list[Callable[[Path], object]] = [
        emdcfl.load,
        read_run,
        lambda p: load_served(p, client),
        lambda p: run(CONFIG, p, resume=True),
    ]
    for read in readers:
        with pytest.raises(StoreError, match="symbolic link|pipe"):
            read(place)


def test_nothing_is_appended_or_written_through_a_link(outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = outside / "mine.safetensors"
    (tmp_path / "results.jsonl").symlink_to(target)
    with pytest.raises(StoreError):
        append_file(tmp_path / "results.jsonl", b"more")
    monkeypatch.setattr("os.getpid", lambda: 7)
    (tmp_path / ".tmp-7-report.html").symlink_to(target)
    with pytest.raises(StoreError):
        write_file(tmp_path / "report.html", [b"page"])
    assert target.read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["photo.png", "photo.jpg"])
def test_postscript_called_an_image_is_handed_to_no_other_program(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow knows a file by its first bytes, and lets Ghostscript draw EPS, which is a program."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\necho 10.0\ntouch '{tmp_path}/ran'\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # what an earlier search found
    (tmp_path / name).write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(DataError):
        read_image(tmp_path / name, (1, 8, 8))
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("impatient")
def test_a_data_folder_with_links_in_a_circle_or_a_pipe_has_an_end(tmp_path: Path) -> None:
    for site, kind, i in product("ab", ("cat", "dog"), range(12)):
        (tmp_path / site / kind).mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), i).save(tmp_path / site / kind / f"{i}.png")
    before = load_folder(tmp_path)
    for i in range(3):
        (tmp_path / "a" / "cat" / f"link-{i}").symlink_to(".")
        (tmp_path / "a" / "cat" / f"above-{i}").symlink_to("../cat")
    assert [len(site.train) for site in load_folder(tmp_path).sites] == [len(site.train) for site in before.sites]
    os.mkfifo(tmp_path / "b" / "dog" / "pipe.png")
    with pytest.raises(DataError, match=r"pipe\.png is a pipe"):
        load_folder(tmp_path)


def test_a_workbook_with_a_cell_in_a_far_corner_is_refused_before_all_between_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At Excel's own limits, 17 KB of a file took minutes."""
    monkeypatch.setattr(spreadsheet, "MAX_CELLS", 10_000, raising=False)
    book = pytest.importorskip("openpyxl").Workbook()
    for cell, value in {"A1": "age", "B1": "label", "A2": 1, "B2": "ill"}.items():
        book.active[cell] = value
    book.save(tmp_path / "small.xlsx")
    assert spreadsheet.read_workbook(tmp_path / "small.xlsx").num_rows == 1
    book.active["CV1"], book.active["A200"] = "far", 1
    book.save(tmp_path / "large.xlsx")
    with pytest.raises(DataError, match="10000 cells"):
        spreadsheet.read_workbook(tmp_path / "large.xlsx")


def test_a_workbook_with_a_long_word_in_all_cells_is_refused_before_each_holds_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word that is in the file once took 7 GB in 6000 rows."""
    book = pytest.importorskip("openpyxl").Workbook()
    for row in (["note", "label"], *(["x" * 100, "ill"] for _ in range(50))):
        book.active.append(row)
    book.save(tmp_path / "site.xlsx")
    assert spreadsheet.read_workbook(tmp_path / "site.xlsx").num_rows == 50
    monkeypatch.setattr(spreadsheet, "MAX_TEXT", 5_000, raising=False)
    with pytest.raises(DataError, match="5000 characters"):
        spreadsheet.read_workbook(tmp_path / "site.xlsx")


def test_an_npz_that_unpacks_to_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "distances.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (8 << 20,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("W.npy", "w") as entry:
        entry.write(header.getvalue())
        for _ in range(64):
            entry.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match="unpacks to"):
            read_arrays(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_an_npy_header_that_promises_more_than_is_there_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "distances.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 30,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("W.npy", header.getvalue() + bytes(64))
    with pytest.raises(StoreError, match="names an array of shape"):
        read_arrays(path)


@pytest.mark.parametrize("entry", [{"shape": [1 << 31], "data_offsets": [0, 1 << 33]}, {"shape": [1 << 31], "data_offsets": [0, 8]}])
def test_a_safetensors_header_that_promises_more_than_is_there_is_refused(entry: dict[str, list[int]], tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", **entry}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(StoreError, match="damaged"):
        read_tensors(tmp_path / "x.safetensors")


def test_a_model_file_that_names_a_network_of_gigabytes_is_refused(honest: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(honest, place)
    for path in (place / "models").glob("*.safetensors"):
        tensors, metadata = read_tensors(path)
        recipe = json.loads(metadata["model"])
        recipe["options"]["hidden"] = [1 << 20, 1 << 20]
        write_tensors(path, tensors, {**metadata, "model": json.dumps(recipe)}, seal=True)
    with pytest.raises(StoreError, match="names a network of"):
        emdcfl.load(place)


@pytest.mark.parametrize("size", [(1, 800_000), (1, 60_000), (60_000, 2)])
def test_a_narrow_image_is_refused_by_its_header(size: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "narrow.png"
    Image.new("L", size).save(path)
    with pytest.raises(DataError, match=rf"narrow.png.*{size[0]}×{size[1]} pixels"):
        read_image(path, (1, 224, 224))


def test_an_image_of_usual_size_is_read(tmp_path: Path) -> None:
    Image.new("L", (4000, 3000)).save(tmp_path / "photo.png")
    assert read_image(tmp_path / "photo.png", (3, 64, 64)).shape == (3, 64, 64)
