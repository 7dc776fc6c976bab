"""One self-contained HTML page per run or comparison.

A page loads nothing from the network, and its content policy allows no script but its own.
"""

from __future__ import annotations

from emdcfl.report.page import render, write_report

__all__ = ["render", "write_report"]
