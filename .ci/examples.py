"""``python .ci/examples.py``: run the scripts and notebooks of examples/ as they stand, in runs/examples, and check what they leave.

A notebook must run without an error and end with a picture; what it claims, it asserts itself. A script must end by naming its picture.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "runs" / "examples"
PNG = b"\x89PNG"
LARGEST = 30_000
"""Bytes of a committed notebook: it has no outputs."""


def script(path: Path) -> str | None:
    """Run a script; return what is wrong with it."""
    done = subprocess.run([sys.executable, str(path)], cwd=PLACE, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        return done.stderr.strip()
    said = done.stdout.strip().rpartition("\n")[2]
    picture = PLACE / said.removeprefix("picture: ")
    return None if picture.is_file() and picture.read_bytes().startswith(PNG) else f"the last line must name its picture, got {said!r}"


def notebook(path: Path) -> str | None:
    """Execute a notebook into runs/examples; return what is wrong with it."""
    text = path.read_text(encoding="utf-8")
    if len(text) > LARGEST or any(cell.get("outputs") for cell in json.loads(text)["cells"]):
        return "committed with outputs; clear them"
    book = nbformat.reads(text, as_version=4)
    try:
        NotebookClient(book, timeout=600, resources={"metadata": {"path": str(PLACE)}}).execute()
    except CellExecutionError as error:
        said = [output.get("text", "") for cell in book.cells for output in cell.get("outputs", []) if output.output_type == "stream"]
        return "".join(said[-4:]) + re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().rpartition("\n")[2]
    printed = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []) if output.output_type == "stream")
    if (failed := re.search(r"^(error: |Traceback ).*", printed, re.M)) is not None:  # "!emdcfl …" that fails does not stop a notebook
        return f"a command failed: {failed[0]}"
    outputs = [cell for cell in book.cells if cell.cell_type == "code"][-1].outputs
    if not any("image/png" in output.get("data", {}) for output in outputs):
        return "the last cell must show a picture"
    nbformat.write(book, PLACE / path.name)
    return None


def main() -> int:
    """Run examples and say how long each took; 1 if something is wrong."""
    PLACE.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "80", "NO_COLOR": "1", "MPLBACKEND": ""}
    try:
        return run_all()
    finally:
        if (PLACE / "fed").exists():  # a notebook was interrupted, or has stopped it already
            subprocess.run([sys.executable, "-m", "emdcfl", "federation", "down", "fed"], cwd=PLACE, capture_output=True, check=False)


def run_all() -> int:
    """Run what the command line names, or everything."""
    wrong = 0
    wanted = set(sys.argv[1:])
    for path in sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")]):
        if wanted and path.name not in wanted:
            continue
        started = time.perf_counter()
        os.environ["MPLBACKEND"] = "agg" if path.suffix == ".py" else "module://matplotlib_inline.backend_inline"
        problem = script(path) if path.suffix == ".py" else notebook(path)
        wrong += problem is not None
        print(f"{path.name}: {'ok' if problem is None else problem}, {time.perf_counter() - started:.0f} s", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
