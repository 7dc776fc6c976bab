"""Write the page of ``emdcfl data check`` as HTML that stands alone and prints."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from emdcfl.core.errors import StoreError
from emdcfl.data.own.checking.check import FolderReport
from emdcfl.data.own.checking.page import data_page
from emdcfl.report.page import render_template
from emdcfl.runs.store.files import write_file

ACROSS = 12
"""Sites beside each other in a table of columns."""


def write_data_page(report: FolderReport, out: Path) -> None:
    if not out.parent.is_dir():
        raise StoreError(f"{out}: the folder {out.parent} does not exist; make it first, or choose another --html")
    page = data_page(report, across=ACROSS)
    text = render_template("data.html", {"title": page.title, "page": page, "today": date.today().isoformat()})
    write_file(out, [text.encode("utf-8", "replace")])
