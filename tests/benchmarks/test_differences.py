"""Which cells are told to differ from the paper's."""

from __future__ import annotations

from typing import Any

from benchmarks.differences import differences, full_size
from tests.studies.test_tables import row


def full(*args: Any, **settings: Any) -> dict[str, Any]:
    made = row(*args, **settings)
    made["settings"]["training"]["local_epochs"] = 10
    return made


def test_two_of_the_papers_standard_deviations() -> None:  # 92.47 ± 0.32 and 86.31 ± 1.36 there
    def told(mean: float) -> list[str]:
        one = full("emdcfl", 0, mean)
        one["accuracy"]["worst"] = 0.8631
        return [d.metric for d in differences([one])]

    assert told(0.9247 + 0.0064) == [] and told(0.9247 - 0.0064) == []
    assert told(0.9247 + 0.0066) == ["mean"] and told(0.9247 - 0.0066) == ["mean"]


def test_our_own_spread_counts_where_it_is_larger() -> None:
    rows = [full("emdcfl", seed, mean) for seed, mean in enumerate((0.93, 0.95, 0.97))]  # 95 ± 2
    assert [d.metric for d in differences(rows)] == ["worst"]


def test_says_it_in_numbers() -> None:
    (first, *_) = differences([full("fedavg", 0, 0.8462, ari=None)])
    assert (first.scenario, first.method, first.metric) == ("pacs", "fedavg", "mean")
    assert first.text() == "FedAvg, Avg acc: 84.62, paper 86.20 ± 0.66 (-1.58)"


def test_runs_of_another_size_are_not_compared() -> None:
    short = full("fedavg", 0, 0.5, run={"rounds": 1})
    small = full("fedavg", 0, 0.5, scenario_options={"scale": "small"})
    assert full_size(full("fedavg")) and not full_size(short) and not full_size(small)
    assert differences([short, small]) == []
