"""``python -m fuzz --seconds 300``: fuzz the targets one after the other, each in a process of its own, and append a row each to a file.

A finding ends a target with the input in ``<corpus>/<target>/found/``; ``python -m fuzz --target rundir --replay FILE`` shows it again.
Needs the extra ``fuzz`` (atheris); some targets also need ``flower``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

TARGETS = ("codec", "rundir", "loaders", "config", "survey", "policy", "replies")
FLOWER = ("codec", "survey", "policy")
"""Targets that need the extra ``flower``."""


def load(target: str) -> ModuleType:
    """Import a target."""
    return importlib.import_module(f"fuzz.fuzz_{target}")


def fuzz(target: str, corpus: Path, seconds: int) -> None:
    """Fuzz in this process; never returns."""
    import atheris

    with atheris.instrument_imports(include=["emdcfl", f"fuzz.fuzz_{target}"]):
        module = load(target)
    folder, found = corpus / target / "inputs", corpus / target / "found"
    for place in (folder, found):
        place.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(module.seeds()):
        (folder / f"seed-{i}").write_bytes(data)
    options = [f"-max_total_time={seconds}", "-print_final_stats=1", "-max_len=20000", "-rss_limit_mb=4096", "-timeout=60", "-verbosity=1"]
    atheris.Setup([sys.argv[0], str(folder), f"-artifact_prefix={found}/", *options], module.one)
    atheris.Fuzz()


def replay(target: str, file: Path) -> None:
    """Try one input without atheris; an error shows itself."""
    load(target).one(file.read_bytes())
    print(f"{file}: no error")


def run(target: str, corpus: Path, seconds: int, out: Path | None) -> bool:
    """Fuzz in a child, note what it did, and say whether it found nothing."""
    if target in FLOWER and importlib.util.find_spec("flwr") is None:
        print(f"{target}: not run, needs the extra emdcfl[flower]")
        return True
    command = [sys.executable, "-m", "fuzz", "--target", target, "--corpus", str(corpus), "--seconds", str(seconds), "--here"]
    corpus.mkdir(parents=True, exist_ok=True)
    started, log = time.monotonic(), corpus / f"{target}.log"
    with log.open("wb") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    text = log.read_text(encoding="utf-8", errors="replace")
    executions = re.findall(r"number_of_executed_units:\s*(\d+)", text) or re.findall(r"^#(\d+)", text, re.MULTILINE)
    covered, features = re.findall(r"cov: (\d+)", text), re.findall(r"ft: (\d+)", text)
    row = {
        "target": target,
        "seconds": round(time.monotonic() - started, 1),
        "executions": int(executions[-1]) if executions else 0,
        "coverage": int(covered[-1]) if covered else 0,
        "features": int(features[-1]) if features else 0,
        "found": 0 if code == 0 else 1,
    }
    print(json.dumps(row), flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file_out:
            file_out.write(json.dumps(row) + "\n")
    if code:
        print(f"{target}: ended with {code}; see {log} and {corpus / target / 'found'}")
    return code == 0


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS, help="repeatable; default: all")
    parser.add_argument("--seconds", type=int, default=120, help="per target")
    parser.add_argument("--corpus", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--out", type=Path, help="JSONL that a row per target is added to")
    parser.add_argument("--replay", type=Path, help="one input, without atheris")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    targets = given.target or list(TARGETS)
    if given.replay is not None:
        replay(targets[0], given.replay)
    elif given.here:
        fuzz(targets[0], given.corpus, given.seconds)
    else:
        clean = [run(target, given.corpus, given.seconds, given.out) for target in targets]
        sys.exit(0 if all(clean) else 1)


if __name__ == "__main__":
    main()
