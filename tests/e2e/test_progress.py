"""What long runs say of themselves where there is no terminal to draw on."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from emdcfl.cli.compare import ComparisonProgress
from emdcfl.runs.config import Choice, Config
from emdcfl.runs.watching import progress
from emdcfl.runs.watching.forecast import Forecast
from emdcfl.studies.compare import Job

SITES = ("a", "b", "c", "d")
JOB = Job(Config(scenario=Choice("rotated-digits"), method=Choice("fedavg")), "key")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(t=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now.t, perf_counter=lambda: now.t))
    return now


def test_pace_counts_trained_clients_and_says_what_is_left(clock: SimpleNamespace) -> None:
    pace = progress.Pace()
    assert str(pace) == "before round 1"
    pace.begin(1, 10, SITES)
    clock.t += 20
    pace.reply("train", "a", {"loss": 0.5})
    pace.reply("train", "a", {"loss": 0.5})  # asked twice, trained once
    pace.reply("describe", "b", {"n": 1})
    assert str(pace) == "round 1/10, training 1 of 4 clients"  # too early to say more
    clock.t += 20
    pace.reply("train", "b", {"loss": 0.5})
    assert pace.left == pytest.approx(40 / 0.5 * 9.5)
    assert str(pace) == "round 1/10, training 2 of 4 clients, about 13 min to go"


def test_pace_of_a_resumed_run_counts_its_own_rounds(clock: SimpleNamespace) -> None:
    pace = progress.Pace()
    pace.begin(8, 10, SITES)
    clock.t += 100
    assert pace.left is None  # nobody trained yet
    pace.begin(9, 10, SITES)
    assert pace.left == pytest.approx(200)
    pace.begin(10, 10, SITES)
    clock.t += 100
    for site in SITES:
        pace.reply("train", site, {"loss": 0.1})
    assert pace.left == 0.0


def test_a_first_reply_of_clients_that_train_at_once_promises_nothing(clock: SimpleNamespace) -> None:
    sites, pace = tuple(f"s{i}" for i in range(40)), progress.Pace()
    pace.begin(1, 10, sites)
    clock.t += 120
    pace.reply("train", "s0", {"loss": 0.5})
    assert pace.left is None
    for site in sites:
        pace.reply("train", site, {"loss": 0.5})
    assert pace.left == pytest.approx(120 * 9)
    pace.begin(2, 10, sites)
    clock.t += 100
    pace.reply("train", "s0", {"loss": 0.5})
    assert pace.left == pytest.approx(20 + 120 * 8)


def test_pace_begins_anew_with_the_next_run(clock: SimpleNamespace) -> None:
    pace = progress.Pace()
    pace.begin(1, 1, SITES)
    clock.t += 1000
    pace.begin(1, 2, SITES)
    clock.t += 40
    pace.reply("train", "a", {"loss": 0.5})
    assert pace.left == pytest.approx(40 / 0.25 * 1.75)


@pytest.mark.parametrize("quiet", [False, True])
def test_a_long_comparison_speaks_once_a_minute(clock: SimpleNamespace, quiet: bool) -> None:
    text = io.StringIO()
    with ComparisonProgress(Console(file=text, width=200), quiet=quiet) as screen:
        screen.launch(JOB, 3, 6)
        screen.begin(1, 2, SITES)
        for site in SITES:
            clock.t += 40
            screen.reply("train", site, {"loss": 0.5})
    assert text.getvalue().splitlines() == (
        []
        if quiet
        else [
            "4 of 6 runs to do",
            "fedavg on rotated-digits, seed 0: round 1/2, training 2 of 4 clients, about 4 min to go",
            "fedavg on rotated-digits, seed 0: round 1/2, training 4 of 4 clients, about 3 min to go",
        ]
    )


def test_a_long_run_speaks_once_a_minute(clock: SimpleNamespace) -> None:
    text = io.StringIO()
    with progress.Live(Console(file=text, width=200)) as live:
        live.begin(1, 1, SITES)
        for site in SITES:
            clock.t += 61
            live.reply("train", site, {"loss": 0.5})
    assert text.getvalue().splitlines()[1] == "round 1/1, training 2 of 4 clients, about 2 min to go  122 s"
    assert len(text.getvalue().splitlines()) == 4


def test_on_a_terminal_the_picture_names_who_runs(clock: SimpleNamespace) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    screen = ComparisonProgress(console)
    screen.launch(JOB, 1, 2)
    assert str(screen._picture().renderables[-1]) == "fedavg on rotated-digits, seed 0"
    screen.begin(1, 2, SITES)
    assert str(screen._picture().renderables[-1]) == "fedavg on rotated-digits, seed 0: round 1/2, training 0 of 4 clients"


def test_a_forecast_counts_every_reply_and_learns_from_the_time_it_took(clock: SimpleNamespace) -> None:
    forecast = Forecast({"training": 80.0, "comparing": 20.0, "baselines": 100.0}, {"train": 10.0, "project": 5.0})
    pace = progress.Pace(forecast)
    pace.begin(1, 2, SITES)
    clock.t += 5
    assert pace.left == 200.0
    pace.reply("train", "a", {"loss": 0.5})
    clock.t += 35
    pace.reply("train", "b", {"loss": 0.5})
    assert pace.left == pytest.approx((200 - 20) * 40 / 20)  # twice as slow as expected
    pace.reply("project", "a", {})
    assert str(pace) == "round 1/2, comparing 1 of 4 clients, about 5 min to go"
    pace.begin(1, 2, SITES)  # the first baseline: what is left goes on
    assert pace.left == pytest.approx((200 - 25) * 40 / 25)
