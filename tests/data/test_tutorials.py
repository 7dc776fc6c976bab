"""The tutorials of docs/tutorials, run as they stand: shifted sites come out as their own group, and pages end with what runs recommend."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.shell import called

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/tutorials"
Follow = Callable[[str, str], str]


def blocks(page: str, heading: str) -> list[tuple[str, str]]:
    """Return language and text of every block of a section."""
    section = re.search(rf"^## {heading}.*?(?=^## |\Z)", (PAGES / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    assert section, f"{page} has no section {heading}"
    return [(m[1], m[2]) for m in re.finditer(r"^```(\w+)\n(.*?)^```", section[0], flags=re.M | re.S)]


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Follow:
    """Run the blocks of a section in an empty folder, in order, as a reader would; return everything they print."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def read(page: str, heading: str) -> str:
        printed = ""
        for language, code in blocks(page, heading):
            if language == "python":
                exec(compile(code, page, "exec"), {})
                printed += capfd.readouterr().out
            for line in code.splitlines() if language == "sh" else ():
                command, *arguments = shlex.split(line)
                assert command == "emdcfl", line
                ended = called(capfd, *(w for word in arguments for w in (sorted(Path().glob(word)) if "*" in word else [word])))
                assert ended.code == 0, ended.err
                printed += ended.out
        return printed

    return read


def groups(run: Path) -> list[set[str]]:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ari"] is None
    found: dict[int, set[str]] = {}
    for client, cluster in zip(summary["clients"], summary["clusters"], strict=True):
        found.setdefault(cluster, set()).add(client)
    return list(found.values())


@pytest.mark.slow
def test_images_in_folders(tmp_path: Path, follow: Follow) -> None:
    printed = follow("own-data.md", "Tutorial 1:")
    assert groups(tmp_path / "runs" / "scans") == [{"east", "west"}, {"north", "south"}]
    assert "fedavg" in printed and "local" in printed
    assert "doubt: one model for all gained 43.6 points in the last of 2 rounds" in printed
    assert re.search(r"south .*cluster 1", printed)


@pytest.mark.slow
def test_a_table_per_site(tmp_path: Path, follow: Follow) -> None:
    follow("own-data.md", "Tutorial 2:")
    assert groups(tmp_path / "runs" / "clinics") == [{"clinic0", "clinic1", "clinic2"}]


@pytest.mark.slow
def test_arrays_in_python(tmp_path: Path, follow: Follow) -> None:
    printed = follow("own-data.md", "Tutorial 3:")
    assert "{'ada': 0, 'bob': 0, 'cyd': 1, 'dan': 1}" in printed
    assert (tmp_path / "runs" / "arrays" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "heading"),
    [("tables.md", "Breast cancer"), ("tables.md", "Wine"), ("sensors-and-scans.md", "Ten people"), ("sensors-and-scans.md", "Scans")],
)
def test_a_page_ends_with_what_its_run_recommends(page: str, heading: str, tmp_path: Path, follow: Follow) -> None:
    if "EMDCFL_DATA" in "".join(code for _, code in blocks(page, heading)) and "EMDCFL_DATA" not in os.environ:
        pytest.skip("needs natural/ below EMDCFL_DATA")
    follow(page, heading)
    (run,) = (tmp_path / "runs").iterdir()
    shown = re.search(r"^Use: (\w+)", "".join(text for language, text in blocks(page, heading) if language == "text"), flags=re.M)
    assert shown and json.loads((run / "summary.json").read_text())["answers"]["use"].split()[0].strip(":,") == shown[1]
