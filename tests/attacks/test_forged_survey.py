"""A node forges its answers to the survey: it is left out, and what the others agree on holds no trace of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from flwr.app import Message
from fuzz.fuzz_survey import TABLE
from tests.engines.flower.loopback import QUICK
from tests.engines.flower.test_node import HomeGrid, home, own

from emdcfl.core.errors import ClientError
from emdcfl.data import scenarios
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.session import Session, session
from emdcfl.engines.flower.survey_outliers import FACTOR, limited
from emdcfl.engines.flower.survey_replies import check_answer
from emdcfl.privacy.keylist import KeyList

DESCRIBE = {"question": "describe", "seed": 0, "label": None}
MEASURE_IMAGES = {"question": "measure", "seed": 0, "shape": [1, 8, 8]}
MEASURE_TABLE = {"question": "measure", "seed": 0, "label": None, "numeric": ["age"], "categorical": ["ward"]}

HONEST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "images": (DESCRIBE, {"kind": "images", "labels": ["cat", "dog"], "colour": False, "sizes": [[12, 12, 40]]}),
    "table": (DESCRIBE, TABLE),
    "pixels": (MEASURE_IMAGES, {"count": 64, "sums": torch.tensor([640.0]).double(), "squares": torch.tensor([6400.0]).double()}),
    "moments": (
        MEASURE_TABLE,
        {"numeric": {"age": {"count": 9, "mean": 40.0, "deviation": 3.5, "missing": 1}}, "words": {"ward": ["north", "süd"]}},
    ),
}

Path_ = tuple[str | int, ...]
FORGED: dict[str, tuple[str, Path_, Any]] = {
    "no kind": ("table", ("kind",), None),
    "another kind": ("table", ("kind",), "pickle"),
    "kind is a list": ("table", ("kind",), ["table"]),
    "no labels": ("images", ("labels",), []),
    "labels as text": ("images", ("labels",), "ab"),
    "200,000 classes": ("images", ("labels",), [str(i) for i in range(200_000)]),
    "the same label twice": ("images", ("labels",), ["a", "a"]),
    "labels of other types": ("images", ("labels",), [1, None]),
    "labels that hash alike": ("table", ("labels",), [True, 1]),
    "a label of a megabyte": ("table", ("labels",), ["a", "b" * (1 << 20)]),
    "half a character": ("table", ("labels",), ["a", "\ud800"]),
    "colour as number": ("images", ("colour",), 1),
    "a size of two numbers": ("images", ("sizes",), [[12, 12]]),
    "a negative size": ("images", ("sizes",), [[-12, 12, 40]]),
    "a huge size": ("images", ("sizes",), [[2**40, 2**40, 2**62]]),
    "a size as text": ("images", ("sizes",), ["12x12"]),
    "a size with truth values": ("images", ("sizes",), [[True, True, True]]),
    "sizes as dict": ("images", ("sizes",), {"12": 12}),
    "label is None": ("table", ("label",), None),
    "columns as list": ("table", ("columns",), ["age", "ward"]),
    "columns without number": ("table", ("columns",), {str(i): True for i in range(100_001)}),
    "columns with text": ("table", ("columns",), {"age": "yes"}),
    "count zero": ("pixels", ("count",), 0),
    "count negative": ("pixels", ("count",), -64),
    "count true": ("pixels", ("count",), True),
    "count of 300 digits": ("pixels", ("count",), 10**300),
    "sums not finite": ("pixels", ("sums",), torch.tensor([math.nan]).double()),
    "sums of another width": ("pixels", ("sums",), torch.zeros(3).double()),
    "sums without axis": ("pixels", ("sums",), torch.tensor(3.0).double()),
    "sums of another type": ("pixels", ("sums",), torch.zeros(1)),
    "sums as list": ("pixels", ("sums",), [1.0]),
    "pixels brighter than white": ("pixels", ("sums",), torch.tensor([1e9]).double()),
    "squares below what the sums need": ("pixels", ("squares",), torch.tensor([1.0]).double()),
    "squares infinite": ("pixels", ("squares",), torch.tensor([math.inf]).double()),
    "a column more": ("moments", ("numeric", "weight"), {"count": 9, "mean": 40.0, "deviation": 3.5, "missing": 1}),
    "no columns": ("moments", ("numeric",), {}),
    "moments as list": ("moments", ("numeric", "age"), [9, 40.0, 3.5, 1]),
    "mean is NaN": ("moments", ("numeric", "age", "mean"), math.nan),
    "mean is 1e300": ("moments", ("numeric", "age", "mean"), 1e300),
    "deviation negative": ("moments", ("numeric", "age", "deviation"), -1.0),
    "deviation infinite": ("moments", ("numeric", "age", "deviation"), math.inf),
    "count of a trillion": ("moments", ("numeric", "age", "count"), 10**12),
    "missing negative": ("moments", ("numeric", "age", "missing"), -5),
    "a moment more": ("moments", ("numeric", "age", "skew"), 1.0),
    "words as text": ("moments", ("words", "ward"), "north"),
    "words of numbers": ("moments", ("words", "ward"), [1, 2]),
    "words twice": ("moments", ("words", "ward"), ["a", "a"]),
    "words without number": ("moments", ("words", "ward"), [str(i) for i in range(300)]),
}


def put(value: Any, keys: Path_, new: Any) -> Any:
    changed = copy.deepcopy(value)
    at = changed
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = new
    return changed


@pytest.mark.parametrize("kind", HONEST)
def test_honest_answers_are_taken(kind: str) -> None:
    check_answer(*HONEST[kind])


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_answer_is_refused_in_one_short_line(what: str) -> None:
    kind, keys, value = FORGED[what]
    question, reply = HONEST[kind]
    with pytest.raises(ClientError) as caught:
        check_answer(question, put(reply, keys, value))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("kind", HONEST)
def test_a_field_more_or_less_is_refused(kind: str) -> None:
    question, reply = HONEST[kind]
    for changed in ({**reply, "more": 1}, dict(list(reply.items())[:-1]), {}):
        with pytest.raises(ClientError):
            check_answer(question, changed)


LIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "200,000 classes": lambda said: {**said, "labels": [str(i) for i in range(200_000)]} if "labels" in said else said,
    "NaN means": lambda said: put(said, ("numeric", "age", "mean"), math.nan) if "numeric" in said else said,
    "nothing": lambda said: {},
    "another kind": lambda said: {**said, "kind": "images", "sizes": []} if "kind" in said else said,
}


@pytest.mark.parametrize("lie", LIES)
def test_the_others_agree_without_the_forger(lie: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = own(tmp_path, "tables")
    places = {name: home(tmp_path / f"home-{name}", data=str(data / f"{name}.csv")) for name in ("a", "b", "c")}
    grid = HomeGrid({i: (name, place) for i, (name, place) in enumerate(places.items(), start=1)})

    def forge(message: Message, answer: Callable[[Message], Message]) -> Message:
        reply = answer(message)
        if message.metadata.message_type == "query.survey":
            said = codec.decode(reply.content)
            reply.content = codec.encode({**said, "reply": LIES[lie](said["reply"])})
        elif message.metadata.message_type == "query.hello":  # describe comes with the greeting
            said = codec.decode(reply.content)
            told = said["survey"]
            reply.content = codec.encode({**said, "survey": {**told, "reply": LIES[lie](told["reply"])}})
        return reply

    grid.tamper[3] = forge
    with session(Session(grid, QUICK, KeyList())):
        found = scenarios.build("nodes", clients=["a", "b", "c"])
    assert found.classes == ("0", "1")
    (age, ward) = found.encoding["columns"]  # type: ignore[index]
    assert 40 < age["mean"] < 50
    assert 0 < age["std"] < 10
    assert ward["words"] == ["north", "south"]
    assert "client 'c' did not answer the survey" in caplog.text


RUINOUS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a mean far away": lambda told: {**told, "mean": 1e6},
    "a huge spread": lambda told: {**told, "deviation": 1e16},
    "endless equal values": lambda told: {**told, "count": 10**8, "deviation": 0.0},
}


def _agreed(tmp_path: Path, kind: str, lie: Callable[[dict[str, Any]], dict[str, Any]] | None) -> Any:
    """Return what three nodes agree on, of which the third lies."""
    data = own(tmp_path, kind)
    files = {name: data / (name if kind == "images" else f"{name}.csv") for name in ("a", "b", "c")}
    grid = HomeGrid({i: (name, home(tmp_path / f"home-{name}", data=str(path))) for i, (name, path) in enumerate(files.items(), start=1)})

    def forge(message: Message, answer: Callable[[Message], Message]) -> Message:
        reply = answer(message)
        said = codec.decode(reply.content)
        if lie is not None and message.metadata.message_type == "query.survey":
            told = said["reply"]
            changed = {**told, "numeric": {"age": lie(told["numeric"]["age"])}} if "numeric" in told else lie(told)
            reply.content = codec.encode({**said, "reply": changed})
        return reply

    grid.tamper[3] = forge
    with session(Session(grid, QUICK, KeyList())):
        return scenarios.build("nodes", clients=["a", "b", "c"])


@pytest.mark.parametrize("lie", RUINOUS)
def test_one_node_cannot_ruin_the_standardisation_of_the_others(lie: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "honest").mkdir()
    honest, age = (_agreed(p, "tables", told).encoding["columns"][0] for p, told in ((tmp_path / "honest", None), (tmp_path, RUINOUS[lie])))
    assert abs(age["mean"] - honest["mean"]) < FACTOR * honest["std"]
    assert 1 / FACTOR < age["std"] / honest["std"] < FACTOR
    assert "client 'c': mean and spread of column 'age' are far from the others'" in caplog.text


def test_a_site_of_another_kind_keeps_the_standardisation_within_reach() -> None:
    rare, usual = (300, 0.01, 3.0), (300, 20.0, 7500.0)  # what hardly occurs elsewhere
    found = limited([rare, rare, rare, usual])
    assert found is not None and found[0] == 3
    count, mean, deviation = found[1]
    assert count == 300 and 0 < deviation <= usual[2]
    assert 2 < mean < 20, "its true mean is fewer than ten of the pooled spreads away"


def test_a_false_mean_among_thousands_is_found() -> None:
    assert limited([*[(100, i % 7, 900.0) for i in range(8000)], (100, 1e6, 900.0)]) == (8000, (100, pytest.approx(111, abs=1), 900.0))


def test_endless_black_images_count_as_many_as_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    black = {"count": 1 << 44, "sums": torch.zeros(1).double(), "squares": torch.zeros(1).double()}
    assert (
        _agreed(tmp_path, "images", lambda told: {**black, "sums": 0 * told["sums"], "squares": 0 * told["squares"]}).preprocess.std[0]
        > 0.05
    )
    assert "the brightness of its images" in caplog.text
