"""Seconds per FedAvg round of the local engines beside a bare PyTorch loop, all in one run.

    python benchmarks/engines.py                      # CPU, both workloads and the growth with clients
    python benchmarks/engines.py --only tiny --json
    python benchmarks/engines.py --only tiny cnn --peers DIR   # with other frameworks, each in an environment of its own
    python benchmarks/engines.py --only gpu           # on a machine with a CUDA device: all three parts below
    python benchmarks/engines.py --only gpu-steps gpu-pairs gpu-runs --rows DIR

Workloads: ``tiny``, a perceptron 64-64-10 on 100 clients × 18 digits; ``cnn``, the paper's CNN on 20 clients × 300 MNIST images (needs
EMDCFL_DATA); ``growth``, the tiny one from 10 to 1,000 clients. Contestants take turns, so that other load on the machine affects all of
them. Compare the ratios to the bare loop, not the seconds; on a busy machine, the ratios of processor time. ``loss`` is that of
the global model after the last round: with one batch per client (``tiny``) it must be the same for all.

The parts for a GPU are in ``gpu/``: one line of JSON per measurement. A measurement fails if the engine falls back to a slower way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from bare import Bare, mean_loss, scenario
from emdcfl.core.params import Network
from emdcfl.core.tasks import Training
from emdcfl.data.types import Preprocess, Scenario
from emdcfl.engines import make_federation
from emdcfl.methods import make
from emdcfl.models.recipe import ModelRecipe
from peers import drive

CPU, GPU = ("tiny", "cnn", "growth"), ("gpu-steps", "gpu-pairs", "gpu-runs")


class Contestant(Protocol):
    """Plays FedAvg rounds, and reports the loss of its global model at the end."""

    def __call__(self, index: int) -> None: ...

    def processor(self) -> float: ...

    def loss(self) -> float: ...


def tiny(clients: int = 100) -> Scenario:
    """Digits as tables, 18 per client."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = torch.from_numpy(images[order]).float(), torch.from_numpy(labels[order]).long()
    recipe = ModelRecipe("mlp", {"features": 64, "classes": 10, "hidden": [64]})
    return scenario("tiny", x, y, clients=clients, samples=18, recipe=recipe, preprocess=Preprocess((0.0,), (16.0,)))


def cnn(clients: int = 20, samples: int = 300) -> Scenario:
    """MNIST images, the paper's CNN."""
    from emdcfl.data.sources import load

    source = load("mnist")
    need = min(len(source.labels), clients * samples)
    x, y = torch.from_numpy(np.array(source.images[:need])), torch.from_numpy(np.array(source.labels[:need]))
    recipe = ModelRecipe("cnn", {"channels": 1, "classes": 10, "size": 28})
    return scenario("cnn", x, y, clients=clients, samples=samples, recipe=recipe, preprocess=Preprocess((0.1307,), (0.3081,), 1 / 255))


class Ours:
    """FedAvg over one of the engines, from the initial model of the bare loop."""

    def __init__(self, world: Scenario, training: Training, engine: str, *, device: str = "cpu", **options: Any) -> None:
        self.world, self.device = world, device
        self.fed = make_federation(world, engine=engine, training=training, device=device, **options)
        self.method = make("fedavg")
        torch.manual_seed(0)
        self.state = replace(self.method.init(self.fed, self.fed.begin(0)), theta=Network(world.model).theta.clone())

    def __call__(self, index: int) -> None:
        self.state = self.method.step(self.fed, self.state, self.fed.begin(index))
        if self.device != "cpu":
            torch.cuda.synchronize()

    def processor(self) -> float:
        workers = getattr(self.fed, "_workers", [])
        return time.process_time() + sum(drive.processor(worker.pid) for worker in workers)

    def loss(self) -> float:
        network = self.fed.network()
        network.load(self.state.theta)
        self.fed.close()
        return mean_loss(self.world, network.module, "cpu")


def race(contestants: dict[str, Contestant], repeats: int) -> dict[str, dict[str, float]]:
    """One round of each in turn, ``repeats`` times after one that does not count; medians, and ratios to the first contestant."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    processor: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(repeats + 1):
        for name, play in contestants.items():
            used, start = play.processor(), time.perf_counter()
            play(index + 1)
            seconds[name].append(time.perf_counter() - start)
            processor[name].append(play.processor() - used)
    table = {}
    for name, play in contestants.items():
        wall, work = statistics.median(seconds[name][1:]), statistics.median(processor[name][1:])
        table[name] = {"seconds": wall, "least": min(seconds[name][1:]), "processor": work, "loss": play.loss()}
    first = table[next(iter(table))]
    return {
        name: {**row, "ratio": row["seconds"] / first["seconds"], "processor ratio": row["processor"] / first["processor"]}
        for name, row in table.items()
    }


def growth(repeats: int, sizes: Sequence[int] = (10, 30, 100, 300, 1000)) -> dict[str, Any]:
    """Milliseconds per client and round of the tiny workload with more and more clients."""
    table = {}
    for clients in sizes:
        world, training = tiny(clients), Training(local_epochs=1, batch_size=64)
        contestants: dict[str, Contestant] = {name: Ours(world, training, name) for name in ("sequential", "batched")}
        table[str(clients)] = {name: {"ms per client": 1e3 * r["seconds"] / clients} for name, r in race(contestants, repeats).items()}
    return table


def machine() -> dict[str, Any]:
    """Describe the machine."""
    return {
        "processor": next(
            (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),  # noqa: PTH123
            platform.processor(),
        ),
        "cores": os.cpu_count(),
        "load": [round(v, 1) for v in os.getloadavg()],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": str(torch.__version__),
    }


def measure(only: Sequence[str], repeats: int, clients: int, peers: Path | None = None) -> Iterator[tuple[str, Any]]:
    """Run the chosen workloads, and yield each result when it is ready."""
    torch.set_num_threads(1)
    yield "machine", machine()
    yield "repeats", repeats
    if peers is not None:
        yield "peers", {name: drive.versions(python, name) for name, python in drive.installed(peers).items()}
    training = Training(local_epochs=1, batch_size=64)
    if "tiny" in only:
        world = tiny()
        contestants: dict[str, Contestant] = {name: Ours(world, training, name) for name in ("sequential", "batched")}
        yield "tiny", against(world, training, contestants, repeats, peers)
    if "cnn" in only:
        world = cnn(clients)
        contestants = {
            "sequential": Ours(world, training, "sequential"),
            "sequential, bf16": Ours(world, training, "sequential", precision="bf16"),
            "sequential, 2 workers": Ours(world, training, "sequential", workers=2),
        }
        yield "cnn", {"clients": clients, **against(world, training, contestants, repeats, peers)}
    if "growth" in only:
        yield "growth", growth(repeats)
    yield "load after", [round(v, 1) for v in os.getloadavg()]


def against(
    world: Scenario, training: Training, contestants: dict[str, Contestant], repeats: int, peers: Path | None
) -> dict[str, dict[str, float]]:
    """Race our engines against the bare loop, and against other frameworks where they are installed."""
    everybody: dict[str, Contestant] = {"bare loop": Bare(world, training), **contestants}
    before = {"before": {"loss": everybody["bare loop"].loss()}}
    if peers is None:
        return before | race(everybody, repeats)
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / "workload.npz"
        drive.write_workload(workload, world, training)
        running = drive.start(peers, workload)
        try:
            return before | race({**everybody, **running}, repeats)
        finally:
            for peer in running.values():
                peer.close()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*CPU, "gpu", *GPU), default=CPU)
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count, of every contestant")
    parser.add_argument("--clients", type=int, default=20, help="clients of the cnn workload")
    parser.add_argument("--peers", type=Path, default=None, help="folder with an environment per framework (see README.md)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which no measurement of a network or part of 'gpu' begins")
    parser.add_argument("--rows", type=Path, default=None, help="folder whose results.jsonl takes the rows of gpu-runs")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # gpu parts at a size, and on an engine, for any machine
    args = parser.parse_args()
    wanted = GPU if "gpu" in args.only else [part for part in args.only if part in GPU]
    if wanted:
        from gpu import parts as gpu

        sys.exit(gpu.measure(wanted, machine(), repeats=args.repeats, seconds=args.seconds, rows=args.rows, tiny=args.tiny))
    result = measure(args.only, args.repeats, args.clients, args.peers)
    show(result, as_json=args.json)


def show(result: Iterator[tuple[str, Any]], *, as_json: bool) -> None:
    """Print the results: as one JSON object, or each when it is ready."""
    if as_json:
        print(json.dumps(dict(result), indent=2))
        return
    for workload, table in result:
        print(workload)
        for name, value in table.items() if isinstance(table, dict) else (("", table),):
            print(f"  {name:24s} {value if not isinstance(value, dict) else json.dumps(value)}", flush=True)


if __name__ == "__main__":
    main()
