"""The sentence that says whether grouping pays."""

from __future__ import annotations

from typing import Any

import pytest

from emdcfl.runs.verdict import worth


def summary(mean: float, k: int = 3, samples: int = 400) -> dict[str, Any]:
    return {"k": k, "accuracy": {"mean": mean, "samples": samples}}


@pytest.mark.parametrize(
    ("k", "together", "alone", "words"),
    [
        (3, 0.7, 0.8, "grouping pays: +20.0 points against one model for all, +10.0 points against every site alone"),
        (3, 0.7, 0.95, "grouping does not pay here: +20.0"),
        (3, 0.7, 0.91, "grouping is better than one model for all, level with every site alone on 400 test samples: +20.0"),
        (3, 0.91, 0.7, "grouping is better than every site alone, level with one model for all on 400 test samples: -1.0"),
        (3, 0.9, 0.91, "grouping makes little difference on 400 test samples: +0.0"),
        (1, 0.9, 0.8, "all sites belong together, so grouping is one model for all: +0.0"),
    ],
)
def test_verdict(k: int, together: float, alone: float, words: str) -> None:
    assert worth(summary(0.9, k), {"fedavg": summary(together), "local": summary(alone)}).startswith(words)
