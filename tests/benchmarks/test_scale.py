"""Growth with the number of clients: the benchmark runs, and its rows hold what the table shows."""

from __future__ import annotations

import pytest

from benchmarks import performance_tables, scale
from emdcfl.core import federation


def test_a_row_has_what_the_table_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation, "Clock", federation.Clock)  # which it exchanges
    row = scale.measured(8, "auto")
    assert (
        row["clients"] == 8
        and row["seconds"]["train"] > 0
        and row["processor"]["train"] > 0
        and row["bytes"]["train"] > 0
        and row["report_bytes"] > 0
    )
    larger = {**row, "clients": 80, "bytes": {"train": 10 * sum(row["bytes"].values())}}
    text = performance_tables._scale([row, larger])
    assert "bytes 1.00, comparing 0.00, memory 0.00" in text and "| 80 | auto |" in text
