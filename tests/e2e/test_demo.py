from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.e2e.shell import ROOT


def test_the_wheel_runs_the_demo_outside_the_source_tree_and_finds_four_groups(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    made = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "emdcfl/py.typed" in names and any(n.endswith("licenses/LICENSE") for n in names)
    assert not [n for n in names if n.startswith("tests") or "__pycache__" in n]
    place = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(place), str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    here = tmp_path / "elsewhere"
    here.mkdir()
    code = "import emdcfl, sys; print(emdcfl.__file__, file=sys.stderr); from emdcfl.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "run", "--rounds", "2", "--json", "--out", "run"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("EMDCFL", "PYTHON"))} | {
        "PYTHONPATH": str(place),
        "OMP_NUM_THREADS": "1",
    }
    ran = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert str(place) in ran.stderr.splitlines()[0]
    summary = json.loads(ran.stdout)
    assert summary["ari"] == 1.0 and summary["k"] == 4 and summary["clusters"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert summary["accuracy"]["mean"] >= 0.97
    assert (here / "run" / "heatmap.png").read_bytes().startswith(b"\x89PNG")
