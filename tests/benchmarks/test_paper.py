"""The queue at paper scale."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import paper
from emdcfl.engines.cuda.engine import ONE_AFTER_THE_OTHER
from emdcfl.studies.compare import TITLES
from emdcfl.studies.results import read_results

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs/results/data"


def test_the_queue_holds_every_method_and_knows_finished_rows() -> None:
    queue = paper.queue()
    assert len(set(queue)) == len(queue)
    for scenario in ("pacs", "rotated-mnist", "backdoor-mnist"):
        asked = {run.method.partition(":")[0] for run in queue if run.scenario == scenario and run.seed == 0 and not run.settings}
        assert asked == set(TITLES)
    row = next(r for r in read_results(DATA / "pacs.jsonl") if r["method"] == "oracle") | {"commit": None}
    assert not any(run.is_row(row) for run in queue)  # not known what made it
    row["commit"] = "made here"
    matching = [run for run in queue if run.is_row(row)]
    assert [(r.scenario, r.method, r.seed, r.settings) for r in matching] == [("pacs", "oracle", 0, ())]
    row["settings"]["run"]["rounds"] = 1
    assert not any(run.is_row(row) for run in queue)


def test_weights_are_looked_for_where_runs_find_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, file in (("pacs", "train-0.parquet"), ("weights", "resnet18-f37072fd.pth")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).touch()
    monkeypatch.setenv("EMDCFL_DATA", str(tmp_path))
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "none"))
    monkeypatch.delenv("EMDCFL_WEIGHTS", raising=False)
    assert not paper.available(paper.Wanted("pacs", "oracle"))
    monkeypatch.setenv("EMDCFL_WEIGHTS", str(tmp_path / "weights"))
    assert paper.available(paper.Wanted("pacs", "oracle"))


FAKE = """
import json, sys, time
from pathlib import Path
out, template = Path(sys.argv[1]), json.loads(sys.argv[2])
time.sleep(0.2)
(out / "results.jsonl").write_text(json.dumps(template) + chr(10))
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A queue of three runs that take a fifth of a second; the list names those begun."""
    begun: list[str] = []
    template = read_results(DATA / "pacs.jsonl")[0] | {"commit": "made here"}

    def command(self: paper.Wanted, out: Path, device: str) -> list[str]:
        begun.append(self.name)
        row: dict[str, Any] = json.loads(json.dumps(template))
        for key, value in self.asks().items():
            table, _, name = key.partition(".")
            row["settings"][table][name] = value
        row |= {"config": self.name, "seed": self.seed, "method": self.method}
        return [sys.executable, "-c", "import sys; sys.exit('broken')" if self.seed == 2 else FAKE, str(out), json.dumps(row)]

    sleep = paper.time.sleep
    monkeypatch.setattr(paper.time, "sleep", lambda seconds: sleep(seconds / 20))
    monkeypatch.setattr(paper.Wanted, "command", command)
    monkeypatch.setattr(paper, "queue", lambda: [paper.Wanted("rotated-digits", "oracle", seed) for seed in (0, 1, 2)])
    return begun


def test_each_run_once_and_a_failed_one_does_not_stop_the_rest(tmp_path: Path, fake: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    work = paper.Queue(tmp_path, [], at_once=2, device="cpu")
    work.play(20)
    assert {row["seed"] for row in read_results(tmp_path)} == {0, 1}
    assert [run.seed for run in work.failed] == [2] and "broken" in capsys.readouterr().out
    fake.clear()
    again = paper.Queue(tmp_path, [], at_once=2, device="cpu")
    assert [run.seed for run in again.left()] == [2]
    again.play(20)
    assert fake == ["rotated-digits-oracle-seed2"]


def test_a_scenario_whose_engine_gives_up_is_left_out(tmp_path: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slow = f"import time; print('warning: {ONE_AFTER_THE_OTHER}: no graph', flush=True); time.sleep(60)"
    quick, asked = paper.Wanted.command, [paper.Wanted("rotated-digits", "oracle", 0), paper.Wanted("rotated-digits", "oracle", 1)]

    def command(self: paper.Wanted, out: Path, device: str) -> list[str]:
        return quick(self, out, device) if self.scenario == "wine" else [sys.executable, "-c", slow]

    monkeypatch.setattr(paper.Wanted, "command", command)
    monkeypatch.setattr(paper, "queue", lambda: [*asked, paper.Wanted("wine", "oracle", 0)])
    work = paper.Queue(tmp_path, [], at_once=1, device="cuda")
    work.play(30)
    assert work.failed == asked[:1] and work.slow == {"rotated-digits"} and work.left() == []
    assert fake == ["wine-oracle-seed0"] and len(read_results(tmp_path)) == 1


def test_a_run_that_takes_too_long_is_stopped(tmp_path: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper.Wanted, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(paper, "queue", lambda: [paper.Wanted("rotated-digits", "oracle", 0)])
    work = paper.Queue(tmp_path, [], at_once=1, device="cpu", longest=0.5)
    work.play(30)
    assert [run.seed for run in work.failed] == [0]


def test_time_is_up(tmp_path: Path, fake: list[str]) -> None:
    work = paper.Queue(tmp_path, [], at_once=1, device="cpu")
    work.play(0.0)
    assert fake == [] and len(work.left()) == 3


def test_nothing_begins_that_cannot_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = paper.Queue(tmp_path, [], at_once=1, device="cpu")
    monkeypatch.setattr(paper.time, "monotonic", lambda: 0.0)
    known, slow, other = paper.Wanted("pacs", "ifca"), paper.Wanted("pacs", "fedem"), paper.Wanted("mnist-base", "oracle")
    assert all(work._fits(run, 1.0) for run in (known, slow, other))  # nothing is known yet
    work.took = {"pacs": 60.0, "rotated-mnist": 90.0}
    assert [[work._fits(run, left) for run in (known, slow, other)] for left in (59.0, 61.0, 241.0)] == [
        [False, False, False],
        [True, False, True],
        [True, True, True],
    ]
