"""The tutorials of docs/tutorials/own-data.md, run as they stand: the shifted sites come out as their own group."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/tutorials/own-data.md"


def blocks(tutorial: int) -> list[tuple[str, str]]:
    text = PAGE.read_text(encoding="utf-8")
    section = re.search(rf"^## Tutorial {tutorial}:.*?(?=^## )", text, flags=re.M | re.S)
    assert section, f"{PAGE} has no tutorial {tutorial}"
    return [(m[1], m[2]) for m in re.finditer(r"^```(python|sh)\n(.*?)^```", section[0], flags=re.M | re.S)]


def follow(tutorial: int, folder: Path) -> str:
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
    for language, code in blocks(tutorial):
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
    printed = follow(1, tmp_path)
    assert groups(tmp_path / "runs" / "scans") == [{"east", "west"}, {"north", "south"}]
    assert "fedavg" in printed and "local" in printed
    assert re.search(r"south .*cluster 1", printed)


@pytest.mark.slow
def test_a_table_per_site(tmp_path: Path) -> None:
    follow(2, tmp_path)
    assert groups(tmp_path / "runs" / "clinics") == [{"clinic0", "clinic1", "clinic2"}]


@pytest.mark.slow
def test_arrays_in_python(tmp_path: Path) -> None:
    printed = follow(3, tmp_path)
    assert "{'ada': 0, 'bob': 0, 'cyd': 1, 'dan': 1}" in printed
    assert (tmp_path / "runs" / "arrays" / "summary.json").exists()
