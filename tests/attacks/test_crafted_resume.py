"""A run directory made by hand, its checksums right: a resume refuses it in one line, or goes on; it never ends in a traceback."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests import tiny

from emdcfl.core.errors import EmdcflError, StoreError
from emdcfl.runs.config import Choice, Config, RunConfig
from emdcfl.runs.runner import run
from emdcfl.runs.scoring import check_rows

CONFIG = Config(scenario=Choice("tiny", {"n": [16], "val": [16], "test": 4}), method=Choice("fedavg"), run=RunConfig(rounds=2))
FAULT = {"m": {"round": 1, "task": "train", "reason": "x"}}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "honest"
    run(CONFIG, place)
    return place


def forge(honest: Path, place: Path, name: str, value: Any) -> None:
    """Copy the run as it was after round 1, with one thing of its account replaced."""
    shutil.copytree(honest, place)
    (place / "state/round-2.json").unlink()
    path = place / "state/round-1.json"
    body = json.loads(path.read_text())["body"]
    body["value"]["m"]["extra"]["m"][name] = value
    tiny.forge_round(path, body)


FORGED: dict[str, tuple[str, Any]] = {
    "seconds as number": ("seconds", 3),
    "seconds of text": ("seconds", {"m": {"train": "long"}}),
    "rows as number": ("rows", True),
    "rows of text": ("rows", {"l": ["x"]}),
    "rows without a client": ("rows", {"l": [{"m": {"round": 1}}]}),
    "failures as number": ("failures", 7),
    "failures of numbers": ("failures", {"l": [7]}),
    "a failure without a reason": ("failures", {"l": [{"m": {"client": "a", "task": "train", "round": 1}}]}),
    "a failure with a command": ("failures", {"l": [{"m": {"client": "a", "task": "t", "round": 1, "reason": "r", "shell": "rm"}}]}),
    "trust as text": ("trust", "everybody"),
    "faults as list": ("trust", {"m": {"faults": {"l": []}}}),
    "faults of numbers": ("trust", {"m": {"faults": {"m": {"site-0": {"l": [1]}}}}}),
    "a fault in round x": ("trust", {"m": {"faults": {"m": {"site-0": {"l": [{"m": {"round": "x", "task": "t", "reason": "r"}}]}}}}}),
    "flags without a value": ("trust", {"m": {"flags": {"l": [{"m": {"client": "a", "what": "b"}}]}}}),
    "bytes as number": ("bytes", 3.5),
    "bytes of text": ("bytes", {"m": {"train": {"m": {"to_server": "many"}}}}),
    "personal as list": ("personal", {"l": []}),
    "personal of something else": ("personal", {"m": {"states": 3}}),
    "an untested round as number": ("untested", 1),
    "an untested round without its losses": ("untested", {"m": {"round": 1}}),
    "an untested round of text": ("untested", {"m": {"round": "1", "losses": {"m": {}}, "excluded": {"m": {}}}}),
    "losses of text": ("untested", {"m": {"round": 1, "losses": {"m": {"site-0": "low"}}, "excluded": {"m": {}}}}),
    "an untested round that is to come": ("untested", {"m": {"round": 9, "losses": {"m": {}}, "excluded": {"m": {}}}}),
    "late as number": ("late", 3),
    "late of numbers": ("late", {"l": [3]}),
    "an unknown entry": ("shell", "rm -rf"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_crafted_account_is_refused_in_one_line(what: str, honest: Path, tmp_path: Path) -> None:
    forge(honest, tmp_path / "run", *FORGED[what])
    with pytest.raises(StoreError) as caught:
        run(CONFIG, tmp_path / "run", resume=True)
    assert len(str(caught.value)) < 500


def test_bytes_of_no_known_way_do_not_end_the_run(honest: Path, tmp_path: Path) -> None:
    forge(honest, tmp_path / "run", "bytes", {"m": {"train": {"m": {"sideways": 3}}}})
    assert "sideways" not in str(run(CONFIG, tmp_path / "run", resume=True).summary["bytes"])


def test_faults_of_the_honest_can_be_forged_but_not_hidden(honest: Path, tmp_path: Path) -> None:
    """Whoever can write a run directory owns its run; what it says is shown in the summary."""
    forge(honest, tmp_path / "run", "trust", {"m": {"faults": {"m": {"site-0": {"l": [FAULT]}}}}})
    assert run(CONFIG, tmp_path / "run", resume=True).summary["quarantined"][0]["client"] == "site-0"


TESTED = {"accuracy": {"t": 0.5}, "test_loss": {"t": 1.0}, "test_samples": {"t": 4}}
ROW = {"round": 1, "client": "a", "cluster": 0, "train_loss": 0.5, **TESTED}


@pytest.mark.parametrize(
    "changed",
    [
        {"round": True},
        {"round": "1"},
        {"client": 3},
        {"cluster": [0]},
        {"train_loss": "low"},
        {"accuracy": None},
        {"accuracy": {"other": 0.5}},
        {"accuracy": {"t": "high"}},
        {"accuracy": [0.5]},
        {"test_samples": {"t": [4]}},
    ],
)
def test_a_crafted_row_is_refused(changed: dict[str, Any]) -> None:
    check_rows([ROW, {**ROW, **dict.fromkeys(TESTED)}, {**ROW, "train_loss": math.nan}], "metrics.jsonl")
    with pytest.raises(EmdcflError, match=r"metrics.jsonl"):
        check_rows([ROW, {**ROW, **changed}], "metrics.jsonl")
