from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.tiny import same
from torch import Tensor

from emdcfl.core.codec import DTYPES
from emdcfl.core.errors import StoreError
from emdcfl.runs.config import Choice, Config, RunConfig, load
from emdcfl.runs.store import RunStore, files
from emdcfl.runs.store.rounds import Rounds


@dataclass(frozen=True)
class Memory:
    theta: Tensor
    counts: dict[str, int] = field(default_factory=dict)
    members: list[dict[str, Any]] = field(default_factory=list)
    pair: tuple[Any, ...] = ()
    by_name: dict[str, Tensor] = field(default_factory=dict)
    blob: bytes = b""
    note: str | None = None


def vector(seed: int, size: int = 1000) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size).astype(np.float32))


def memory(seed: int) -> Memory:
    return Memory(
        theta=vector(seed),
        counts={"é": 3, "$tensor": 2**62},
        members=[{"weight": 0.1 + 0.2, "omega": vector(seed + 100)}, {"weight": -0.0}, {"weight": float("-inf")}],
        pair=(1, [2.5, None, True], {"$dict": (1,)}, ()),
        by_name={"a": torch.tensor([float("nan"), float("inf"), -0.0]), "b": torch.arange(6).reshape(2, 3), "c": torch.tensor(True)},
        blob=b"\x00\xff",
        note="x",
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.open(tmp_path / "run", Config()) as opened:
        yield opened


def reopen(store: RunStore) -> RunStore:
    store.close()
    return RunStore.open(store.path, Config(), resume=True)


def loaded(store: RunStore) -> tuple[int, Memory, dict[str, Any]]:
    found = store.load_state(Memory)
    assert found is not None
    return found


def rounds(store: RunStore) -> list[int]:
    return Rounds(store.path / "state").numbers()


def tensor_files(store: RunStore) -> dict[str, int]:
    return {p.name: p.stat().st_ino for p in (store.path / "state" / "tensors").iterdir()}


# --- states ---


def test_nested_states_come_back_bit_for_bit(store: RunStore) -> None:
    extra = {"seconds": {"train": 1.5}, "w": vector(5), "t": (1, "a")}
    store.save_state(3, memory(0), extra)
    assert same(loaded(reopen(store)), (3, memory(0), extra))


def test_every_type_and_shape_comes_back(store: RunStore) -> None:
    made = torch.Generator().manual_seed(0)
    shapes = [(), (0,), (3, 5), (40, 50)]
    kept = {f"{d} {s}": (torch.rand(s, generator=made) * 3).to(d) for d in DTYPES.values() for s in shapes}
    store.save_state(0, Memory(torch.zeros(1), by_name=kept))
    assert same(loaded(store)[1].by_name, kept)


def test_views_and_parameters_are_saved_by_value(store: RunStore) -> None:
    base = vector(0, 4000).reshape(50, 80)
    store.save_state(0, Memory(base.T, by_name={"p": torch.nn.Parameter(base[::2])}))
    _, state, _ = loaded(store)
    assert torch.equal(state.theta, base.T)
    assert torch.equal(state.by_name["p"], base[::2]) and not state.by_name["p"].requires_grad


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        (Memory(vector(0), counts={1: 2}), "text as keys, got 1"),
        (Memory(vector(0), counts={"a": np.int64(2)}), r"got int64 at value\.state\.counts\.a"),
        (Memory(vector(0), members=[{"weight": object()}]), r"got object at value\.state\.members\[0\]\.weight"),
        (Memory(torch.zeros(2, dtype=torch.complex64)), r"value\.state\.theta, got .*complex64"),
        (Memory(vector(0), pair=(Config(),)), r"got Config at value\.state\.pair\[0\]"),
    ],
)
def test_what_cannot_be_saved_is_named_and_harms_nothing(store: RunStore, bad: Memory, where: str) -> None:
    store.save_state(1, memory(0))
    with pytest.raises(StoreError, match=where):
        store.save_state(2, bad)
    assert same(loaded(store)[:2], (1, memory(0)))


def test_another_class_is_refused(store: RunStore) -> None:
    @dataclass
    class Changed:
        theta: Tensor
        brand_new: int = 0

    store.save_state(1, memory(0))
    with pytest.raises(StoreError, match=r"differ in .*brand_new.*resume with the version"):
        store.load_state(Changed)


def test_unchanged_tensors_are_not_written_again(store: RunStore) -> None:
    fixed = vector(9)
    store.save_state(1, Memory(vector(1), by_name={"fixed": fixed}))
    before = tensor_files(store)
    store.save_state(2, Memory(vector(2), by_name={"fixed": fixed.clone()}))
    again = reopen(store)
    loaded(again)
    again.save_state(3, Memory(vector(3), by_name={"fixed": fixed}))
    after = tensor_files(again)
    shared = before.keys() & after.keys()
    assert len(before) == 2 and len(after) == 3 and len(shared) == 1
    assert all(before[name] == after[name] for name in shared)


def test_equal_tensors_share_a_file_but_not_memory(store: RunStore) -> None:
    theta = vector(0, 300_000)
    store.save_state(1, Memory(theta, by_name={"a": theta}))
    assert len(tensor_files(store)) == 1
    _, state, _ = loaded(store)
    state.theta.zero_()
    assert torch.equal(state.by_name["a"], theta)
    assert torch.equal(loaded(store)[1].theta, theta)  # the mapped file must not have changed either


def test_the_last_two_rounds_are_kept(store: RunStore) -> None:
    for round in range(6):
        store.save_state(round, Memory(vector(round)))
        assert rounds(store) == [r for r in (round - 1, round) if r >= 0]
        assert len(tensor_files(store)) == len(rounds(store))


def test_saving_an_earlier_round_again_forgets_later_ones(store: RunStore) -> None:
    for round in (1, 2, 3):
        store.save_state(round, Memory(vector(round)))
    store.save_state(2, Memory(vector(20)))
    assert rounds(store) == [2]
    assert same(loaded(store)[:2], (2, Memory(vector(20))))


# --- kills ---


class Killed(BaseException):
    pass


def die_at(monkeypatch: pytest.MonkeyPatch, n: int, after: bool) -> None:
    """From the n-th change of the directory on, nothing happens any more (not even cleaning up), as after kill -9."""
    calls = 0

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == n and after:
                function(*args, **kwargs)
            if calls >= n:
                raise Killed
            return function(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(os, "replace", mortal(os.replace))
    monkeypatch.setattr(Path, "unlink", mortal(Path.unlink))


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_between_any_two_files_leaves_the_previous_round_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    seen: list[int] = []
    for n in range(1, 100):
        store = RunStore.open(tmp_path / f"run-{n}", Config())
        store.save_state(1, memory(1))
        store.save_state(2, memory(2))
        with monkeypatch.context() as patch:
            die_at(patch, n, after)
            try:
                store.append_metrics([{"round": 3, "loss": 0.5}])
                store.save_state(3, memory(3), {"r": 3})
                survived = True
            except Killed:
                survived = False
        store = reopen(store)
        round, state, extra = loaded(store)
        assert same(state, memory(round))
        assert extra == ({"r": 3} if round == 3 else {})
        seen.append(round)
        assert not list(store.path.rglob(".tmp-*"))
        store.save_state(3, memory(3))
        store.save_state(4, memory(4))
        assert rounds(store) == [3, 4] and len(tensor_files(store)) == 4
        store.close()
        if survived:
            break
    assert seen == sorted(seen) and set(seen) == {2, 3}
    assert len(seen) >= 5  # two tensors, the round, then deletions


@pytest.mark.parametrize("n", [1, 2])
def test_a_kill_while_the_directory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    with monkeypatch.context() as patch:
        die_at(patch, n, after=False)
        with pytest.raises(Killed):
            RunStore.open(tmp_path / "run", Config())
    with RunStore.open(tmp_path / "run", Config(), resume=True) as store:
        assert store.load_state(Memory) is None
        assert load(tmp_path / "run" / "config.toml") == Config()


def test_a_file_that_cannot_be_written_is_an_error_in_one_line(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StoreError, match=r"summary.json: cannot write: No space left on device.*--resume"):
        files.write_file(store.path / "summary.json", [b"{}"])
    assert not list(store.path.rglob(".tmp-*"))


# --- large states, written while the caller goes on ---


def test_a_large_state_is_written_beside_the_caller(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emdcfl.runs.store.run_store.LARGE", 4 * 1000)
    held, move = threading.Event(), os.replace

    def slow(*args: Any) -> None:
        assert held.wait(60)
        move(*args)

    monkeypatch.setattr(os, "replace", slow)
    extra = {"rows": [1]}
    store.save_state(1, memory(1), extra, background=True)  # would wait for ever
    extra["rows"].append(2)
    assert not list(store.path.rglob("round-1.json"))
    held.set()
    assert same(loaded(store), (1, memory(1), {"rows": [1]}))


@pytest.mark.parametrize("end", ["next", "close"])
def test_what_goes_wrong_beside_is_raised_later_and_the_round_before_is_safe(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("emdcfl.runs.store.run_store.LARGE", 0)
    store.save_state(1, memory(1), background=True)
    assert loaded(store)[0] == 1  # waits until it is written
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        store.save_state(2, memory(2), background=True)
        with pytest.raises(StoreError, match=r"No space left on device; the last complete round is safe"):
            store.save_state(3, memory(3), background=True) if end == "next" else store.close()
    assert same(loaded(reopen(store))[:2], (1, memory(1)))


def test_a_small_state_is_there_when_saving_returns(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread for a small state"))
    store.save_state(1, memory(1), background=True)
    assert rounds(store) == [1]


# --- the directory ---


def test_a_run_of_another_config_is_refused_and_the_keys_are_named(store: RunStore) -> None:
    store.close()
    other = Config(run=RunConfig(seed=3), method=Choice("fedavg", {"x": 1}))
    for resume in (False, True):
        with pytest.raises(StoreError) as caught:
            RunStore.open(store.path, other, resume=resume)
        message = str(caught.value)
        assert "method.name ('emdcfl' there, 'fedavg' here), method.x ('unset' there, 1 here), run.seed (0 there, 3 here)" in message
        assert "scenario" not in message and "\n" not in message


def test_the_same_run_needs_resume(store: RunStore) -> None:
    store.save_state(1, Memory(vector(1)))
    store.close()
    with pytest.raises(StoreError, match="already holds this run; add --resume"):
        RunStore.open(store.path, Config())
    assert rounds(RunStore.open(store.path, Config(), resume=True)) == [1]


def test_resume_of_nothing_starts(tmp_path: Path) -> None:
    with RunStore.open(tmp_path / "deep" / "run", Config(), resume=True) as store:
        assert store.config() == Config()


@pytest.mark.parametrize("resume", [False, True])
def test_a_foreign_folder_is_refused(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(StoreError, match="not empty and not a run directory"):
        RunStore.open(tmp_path, Config(), resume=resume)
    assert [p.name for p in tmp_path.iterdir()] == ["config.toml"]
    with pytest.raises(StoreError, match="is a file"):
        RunStore.open(tmp_path / "config.toml", Config(), resume=resume)
    with pytest.raises(StoreError, match="not a run directory"):
        RunStore.read(tmp_path)


def test_a_reader_needs_no_lock_and_cannot_write(store: RunStore) -> None:
    store.save_state(1, memory(1))
    reader = RunStore.read(store.path)
    assert reader.config() == Config()
    assert same(loaded(reader)[1], memory(1))
    for write in (lambda: reader.save_state(2, memory(2)), lambda: reader.append_metrics([]), lambda: reader.trim_metrics(0)):
        with pytest.raises(StoreError, match="opened for reading only"):
            write()


# --- what a run writes ---


def test_metrics_are_trimmed_to_the_committed_round(store: RunStore) -> None:
    rows = [{"round": r, "client": "é", "loss": 0.1 * r} for r in range(1, 4)]
    store.append_metrics(rows[:2])
    store.save_state(2, Memory(vector(2)))
    path = store.path / "metrics.jsonl"
    expected = path.read_bytes()
    store.append_metrics(rows[2:])
    assert store.read_metrics() == rows
    with path.open("ab") as file:
        file.write(b'{"round": 1, "cli')  # cut off by a kill
    assert store.read_metrics() == rows
    store.trim_metrics(2)
    assert path.read_bytes() == expected
    store.trim_metrics(0)
    assert path.read_bytes() == b""


def test_trimming_without_metrics_makes_no_file(store: RunStore) -> None:
    store.trim_metrics(0)
    assert not (store.path / "metrics.jsonl").exists()


def test_bad_metrics_are_refused(store: RunStore) -> None:
    with pytest.raises(StoreError, match=r"metrics.jsonl: round 2: a number is NaN or infinite"):
        store.append_metrics([{"round": 1, "loss": 0.0}, {"round": 2, "loss": float("nan")}])
    assert store.read_metrics() == []  # all rows or none
    with pytest.raises(StoreError, match="needs an integer 'round'"):
        store.append_metrics([{"loss": 0.0}])


# --- files ---


def test_json_is_strict() -> None:
    assert files.json_text({"b": 1, "a": [None, 0.1]}, "x") == '{"b":1,"a":[null,0.1]}'
    with pytest.raises(StoreError, match=r"x: a number is NaN"):
        files.json_text({"k": float("nan")}, "x")
    with pytest.raises(StoreError, match=r"x: not made of JSON values"):
        files.json_text({"k": torch.zeros(1)}, "x")


def test_arrays_have_the_same_bytes_whatever_the_order_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, path = {"W": np.array([[0.0, np.nan]]), "names": np.array(["a", "é"]), "none": np.zeros(0)}, tmp_path / "distances.npz"
    files.write_arrays(path, arrays)
    first = path.read_bytes()
    monkeypatch.setattr("time.time", lambda: 2e9)
    files.write_arrays(path, dict(reversed(arrays.items())))
    assert path.read_bytes() == first
    back = files.read_arrays(path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
    with pytest.raises(StoreError, match="bad holds Python objects"):
        files.write_arrays(path, {"bad": np.array([object()])})


def test_models_are_plain_safetensors(tmp_path: Path) -> None:
    tensors = {
        "w": vector(1).reshape(10, 100),
        "flag": torch.tensor([True, False, True]),
        "n": torch.tensor(5),
        "h": torch.ones(3, dtype=torch.bfloat16),
    }
    metadata, path = {"classes": '["0", "1"]', "recipe": "{}"}, tmp_path / "cluster-0.safetensors"
    files.write_tensors(path, tensors, metadata)
    official = load_file(path)
    assert official.keys() == tensors.keys() and all(torch.equal(official[k], tensors[k]) for k in tensors)
    read, read_metadata = files.read_tensors(path)
    assert read_metadata == metadata and all(torch.equal(read[k], tensors[k]) for k in tensors)
    first = path.read_bytes()
    files.write_tensors(path, dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert path.read_bytes() == first
    with pytest.raises(StoreError, match="z: expected a dense tensor"):
        files.write_tensors(path, {"z": torch.zeros(2, dtype=torch.complex64)})
