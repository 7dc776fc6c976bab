"""Any file of a run directory may be damaged or lost: it is noticed, and repaired from another or explained in one line."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tests.tiny
import torch
from tests.runs.test_store import Memory, loaded, reopen, rounds, store, tensor_files, vector
from tests.tiny import forge_round, same

from emdcfl.core.errors import EmdcflError, StoreError
from emdcfl.runs import result, runner
from emdcfl.runs.config import Config, PersonalizeConfig, RunConfig, load
from emdcfl.runs.outputs import INDEX, PERSONAL, load_served, read_reading, read_summary
from emdcfl.runs.store import RunStore
from emdcfl.runs.store.files import read_arrays, read_tensors, sealed, unsealed, write_tensors
from emdcfl.studies import results, snapshot

__all__ = ["store"]  # a fixture

pytestmark = pytest.mark.usefixtures("sketches")
Damage = Callable[[Path], None]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGE = [truncate, flip, empty, Path.unlink]


# --- rounds ---


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("what", ["json", "tensor"])
def test_a_damaged_newest_round_falls_back_to_the_one_before(
    store: RunStore, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], what: str
) -> None:
    store.save_state(1, Memory(vector(1)))
    before = tensor_files(store)
    store.save_state(2, Memory(vector(2)))
    victim = store.path / "state" / "round-2.json"
    if what == "tensor":
        victim = store.path / "state" / "tensors" / min(tensor_files(store).keys() - before.keys())
    damage(victim)
    store = reopen(store)
    with caplog.at_level(logging.WARNING):
        assert same(loaded(store)[:2], (1, Memory(vector(1))))
    if victim.exists():
        assert str(victim) in caplog.text
    store.save_state(2, Memory(vector(2)))  # the run goes on and repairs what was damaged
    assert same(loaded(reopen(store))[:2], (2, Memory(vector(2))))


@pytest.mark.parametrize("damage", DAMAGE[:3])
def test_damage_to_all_rounds_is_an_error_that_names_the_file(store: RunStore, damage: Callable[[Path], None]) -> None:
    store.save_state(1, Memory(vector(1)))
    store.save_state(2, Memory(vector(2)))
    for path in (store.path / "state").glob("round-*.json"):
        damage(path)
    with pytest.raises(StoreError) as caught:
        store.load_state(Memory)
    assert f"{store.path}/state/round-2.json: truncated or damaged" in str(caught.value)
    assert "another --out" in str(caught.value) and "\n" not in str(caught.value)


def test_every_flipped_bit_of_the_round_file_is_noticed(store: RunStore) -> None:
    store.save_state(1, Memory(torch.arange(3), note="abc"))
    path = store.path / "state" / "round-1.json"
    original = path.read_bytes()
    for position in range(len(original) - 1):
        content = bytearray(original)
        content[position] ^= 1 << (position % 7)
        path.write_bytes(content)
        with pytest.raises(StoreError, match=r"round-1\.json"):
            store.load_state(Memory)


# --- whose config ---


def cut_at_a_line(path: Path) -> None:
    path.write_text(path.read_text().partition("[scenario]")[0])


@pytest.mark.parametrize("damage", [truncate, cut_at_a_line, empty, lambda p: p.write_bytes(b"\xff\x00"), Path.unlink])
def test_a_damaged_config_is_written_again_from_its_copy(store: RunStore, caplog: pytest.LogCaptureFixture, damage: Damage) -> None:
    path = store.path / "config.toml"
    whole = path.read_bytes()
    damage(path)
    assert RunStore.read(store.path).config() == Config()
    assert "copy in state/run.json" in caplog.text
    assert reopen(store).config() == Config()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_json_is_written_again_from_the_config(store: RunStore, damage: Damage) -> None:
    store.save_state(1, Memory(vector(1)))
    path = store.path / "state" / "run.json"
    whole = path.read_bytes()
    damage(path)
    assert RunStore.read(store.path).config() == Config()
    assert rounds(reopen(store)) == [1]
    assert path.read_bytes() == whole


def test_a_changed_config_is_not_written_over_but_named(store: RunStore) -> None:
    path = store.path / "config.toml"
    path.write_text(path.read_text().replace("seed = 0", "seed = 4"))
    with pytest.raises(StoreError, match=r"run.seed \(0 there, 4 here\); delete it"):
        RunStore.read(store.path).config()
    store.close()
    with pytest.raises(StoreError, match="run.seed"):
        RunStore.open(store.path, Config(run=RunConfig(seed=4)), resume=True)
    path.unlink()
    with RunStore.open(store.path, Config(), resume=True):
        assert load(path) == Config()


def test_both_damaged_is_an_error_that_says_what_to_do(store: RunStore) -> None:
    store.save_state(1, Memory(vector(1)))
    (store.path / "config.toml").write_bytes(b"\xff")
    (store.path / "state" / "run.json").write_bytes(b"{")
    with pytest.raises(StoreError, match="both damaged or missing; restore one of them, or choose another --out"):
        RunStore.read(store.path).config()


def test_a_run_of_another_format_is_left_alone(store: RunStore) -> None:
    path = store.path / "state" / "run.json"
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), "format": 9}, "run.json")))
    with pytest.raises(StoreError, match="expected format 1, got 9"):
        RunStore.read(store.path).config()


# --- metrics ---


def filled(store: RunStore) -> tuple[Path, Path, bytes]:
    for r in (1, 2):
        store.append_metrics([{"round": r, "client": c, "loss": 0.25 * r} for c in "ab"])
        store.save_state(r, Memory(vector(r)))
    path = store.path / "metrics.jsonl"
    return path, store.path / "state" / "metrics.jsonl", path.read_bytes()


@pytest.mark.parametrize("damage", [*DAMAGE, lambda p: p.write_bytes(p.read_bytes().replace(b"0.25", b"0.75"))])
@pytest.mark.parametrize("victim", [0, 1])
def test_damaged_metrics_are_written_again_from_the_other_copy(store: RunStore, damage: Damage, victim: int) -> None:
    paths = filled(store)
    damage(paths[victim])
    if paths[victim].exists():
        cut = paths[victim].read_bytes() == paths[2][: paths[victim].stat().st_size]
        if not cut:  # a file that is merely shorter is one whose last rows are still to come
            with pytest.raises(StoreError, match="resume the run"):
                RunStore.read(store.path).read_metrics()
    store = reopen(store)
    loaded(store)
    store.trim_metrics(2)
    assert paths[0].read_bytes() == paths[1].read_bytes() == paths[2]


def test_both_copies_damaged_is_an_error_and_both_deleted_goes_on(store: RunStore, caplog: pytest.LogCaptureFixture) -> None:
    path, copy, _ = filled(store)
    truncate(path)
    truncate(copy)
    store = reopen(store)
    store.load_state(Memory)
    with pytest.raises(StoreError, match="delete both to go on without these rows"):
        store.trim_metrics(2)
    path.unlink()
    copy.unlink()
    with caplog.at_level(logging.WARNING):
        store.trim_metrics(2)
    assert "goes on without the rows" in caplog.text
    store.append_metrics([{"round": 3}])
    store.save_state(3, Memory(vector(3)))
    store = reopen(store)
    store.load_state(Memory)
    store.trim_metrics(3)
    assert store.read_metrics() == [{"round": 3}]


def test_going_back_a_round_takes_its_metrics_back_too(store: RunStore) -> None:
    path, _, whole = filled(store)
    truncate(store.path / "state" / "round-2.json")
    store = reopen(store)
    assert loaded(store)[0] == 1
    store.trim_metrics(1)
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])


# --- forged states ---


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.update(tensors=["../../secret"]),
        lambda b: b.update(tensors=[{"dtype": "float32", "shape": [2], "data": "AA=="}]),
        lambda b: b.update(tensors=[{"dtype": "float32", "shape": 2, "data": "AA=="}]),
        lambda b: b.update(tensors=[7]),
        lambda b: b.update(tensors=[]),
        lambda b: b.update(blobs=[None]),
        lambda b: b.update(value={"m": {"state": {"m": {}}, "extra": {"m": {}}}}, tensors=[], blobs=[]),
        lambda b: b.update(value={"m": {"state": 1, "extra": {"m": {}}}}, tensors=[], blobs=[]),
        lambda b: b["value"]["m"].pop("extra"),
        lambda b: b.pop("value"),
        lambda b: b.update(metrics=3),
        lambda b: b.update(round=2),
    ],
)
def test_json_with_a_checksum_that_fits_is_still_looked_at(store: RunStore, change: Callable[[dict[str, object]], object]) -> None:
    store.save_state(1, Memory(vector(1)))
    path = store.path / "state" / "round-1.json"
    body = json.loads(path.read_bytes())["body"]
    forge_round(path, body)
    loaded(store)  # the checksum fits
    change(body)
    forge_round(path, body)
    with pytest.raises(StoreError):
        store.load_state(Memory)


# --- what is made from the state ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("damage") / "run"
    runner.run(tests.tiny.config(rounds=1), out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["summary.json", "reading.json", INDEX, "models/cluster-0.safetensors", "distances.npz"])
def test_damaged_outputs_are_noticed_and_a_resume_writes_them_again(finished: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    looks: dict[str, Callable[[], object]] = {
        "summary.json": lambda: read_summary(out),
        "reading.json": lambda: read_reading(out),
        "distances.npz": lambda: read_arrays(out / "distances.npz"),
    }
    look = looks.get(name, lambda: load_served(out, "site-0"))
    assert look() is not None
    for damage in DAMAGE:
        shutil.copy(finished / name, out / name)
        damage(out / name)
        if name == "reading.json" and damage is Path.unlink:
            assert look() is None  # a method without distances has none
            continue
        with pytest.raises(StoreError):
            look()
    runner.run(tests.tiny.config(rounds=1), out, resume=True)
    assert tests.tiny.contents(out) == tests.tiny.contents(finished)


@pytest.mark.parametrize("name", ["summary.json", INDEX, PERSONAL])
def test_a_forged_file_is_read_or_told_in_one_line(tmp_path: Path, name: str) -> None:
    """Without a checksum, as somebody may have written it by hand."""
    out = tmp_path / "run"
    runner.run(replace(tests.tiny.config(rounds=1), personalize=PersonalizeConfig("on")), out)
    path = out / name
    whole = {key: value for key, value in json.loads(path.read_bytes()).items() if key != "sha256"}
    told: dict[str, str] = {}

    def look() -> None:
        found = result.load(out)
        shown = (repr(found), found.clusters, found.plain, found.personalized, found.regression, found.ari)
        assert len(shown) + len(found.models) == 10
        assert load_served(out, "site-0").weights

    def forged(value: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
        for key, inner in value.items():
            yield key, {other: item for other, item in value.items() if other != key}
            yield from ((key, {**value, key: wrong}) for wrong in (None, [], {}, -1, "x", ["x"], {"site-0": 7}))
            if isinstance(inner, dict) and depth < 3:
                yield from ((f"{key}.{below}", {**value, key: changed}) for below, changed in forged(inner, depth + 1))

    for key, value in forged(whole):
        path.write_text(json.dumps(value))
        try:
            look()
        except EmdcflError as error:
            told[key] = str(error)
    assert "clients" in told and not any("\n" in text for text in told.values()), told


def test_no_flipped_bit_changes_what_is_read_from_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_tensors(path, {"w": torch.arange(6.0), "b": torch.ones(2)}, {"classes": '["é"]'}, seal=True)
    whole, refused = path.read_bytes(), 0

    def look() -> tuple[dict[str, list[float]], str]:
        tensors, metadata = read_tensors(path)
        return {name: t.tolist() for name, t in tensors.items()}, metadata["classes"]

    expected = look()
    for position in range(len(whole)):
        content = bytearray(whole)
        content[position] ^= 1 << (position % 8)
        path.write_bytes(content)
        try:
            assert look() == expected, position  # a bit of the name of the checksum, say
        except StoreError:
            refused += 1
    assert refused > 0.8 * len(whole)


def test_seals() -> None:
    value = {"k": 4, "share": 0.1, "names": ["é"], "none": None}
    written = json.loads(json.dumps(sealed(value, "x")))
    assert unsealed(written, "x") == value == unsealed(value, "x")
    for key in value:
        with pytest.raises(StoreError, match="x: changed or damaged since it was written"):
            unsealed({**written, key: 7}, "x")


def test_a_changed_row_of_results_is_noticed(tmp_path: Path) -> None:
    row = {"config": "c", "scenario": "s", "method": "m", "seed": 0, "accuracy": {"mean": 0.5}, "settings": {}}
    with results.Results(tmp_path) as found:
        found.add([row])
    path = tmp_path / results.RESULTS
    assert results.read_results(path) == [row]
    path.write_text(path.read_text().replace("0.5", "0.9"))
    with pytest.raises(StoreError, match="line 1 is damaged; delete the line, and what it held is run again"):
        results.read_results(path)
    for line in ("[1]", '{"config": []}', "{oops"):
        path.write_text(f"{line}\n")
        with pytest.raises(StoreError, match="line 1 is damaged"):
            results.read_results(path)
    path.write_text('{"config": 1}\n')
    with pytest.raises(StoreError, match="line 1 has no 'scenario'"):
        results.read_results(path)
    with pytest.raises(StoreError, match="missing"):
        results.read_results(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("name", ["rows/1.safetensors", "snapshot.npz"])
def test_a_damaged_snapshot_is_taken_again(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = snapshot.SnapshotRequest(tests.tiny.config(), cap=8)
    snapshot.take(request, tmp_path)
    whole = {p.name: p.read_bytes() for p in tmp_path.rglob("*.*")}
    for damage in (truncate, flip, Path.unlink):
        damage(tmp_path / name)
        taken = snapshot.take(request, tmp_path)
        assert taken.row(1).train.shape[0] == 8
        assert {p.name: p.read_bytes() for p in tmp_path.rglob("*.*")} == whole
    monkeypatch.setattr(snapshot, "_take", lambda *_: pytest.fail("taken again although nothing was damaged"))
    snapshot.take(request, tmp_path)
