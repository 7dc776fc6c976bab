from __future__ import annotations

import hashlib
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from tests.data import standins

from emdcfl.core.errors import ConfigError, DataError
from emdcfl.data import sources
from emdcfl.data.sources import parquet


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EMDCFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EMDCFL_DATA", raising=False)
    return tmp_path / "data"


def test_digits() -> None:
    source = sources.load("digits")
    assert source.images.shape == (1797, 1, 8, 8)
    assert source.images.dtype == np.uint8
    assert sorted(np.unique(source.images).tolist()) == [int(np.floor(v * 255 / 16 + 0.5)) for v in range(17)]


def test_images_are_decoded_once_and_memory_mapped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standins.mnist(root)
    first = sources.load("mnist", "train", root)
    assert isinstance(first.images, np.memmap)
    lit = first.images[:, 0, 0, :10].argmax(axis=1)
    assert np.array_equal(lit, first.labels)
    monkeypatch.setattr(sources.ImageTable, "_decode", lambda *_: pytest.fail("decoded again"))
    again = sources.load("mnist", "train", root)
    assert np.array_equal(again.images, first.images)


def test_a_changed_or_damaged_file_is_decoded_again(root: Path) -> None:
    standins.mnist(root, train=41)
    assert len(sources.load("mnist", "train", root).images) == 419
    standins.mnist(root, train=51)
    assert len(sources.load("mnist", "train", root).images) == 519
    for file in (parquet.cache_dir() / "decoded").iterdir():
        file.write_bytes(b"cut")
    assert sources.load("mnist", "train", root).images[0, 0, 0].max() == 255


def test_writing_to_loaded_images_leaves_the_cache_alone(root: Path) -> None:
    standins.mnist(root, train=41)
    sources.load("mnist", "train", root).images[:] = 7
    assert sources.load("mnist", "train", root).images.max() == 255


def test_rows_can_be_chosen_and_ordered(root: Path) -> None:
    standins.mnist(root, train=41)
    table = sources.table("mnist", "train", root)
    rows = np.random.default_rng(0).permutation(len(table))[:50]
    part = table.load(rows)
    assert np.array_equal(part.images, table.load().images[rows])
    assert np.array_equal(part.labels, table.labels[rows])
    with pytest.raises(DataError, match="only once"):
        table.load(np.array([1, 1]))


def test_hub_layout_and_other_column_names(root: Path) -> None:
    standins.cifar10(root)
    source = sources.load("cifar10", "test", root)
    assert source.images.shape == (200, 3, 32, 32)
    assert source.classes == tuple("abcdefghij")


def test_one_file_beside_the_hubs_layout_is_not_read_twice(root: Path) -> None:
    standins.cifar10(root)
    shutil.copy(root / "cifar10" / "plain_text" / "test-00000-of-00001.parquet", root / "cifar10" / "test.parquet")
    assert len(sources.load("cifar10", "test", root)) == 200


def test_unreadable_image_is_named(root: Path) -> None:
    standins.write(root / "mnist" / "train.parquet", [b"no image"], np.array([0]), ["0"])
    with pytest.raises(DataError, match=r"mnist-train: row 0 of .* holds no readable image"):
        sources.load("mnist", "train", root)
    assert not list((parquet.cache_dir() / "decoded").iterdir())


def test_wrong_size_is_named(root: Path) -> None:
    standins.write(root / "mnist" / "train.parquet", [standins.png(np.zeros((28, 30), np.uint8))], np.array([0]), ["0"])
    with pytest.raises(DataError, match="row 0 is 30×28 pixels, expected 28×28"):
        sources.load("mnist", "train", root)


def test_pacs_in_another_square_size_is_taken_as_it_is(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    standins.pacs(root, per_domain=3, side=24)
    with caplog.at_level("INFO", logger="emdcfl"):
        assert sources.load("pacs", "train", root).images.shape == (12, 3, 24, 24)
    assert [r.getMessage() for r in caplog.records] == ["pacs-train: images of 24×24 pixels instead of the published 227×227"]


def test_pacs_in_mixed_or_oblong_sizes_is_refused(root: Path) -> None:
    sizes = [(24, 24), (30, 30)]
    for shapes, message in ((sizes, "row 1 is 30×30 pixels, expected 24×24"), ([(24, 30)], "row 0 is 30×24 pixels, expected 227×227")):
        images = [standins.png(np.zeros(shape, np.uint8)) for shape in shapes]
        standins.write(root / "pacs" / "train.parquet", images, np.zeros(len(images), int), ["a"], domain=["photo"] * len(images))
        with pytest.raises(DataError, match=message):
            sources.load("pacs", "train", root)


def test_cut_parquet_file_is_named(root: Path) -> None:
    (root / "mnist").mkdir(parents=True)
    (root / "mnist" / "train.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"cannot read .*train\.parquet"):
        sources.load("mnist", "train", root)


def test_missing_data_say_where_to_put_which_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=f"put the train table at {root}/mnist/train.parquet"):
        sources.load("mnist", "train", root)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match="hub extra is not installed") as caught:
        sources.load("mnist", "train")
    assert str(caught.value).endswith("put ylecun/mnist's train Parquet file at FOLDER/mnist/train.parquet and set EMDCFL_DATA=FOLDER")
    assert "\n" not in str(caught.value)


def test_a_home_folder_in_the_environment_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root.parent))
    monkeypatch.setenv("EMDCFL_DATA", f"~/{root.name}")
    standins.mnist(root)
    assert sources.table("mnist", "train").files == [root / "mnist" / "train.parquet"]


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mnist'"):
        sources.load("mnits")
    with pytest.raises(ConfigError, match="pacs has no split 'test'"):
        sources.table("pacs", "test")


def fake_hub(files: Path, *, wrong_hash: bool = False, offline: bool = False) -> types.ModuleType:
    """A stand-in for huggingface_hub with the three calls that are used."""
    hub = types.ModuleType("huggingface_hub")
    name = "mnist/train-00000-of-00001.parquet"

    class HfApi:
        def list_repo_files(self, repo: str, *, repo_type: str) -> list[str]:
            if offline:
                raise ConnectionError("no route to host\nmore lines")
            assert (repo, repo_type) == ("ylecun/mnist", "dataset")
            return ["README.md", name, "mnist/test-00000-of-00001.parquet"]

        def get_paths_info(self, repo: str, paths: list[str], *, repo_type: str) -> list[types.SimpleNamespace]:
            assert paths == [name]
            sha = "0" * 64 if wrong_hash else hashlib.sha256((files / "mnist" / "train.parquet").read_bytes()).hexdigest()
            return [types.SimpleNamespace(path=name, lfs=types.SimpleNamespace(sha256=sha))]

    def hf_hub_download(repo: str, filename: str, *, repo_type: str, local_dir: Path) -> str:
        target = Path(local_dir) / filename
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(files / "mnist" / "train.parquet", target)
        return str(target)

    hub.HfApi, hub.hf_hub_download = HfApi, hf_hub_download  # type: ignore[attr-defined]
    return hub


def test_download_is_verified_and_used_again(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standins.mnist(tmp_path / "remote", train=41)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub(tmp_path / "remote"))
    assert len(sources.load("mnist", "train")) == 419
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert len(sources.load("mnist", "train")) == 419


def test_damaged_download_is_deleted(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standins.mnist(tmp_path / "remote", train=41)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub(tmp_path / "remote", wrong_hash=True))
    with pytest.raises(DataError, match="arrived damaged"):
        sources.load("mnist", "train")
    assert not list(parquet.cache_dir().rglob("*.parquet"))


def test_offline_hub(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub(tmp_path, offline=True))
    with pytest.raises(DataError, match=r"cannot be reached \(ConnectionError: no route to host\): put") as caught:
        sources.load("mnist", "train")
    assert "\n" not in str(caught.value)


def test_unwritable_cache(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standins.mnist(root, train=41)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EMDCFL_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="set EMDCFL_CACHE"):
        sources.load("mnist", "train", root)
