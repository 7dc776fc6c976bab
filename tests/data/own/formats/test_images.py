from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from emdcfl.core.errors import DataError
from emdcfl.data.own import check_folder, encoding_of, load_folder, load_site, read_inputs
from emdcfl.data.own.formats.images import read_image
from emdcfl.data.own.site import read_unlabelled
from emdcfl.data.scenarios import build


def image(path: Path, *, size: tuple[int, int] = (12, 12), mode: str = "RGB", seed: int = 0, level: int | None = None) -> Path:
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = rng.integers(0, 256, shape, dtype=np.uint8) if level is None else np.full(shape, level, np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def client(folder: Path, *, count: int = 12, mode: str = "RGB", size: tuple[int, int] = (12, 12)) -> None:
    for label in ("cat", "dog"):
        for i in range(count):
            image(folder / label / f"{i:03}.png", mode=mode, size=size, seed=i, level=(i + (100 if label == "dog" else 0)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("north", "south"):
        client(tmp_path / "sites" / name)
    return tmp_path / "sites"


def test_folders_of_classes(folder: Path) -> None:
    scenario = load_folder(folder)
    assert scenario.classes == ("cat", "dog")
    assert [(s.name, len(s.train), len(s.val), len(s.tests["test"])) for s in scenario.sites] == [("north", 14, 5, 5), ("south", 14, 5, 5)]
    site = scenario.sites[0]
    assert site.train.x.shape[1:] == (3, 12, 12)
    assert torch.equal(site.train.x[:, 0, 0, 0] >= 100, site.train.y == 1)
    assert scenario.model.as_dict() == {"name": "small_cnn", "options": {"classes": 2, "channels": 3, "size": 12}}
    assert abs(float(scenario.preprocess(torch.cat([s.train.x for s in scenario.sites])).mean())) < 1e-4
    assert torch.equal(load_folder(folder).sites[0].train.x, site.train.x)
    assert not torch.equal(load_folder(folder, seed=1).sites[0].train.x, site.train.x)


def test_copies_in_hidden_folders_and_files_that_macos_adds_are_no_samples(folder: Path) -> None:
    image(folder / "north" / "cat" / ".ipynb_checkpoints" / "000-checkpoint.png")
    (folder / "north" / "cat" / "._000.png").write_bytes(b"Mac OS X")
    scenario = load_folder(folder)
    assert sum(map(len, scenario.sites[0].splits.values())) == 24 and not any("left out" in note for note in scenario.notes)
    assert len(read_unlabelled(folder / "north", encoding=encoding_of(scenario))) == 24


def test_train_and_test_sub_folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        client(tmp_path / "d" / name / "train", count=20)
        client(tmp_path / "d" / name / "test", count=7)
    scenario = load_folder(tmp_path / "d")
    assert [(len(s.train) + len(s.val), len(s.tests["test"])) for s in scenario.sites] == [(40, 14)] * 2
    assert len(scenario.sites[0].val) == 10
    client(tmp_path / "d" / "a" / "val")
    client(tmp_path / "d" / "a" / "validation")
    with pytest.raises(DataError, match=r"client 'a' .* got test, train, val, validation; put those of one split together"):
        load_folder(tmp_path / "d")


def test_grey_images_stay_grey_unless_one_is_not(tmp_path: Path) -> None:
    for name in ("a", "b"):
        client(tmp_path / "d" / name, mode="L")
    grey = Image.fromarray(np.arange(144, dtype=np.uint8).reshape(12, 12))
    grey.convert("LA").save(tmp_path / "d" / "b" / "cat" / "transparent.png")
    Image.frombytes("I;16B", (12, 12), np.arange(144).astype(">u2").tobytes()).save(tmp_path / "d" / "b" / "cat" / "big-endian.tif")
    assert load_folder(tmp_path / "d").sites[0].train.x.shape[1] == 1
    image(tmp_path / "d" / "b" / "cat" / "z.png", level=3)
    assert load_folder(tmp_path / "d").sites[0].train.x.shape[1] == 3


def test_common_size(tmp_path: Path) -> None:
    for name in ("a", "b"):
        client(tmp_path / "d" / name, size=(20, 20))
        image(tmp_path / "d" / name / "cat" / "wide.png", size=(90, 40))
    assert load_folder(tmp_path / "d").sites[0].train.x.shape[2:] == (20, 20)
    assert load_folder(tmp_path / "d", size=8).sites[0].train.x.shape[2:] == (8, 8)
    for size in (0, 1 << 14):
        with pytest.raises(DataError, match=f"got scenario.size = {size}; choose another"):
            load_folder(tmp_path / "d", size=size)
    for name in ("a", "b"):
        client(tmp_path / "e" / name, size=(200, 100))
    large = load_folder(tmp_path / "e")
    assert large.sites[0].train.x.shape[2:] == (64, 64)
    assert large.model.name == "pooled_cnn"
    pretrained = load_folder(tmp_path / "e", model="resnet18")
    assert pretrained.sites[0].train.x.shape[1:] == (3, 224, 224)
    assert pretrained.preprocess.mean == (0.485, 0.456, 0.406)
    assert pretrained.model.options == {"classes": 2}


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for label, level in (("low", 0x1000), ("high", 0xF000)):
            (tmp_path / name / label).mkdir(parents=True)
            for i in range(10):
                Image.fromarray(np.full((8, 8), level, np.uint16)).save(tmp_path / name / label / f"{i}.png")
    scenario = load_folder(tmp_path)
    assert sorted(scenario.sites[0].train.x.unique().tolist()) == [0x10, 0xF0]


def test_photos_are_turned_as_the_camera_was_held(tmp_path: Path) -> None:
    """Else the sites of one kind of phone would look rotated."""
    upright = np.zeros((12, 12), np.uint8)
    upright[:4] = 255
    turn = Image.Exif()
    turn[0x0112] = 6  # stored a quarter turn to the left
    Image.fromarray(np.rot90(upright)).save(tmp_path / "a.png", exif=turn)
    Image.fromarray(upright).save(tmp_path / "b.png")
    shape = (1, 12, 12)
    assert np.array_equal(read_image(tmp_path / "a.png", shape), read_image(tmp_path / "b.png", shape))


@pytest.mark.parametrize("level", [np.float32(0.5), np.int32(1 << 16), np.int32(-1)])
def test_pixels_of_unknown_range_are_not_clipped_or_wrapped(tmp_path: Path, level: np.generic) -> None:
    Image.fromarray(np.full((12, 12), level)).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match="8 or 16 bits"):
        read_image(tmp_path / "a.tif", (1, 12, 12))


def test_twelve_bits_stored_as_sixteen_are_named(folder: Path) -> None:
    assert not any("brighter" in note for note in load_folder(folder).notes)
    for file in (folder / "north").rglob("*.png"):
        Image.fromarray(np.random.default_rng(0).integers(0, 4096, (12, 12), dtype=np.uint16)).save(file)
    assert any("client 'north'" in note and "no pixel is brighter than 15 of 255" in note for note in load_folder(folder).notes)


def test_corrupt_image_is_named_and_left_out(folder: Path) -> None:
    bad = folder / "south" / "dog" / "broken.jpg"
    bad.write_bytes(b"\xff\xd8\xff\xe0 this is not a picture")
    scenario = load_folder(folder)
    assert sum(len(s) for s in (scenario.sites[1].train, scenario.sites[1].val, scenario.sites[1].tests["test"])) == 24
    assert any("client 'south'" in note and str(bad) in note for note in scenario.notes)
    cut = image(folder / "south" / "dog" / "cut.png", size=(64, 64))
    cut.write_bytes(cut.read_bytes()[:3000])
    assert any(str(cut) in note for note in load_folder(folder).notes)
    assert any(str(bad) in note for note in check_folder(folder).notes)


def test_empty_client_and_stray_files(folder: Path) -> None:
    (folder / "west").mkdir()
    with pytest.raises(DataError, match=r"client 'west' \(.*west\) holds nothing"):
        load_folder(folder)
    image(folder / "west" / "stray.png")
    with pytest.raises(DataError, match=r"client 'west' .* only files outside class folders \(stray\.png"):
        load_folder(folder)
    (folder / "west" / "stray.png").unlink()
    (folder / "west" / "cat").mkdir()
    with pytest.raises(DataError, match=r"client 'west' .* holds no images"):
        load_folder(folder)
    (folder / "east").mkdir()
    errors = check_folder(folder).errors
    assert any("'west'" in error for error in errors)
    assert any("'east'" in error for error in errors)
    (folder / "north" / "cat" / "notes.txt").touch()
    assert check_folder(folder).errors == errors  # a file that is left out is no problem


def test_new_site_and_prediction(folder: Path, tmp_path: Path) -> None:
    scenario = load_folder(folder)
    client(tmp_path / "new", size=(30, 20))
    image(tmp_path / "new" / "horse" / "1.png")
    with pytest.raises(DataError, match=r"cat.*png is one image: expected a folder with one sub-folder of images per class"):
        load_site(next((tmp_path / "new").glob("cat/*")), encoding=encoding_of(scenario), classes=scenario.classes)
    site, notes = load_site(tmp_path / "new", encoding=encoding_of(scenario), classes=scenario.classes)
    assert site.train.x.shape[1:] == (3, 12, 12)
    assert any("left out" in note and "(horse)" in note for note in notes)
    file = image(tmp_path / "one.png", size=(40, 40), level=77)
    x, names = read_inputs([file], encoding=encoding_of(scenario))
    assert x.shape == (1, 3, 12, 12)
    assert x.unique().tolist() == [77]
    assert names == [str(file)]
    with pytest.raises(DataError, match="not an image"):
        read_inputs([Path(__file__)], encoding=encoding_of(scenario))
    (tmp_path / "t.csv").write_text("a,label\n1,2\n")
    with pytest.raises(DataError, match="holds tables, but the run was trained on images"):
        load_site(tmp_path / "t.csv", encoding=encoding_of(scenario), classes=scenario.classes)


def test_built_in_scenarios_read_images_at_their_shape(tmp_path: Path) -> None:
    encoding = encoding_of(build("rotated-digits"))
    assert encoding == {"kind": "images", "shape": [1, 8, 8]}
    x, _ = read_inputs([image(tmp_path / "a.png", size=(8, 8), level=50)], encoding=encoding)
    assert x.shape == (1, 1, 8, 8)
