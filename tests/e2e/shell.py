"""The command line as a user meets it: another process with its own terminal size, folder and exit code; or, faster, this one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from emdcfl.cli import main

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
"""What a child process needs to find the sources and the tests, and to give the bits of one thread."""


def emdcfl(*arguments: object, cwd: Path, module: str = "tests.tiny", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``emdcfl`` with these arguments; by default with the tiny scenario known to it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("EMDCFL", "PYTHON"))}
    env |= {**SOURCES, "COLUMNS": "80"} | environment
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900, check=False)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def called(capfd: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """Run the command in this process, which does not have to import everything again."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return Ended(int(ended.value.code or 0), *capfd.readouterr())
