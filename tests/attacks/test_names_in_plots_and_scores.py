"""Names are text in plots, and a client cannot name the tests it is scored by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import tiny
from tests.trust.liars import LyingFederation

from emdcfl.core.units import plot_text
from emdcfl.data import scenarios
from emdcfl.data.picture import grid
from emdcfl.methods import make
from emdcfl.methods.base import Distances
from emdcfl.paper.plots import Panel, matrices, overview
from emdcfl.runs.figures import heatmap, margin_plot, png
from emdcfl.runs.loop import play
from emdcfl.runs.verdict.intervals import SiteScores, difference

NAMES = ["$^$", "$x", "\\$\\frac$", "a\x1b[2J\ud800\x00b", "$" * 500]


def distances(n: int) -> Distances:
    w = np.full((n, n), 0.5)
    return Distances(w, np.zeros(n), np.ones((n, n)), np.ones((n, n), np.int8))


def test_a_run_is_drawn_whatever_its_clients_are_called() -> None:
    for draw in (heatmap, margin_plot):
        assert png(draw(distances(len(NAMES)), NAMES, [0, 0, 1, 1, 1])).startswith(b"\x89PNG")


def test_figures_of_the_paper_are_drawn_whatever_names_are() -> None:
    n = len(NAMES)
    panel = Panel(NAMES[0], np.ones((n, n)), NAMES)
    assert matrices([panel], label="W", title="t").startswith(b"\x89PNG")
    points = [(name, np.ones((3, 2))) for name in NAMES]
    assert overview(points, panel, np.ones((n, n)), [0] * n, NAMES).startswith(b"\x89PNG")


def test_a_scenario_is_drawn_whatever_its_groups_are_called(tmp_path: Path) -> None:
    built = scenarios.build("rotated-digits")
    groups = {site.name: NAMES[i % 4] for i, site in enumerate(built.sites)}
    assert grid(replace(built, name="$^$", groups=groups), tmp_path / "grid.png").stat().st_size > 0


def test_a_name_is_shown_as_it_is_written() -> None:
    from matplotlib.text import Text

    text = Text(text=plot_text("$^$"))
    assert text._preprocess_math(text.get_text()) == ("$^$", False)  # type: ignore[attr-defined]


def test_a_claim_of_many_test_samples_gives_no_site_more_than_its_share() -> None:
    values, others = (0.8,) * 7 + (0.0,), (0.5,) * 7 + (1.0,)
    for claimed in (100, 10**8):
        counts = (100,) * 7 + (claimed,)
        found = difference(SiteScores(values, counts), SiteScores(others, counts))
        assert found is not None and found.mean == pytest.approx((7 * 0.3 - 1) / 8)


@pytest.mark.parametrize(
    "lie",
    [
        {"accuracy": {"other": 1.0}, "loss": {"other": 0.0}, "n": {"other": 3}},
        {"accuracy": {}, "loss": {}, "n": {}},
        {"accuracy": {"test": 1.0, "\x1b[2J": 1.0}, "loss": {"test": 0.0}, "n": {"test": 3}},
        {"accuracy": {"test": 1.0}, "loss": {"test": 0.0}, "n": {"other": 3}},
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_test_reply_about_other_variants_counts_as_failed(lie: dict[str, Any], known: bool) -> None:
    if not known and len({tuple(value) for value in lie.values()}) == 1:
        pytest.skip("consistent, and nobody knows the variants")
    fed = LyingFederation(tiny(), lie=lambda fed, task, asked, reply: lie if task == "test" else reply)
    variants = {site.name: tuple(site.tests) for site in tiny().sites} if known else None
    *_, last = play(fed, make("fedavg"), rounds=1, variants=variants)
    rows = {row["client"]: row["accuracy"] for row in last.rows}
    assert rows["site-1"] is None
    assert all(list(found) == ["test"] for client, found in rows.items() if client != "site-1")
    assert [f.client for f in fed.failures] == ["site-1"]
