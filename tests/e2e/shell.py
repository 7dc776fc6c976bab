"""The command line as a user meets it: another process, with its own terminal size, folder and exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def emdcfl(*arguments: object, cwd: Path, module: str = "tests.tiny", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``emdcfl`` with these arguments; by default with the tiny scenario known to it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("EMDCFL", "PYTHON"))}
    env |= {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "COLUMNS": "80"} | environment
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900, check=False)
