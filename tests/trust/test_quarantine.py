"""A reply that breaks the rules keeps its sender out: of the round, and of the run if it goes on."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.core.test_federation import BAD, Tampering, lost
from tests.tiny import SequentialFederation, Stop, config, contents, same_bits, tiny
from tests.trust.liars import LyingFederation, bad_boxes, not_a_number

from emdcfl.core.client import TaskInfo
from emdcfl.core.errors import ClientError, QuorumError
from emdcfl.core.federation import Failure, Inputs
from emdcfl.core.schema import Reply
from emdcfl.methods import make
from emdcfl.runs import runner
from emdcfl.runs.loop import NoOpObserver, play
from emdcfl.runs.plan import plan
from emdcfl.trust import Trust

NAN = BAD["theta is NaN"][0]


def counting(fed: Any) -> Counter[tuple[str, str, int]]:
    """Count who is asked for what, by round."""
    asked: Counter[tuple[str, str, int]] = Counter()
    dispatch = fed._dispatch

    def watched(info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        asked.update((c, info.name, fed.index) for c in inputs)
        return dispatch(info, inputs, common)

    fed._dispatch = watched
    return asked


def test_a_violation_keeps_a_client_out_of_the_round_and_three_out_of_the_run() -> None:
    fed = Tampering({"site-1": NAN}, on_failure="continue")
    asked = counting(fed)
    finished = list(play(fed, make("fedavg"), rounds=5))
    assert [asked["site-1", "train", t] for t in range(1, 6)] == [1, 1, 1, 0, 0]
    assert not any(asked["site-1", "test", t] for t in range(1, 6))
    assert all(asked["site-0", task, t] == 1 for task in ("train", "test") for t in range(1, 6))
    listed = [(q["client"], q["round"], q["task"], q["for"]) for q in fed.guard.ledger.quarantined()]
    assert listed == [("site-1", 1, "train", "round"), ("site-1", 2, "train", "round"), ("site-1", 3, "train", "run")]
    assert "not finite" in fed.guard.ledger.quarantined()[0]["reason"]
    assert len(fed.failures) == 3  # each refused reply once, not each task it was then left out of
    row = next(r for r in finished[-1].rows if r["client"] == "site-1")
    assert row["accuracy"] is None


def test_the_others_train_as_if_it_were_not_there() -> None:
    lying = Tampering({"site-1": NAN}, on_failure="continue")
    silent = Tampering({"site-1": lost}, on_failure="continue")
    a, b = (list(play(fed, make("fedavg"), rounds=3))[-1].serving.models for fed in (lying, silent))
    assert same_bits(a, b)


def test_a_missing_answer_is_no_violation() -> None:
    fed = Tampering({"site-1": lost}, on_failure="continue")
    asked = counting(fed)
    list(play(fed, make("fedavg"), rounds=5))
    assert all(asked["site-1", "train", t] == 1 for t in range(1, 6)) and fed.guard.ledger.quarantined() == []


def test_max_faults_is_a_setting() -> None:
    fed = Tampering({"site-1": NAN}, on_failure="continue", trust=Trust(max_faults=1))
    asked = counting(fed)
    list(play(fed, make("fedavg"), rounds=3))
    assert [asked["site-1", "train", t] for t in (1, 2, 3)] == [1, 0, 0]


def test_a_repeated_round_counts_once_and_asks_again() -> None:
    liars = dict.fromkeys(("site-0", "site-1", "site-2"), NAN)
    fed = Tampering(liars, tries=2, on_failure="continue", trust=Trust(max_faults=2))
    finished = list(play(fed, make("fedavg"), rounds=1, retries=2))
    assert len(finished) == 1  # in the third try they were honest
    assert [(q["client"], q["round"], q["for"]) for q in fed.guard.ledger.quarantined()] == [(c, 1, "round") for c in liars]


def test_a_bad_reply_ends_a_run_that_does_not_continue() -> None:
    with pytest.raises(ClientError, match=r"client 'site-1' failed in round 1 \(train\): .*not finite"):
        list(play(Tampering({"site-1": NAN}), make("fedavg"), rounds=1))


def test_few_participants_are_drawn_from_those_who_are_left() -> None:
    fed = Tampering(
        dict.fromkeys(("site-0", "site-1", "site-2"), NAN), on_failure="continue", number=1, trust=Trust(max_faults=1), quorum=0.01
    )
    for client in ("site-0", "site-1", "site-2"):
        fed.guard.ledger.begin(1)
        fed.guard.ledger.fault(client, "train", "NaN")
    assert {fed.begin(t).participants for t in range(2, 12)} == {("site-3",)}
    fed.guard.ledger.fault("site-3", "train", "NaN")
    with pytest.raises(QuorumError, match="all are quarantined"):
        fed.begin(12)


def test_its_last_good_state_is_not_averaged_for_ever() -> None:
    """EMD-CFL averages members' latest states; a client that is left out for good takes its own with it."""

    def later(fed: LyingFederation, task: str, asked: Any, reply: Reply) -> Reply:
        return not_a_number(fed, task, asked, reply) if fed.index > 1 else reply

    fed = LyingFederation(tiny(), lie=later, trust=Trust(max_faults=1))
    finished = list(play(fed, make("emdcfl", tolerance=0.08), rounds=3))
    state = finished[-1].state
    assert state.labels["site-0"] == state.labels["site-1"]  # it was linked in round 1
    assert same_bits(state.models[state.labels["site-0"]], state.latest["site-0"])


def test_nobody_is_asked_about_somebody_who_is_left_out() -> None:
    fed = LyingFederation(tiny(), lie=bad_boxes, trust=Trust(max_faults=1))
    asked = counting(fed)
    finished = list(play(fed, make("emdcfl", tolerance=0.08), rounds=2))
    assert asked["site-0", "reference", 1] == 1 and fed.guard.ledger.banned("site-1")
    assert not any(task in ("reference", "project") and t == 2 for _, task, t in asked)
    assert finished[-1].state.labels["site-2"] == finished[-1].state.labels["site-3"]


def lying_plan(monkeypatch: pytest.MonkeyPatch, liar: str = "site-1") -> None:
    """Every federation of the runner has a liar from here on."""

    def federation(self: runner.RunPlan) -> Any:
        options = {"training": self.training, "seed": self.config.run.seed, "run": self.name, "trust": self.config.trust}
        return LyingFederation(self.scenario, liar=liar, lie=not_a_number, **options)

    monkeypatch.setattr(runner.RunPlan, "federation", federation)


def test_the_account_survives_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lying_plan(monkeypatch)
    chosen = config(method="fedavg", rounds=5)
    summary = runner.run(chosen, tmp_path / "whole").summary
    assert [(q["round"], q["for"]) for q in summary["quarantined"]] == [(1, "round"), (2, "round"), (3, "run")]

    class Stopping(NoOpObserver):
        def end(self, index: int, total: int, rows: Any, serving: Any) -> None:
            if index == 2:
                raise Stop  # round 2 is played, and its violation counted, but not saved

    with pytest.raises(Stop):
        runner.run(chosen, tmp_path / "cut", observer=Stopping())
    again = runner.run(chosen, tmp_path / "cut", resume=True).summary
    assert again["quarantined"] == summary["quarantined"]
    whole, cut = (contents(tmp_path / name) for name in ("whole", "cut"))
    for found in (whole, cut):
        found["summary.json"].pop("sha256", None)  # of the text, in which the times are
    assert cut == whole
    stored = json.loads((tmp_path / "cut" / "summary.json").read_text())
    assert stored["quarantined"][-1]["for"] == "run" and "not finite" in stored["quarantined"][-1]["reason"]


def test_terminal_and_page_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from emdcfl.cli.show import show_result
    from emdcfl.report import write_report

    lying_plan(monkeypatch)
    out = tmp_path / "run"
    summary = runner.run(config(method="fedavg", rounds=3), out).summary
    summary = dict(summary)
    summary["flags"] = [{"client": "site-2", "what": "update norm", "first": 1, "last": 2, "times": 2, "value": 9.0, "typical": 1.0}]
    summary["failures"] = [{"client": "site-0", "round": r, "task": t, "reason": "no file"} for r in (1, 2) for t in ("train", "test")]
    console = Console(record=True, width=200)
    show_result(console, summary, [], out)
    text = console.export_text()
    assert text.count("missing: ") == 1 and "missing: site-0 4 times in rounds 1 to 2 (train, test): no file" in text
    assert "quarantined for the run: site-1 in round 3 (train): theta holds values that are not finite" in text
    assert "update norm of site-2, 9 against a median of 1 (in 2 rounds from round 1 on)" in text
    (out / "summary.json").write_text(json.dumps(summary))
    page = write_report(out).read_text()
    assert "Quarantined clients" in page and "1 client sent invalid replies" in page
    assert "the run" in page and "Outlying values" in page and "1 outlying value" in page


def test_a_violation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        list(play(Tampering({"site-1": NAN}, on_failure="continue"), make("fedavg"), rounds=1))
    assert "client 'site-1' failed in round 1 (train)" in caplog.text and "not asked again in this round" in caplog.text


@pytest.mark.slow
def test_an_ordinary_run_has_a_clean_account(tmp_path: Path) -> None:
    summary = runner.run(config(rounds=2), tmp_path / "run").summary
    assert summary["quarantined"] == [] and summary["flags"] == []
    assert isinstance(plan(config()).federation(), SequentialFederation)
