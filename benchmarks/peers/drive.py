"""Other frameworks as contestants: each runs in an environment of its own and waits for its turn.

``engines.py --peers DIR`` looks for ``DIR/<peer>/bin/python``; ``benchmarks/README.md`` says how to make the environments.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emdcfl.core.tasks import Training
from emdcfl.data.types import Scenario

PEERS = {"flower": "flower_.py", "pfl": "pfl_.py", "fluke": "fluke_.py", "fedlab": "fedlab_.py"}
PACKAGES = {"flower": "flwr", "pfl": "pfl", "fluke": "fluke-fl", "fedlab": "fedlab"}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parent),  # processes that a framework starts import ``common`` too
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "disabled",
}


def installed(folder: Path) -> dict[str, Path]:
    """Return the interpreter of every peer whose environment is there."""
    return {name: folder / name / "bin" / "python" for name in PEERS if (folder / name / "bin" / "python").exists()}


def versions(python: Path, name: str) -> str:
    """Return what a peer's environment holds."""
    code = f"from importlib.metadata import version; import torch; print(version({PACKAGES[name]!r}), 'torch', torch.__version__)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def write_workload(path: Path, world: Scenario, training: Training) -> None:
    """Write what every peer trains on: inputs as the network sees them, labels, settings, the initial model."""
    torch.manual_seed(0)  # as the bare loop does
    parameters = [p.detach().numpy() for p in world.model().parameters()]
    settings: dict[str, Any] = {
        **training.as_dict(),
        "model": world.model.name,
        "sizes": [len(site.train) for site in world.sites],
        "parameters": len(parameters),
    }
    np.savez(
        path,
        x=torch.cat([world.preprocess(site.train.x) for site in world.sites]).numpy(),
        y=torch.cat([site.train.y for site in world.sites]).numpy(),
        settings=np.array(json.dumps(settings)),
        **{f"parameter {i}": p for i, p in enumerate(parameters)},
    )


def processor(pid: int) -> float:
    """Return the processor seconds that a process and its children have used so far (Linux)."""
    total = 0.0
    with suppress(OSError, ValueError):  # one of them has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
            total += sum(processor(int(child)) for child in (task / "children").read_text().split())
    return total


class Peer:
    """A framework in its own process, playing one round per call."""

    def __init__(self, name: str, python: Path, workload: Path) -> None:
        self.name = name
        self._log = workload.with_suffix(f".{name}.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-u", Path(__file__).with_name(PEERS[name]), workload],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                start_new_session=True,  # Ray's processes end with it
                env={**os.environ, **ENVIRONMENT},
            )
        self._expect_ready()

    def __call__(self, _: int) -> None:
        self._say("go")
        self._expect_ready()

    def processor(self) -> float:
        """Return the processor seconds used so far."""
        return processor(self._process.pid)

    def loss(self) -> float:
        """End the process and return the loss of its global model."""
        self._say("stop")
        loss = float(self._read())
        self.close()
        return loss

    def close(self) -> None:
        """End the process and everything it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(timeout=30)

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _expect_ready(self) -> None:
        line = self._read()
        if line != "ready":
            tail = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            self.close()
            raise RuntimeError(f"{self.name}: expected 'ready', got {line!r}: {tail[0]} (all of it: {self._log})")


def start(folder: Path, workload: Path) -> dict[str, Peer]:
    """Start every peer that is installed; one that cannot start is said and left out."""
    running = {}
    for name, python in installed(folder).items():
        try:
            running[name] = Peer(name, python, workload)
        except (RuntimeError, OSError) as error:
            print(f"{name} does not take part: {error}", file=sys.stderr)
    return running
