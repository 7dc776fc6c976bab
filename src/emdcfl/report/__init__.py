"""One self-contained HTML page per run or comparison, for a person to look at and decide from.

Imports experiments, clustering, methods and jinja2. Everything a page needs is inside it: it asks nothing of the network, and its content
policy admits no script but its own.
"""

from __future__ import annotations

from emdcfl.report.page import render, write_report

__all__ = ["render", "write_report"]
