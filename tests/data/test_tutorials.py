"""The tutorials of docs/tutorials, run as they stand: shifted sites come out as their own group, and pages end with what runs recommend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/tutorials"


def blocks(page: str, heading: str) -> list[tuple[str, str]]:
    """Return language and text of every block of a section."""
    section = re.search(rf"^## {heading}.*?(?=^## |\Z)", (PAGES / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    assert section, f"{page} has no section {heading}"
    return [(m[1], m[2]) for m in re.finditer(r"^```(\w+)\n(.*?)^```", section[0], flags=re.M | re.S)]


def follow(page: str, heading: str, folder: Path) -> str:
    """Run the blocks in order, as a reader would; return everything they print."""
    command = folder / "bin" / "emdcfl"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m emdcfl "$@"\n')
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    printed = ""
    for language, code in blocks(page, heading):
        if language not in ("python", "sh"):
            continue
        program = [sys.executable, "-c", code] if language == "python" else ["bash", "-e", "-c", code]
        done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    return printed


def groups(run: Path) -> list[set[str]]:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ari"] is None
    found: dict[int, set[str]] = {}
    for client, cluster in zip(summary["clients"], summary["clusters"], strict=True):
        found.setdefault(cluster, set()).add(client)
    return list(found.values())


@pytest.mark.slow
def test_images_in_folders(tmp_path: Path) -> None:
    printed = follow("own-data.md", "Tutorial 1:", tmp_path)
    assert groups(tmp_path / "runs" / "scans") == [{"east", "west"}, {"north", "south"}]
    assert "fedavg" in printed and "local" in printed
    assert re.search(r"south .*cluster 1", printed)


@pytest.mark.slow
def test_a_table_per_site(tmp_path: Path) -> None:
    follow("own-data.md", "Tutorial 2:", tmp_path)
    assert groups(tmp_path / "runs" / "clinics") == [{"clinic0", "clinic1", "clinic2"}]


@pytest.mark.slow
def test_arrays_in_python(tmp_path: Path) -> None:
    printed = follow("own-data.md", "Tutorial 3:", tmp_path)
    assert "{'ada': 0, 'bob': 0, 'cyd': 1, 'dan': 1}" in printed
    assert (tmp_path / "runs" / "arrays" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "heading"),
    [("tables.md", "Breast cancer"), ("tables.md", "Wine"), ("sensors-and-scans.md", "Ten people"), ("sensors-and-scans.md", "Scans")],
)
def test_a_page_ends_with_what_its_run_recommends(page: str, heading: str, tmp_path: Path) -> None:
    if "EMDCFL_DATA" in "".join(code for _, code in blocks(page, heading)) and "EMDCFL_DATA" not in os.environ:
        pytest.skip("needs natural/ below EMDCFL_DATA")
    follow(page, heading, tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    shown = re.search(r"^Use: (\w+)", "".join(text for language, text in blocks(page, heading) if language == "text"), flags=re.M)
    assert shown and json.loads((run / "summary.json").read_text())["answers"]["use"].split()[0].strip(":,") == shown[1]
