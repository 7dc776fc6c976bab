"""Seconds per FedAvg round of the local engines beside a bare PyTorch loop, all in one run.

    python benchmarks/engines.py                      # CPU, both workloads and the growth with clients
    python benchmarks/engines.py --only tiny --json
    python benchmarks/engines.py --only tiny cnn --peers DIR   # with other frameworks, each in an environment of its own
    python benchmarks/engines.py --only gpu           # on a machine with a CUDA device

Workloads: ``tiny``, a perceptron 64-64-10 on 100 clients × 18 digits; ``cnn``, the paper's CNN on 20 clients × 300 MNIST images (needs
EMDCFL_DATA); ``growth``, the tiny one from 10 to 1,000 clients; ``gpu``, the CNN and ResNet18 on random images. Contestants take turns,
so that whatever else the machine does meets all of them alike; compare the ratios to the bare loop, not the seconds, and on a busy machine
the ratios of processor time. ``loss`` is that of the global model after the last round: with one batch per client (``tiny``) it must be
the same for all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.engines.local import make_federation
from emdcfl.methods import make
from emdcfl.models.recipe import ModelRecipe
from emdcfl.params import Network
from emdcfl.tasks import Training
from peers import drive


class Contestant(Protocol):
    """Plays FedAvg rounds; at the end says how good its global model is."""

    def __call__(self, index: int) -> None: ...

    def processor(self) -> float: ...

    def loss(self) -> float: ...


def scenario(name: str, x: Tensor, y: Tensor, *, clients: int, samples: int, recipe: ModelRecipe, preprocess: Preprocess) -> Scenario:
    """Deal samples out to clients, beginning again where they run out."""
    sites = []
    for c in range(clients):
        chosen = torch.arange(c * samples, (c + 1) * samples) % len(y)
        split = Split(x[chosen], y[chosen])
        sites.append(Site(f"client-{c}", split, split, {"test": split}))
    return Scenario(name, tuple(sites), tuple(str(k) for k in range(10)), preprocess, recipe)


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


def mean_loss(world: Scenario, module: torch.nn.Module, device: str) -> float:
    """Return a model's mean cross-entropy over everybody's train data: contestants that compute the same agree in it."""
    module.train(False)
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for site in world.sites:
            for x, y in zip(site.train.x.split(256), site.train.y.split(256), strict=True):
                logits = module(world.preprocess(x.to(device))).float().cpu()
                total += F.cross_entropy(logits, y, reduction="sum")
    return total.item() / sum(len(site.train) for site in world.sites)


class Bare:
    """FedAvg as one would write it by hand: a module, torch.optim.SGD, an average of state dicts."""

    def __init__(self, world: Scenario, training: Training, *, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.world, self.training, self.device = world, training, device
        self.net = world.model().to(device)
        self.theta = {k: v.clone() for k, v in self.net.state_dict().items()}
        self.data = [(s.train.x.to(device), s.train.y.to(device)) for s in world.sites]

    def __call__(self, _: int) -> None:
        net, training = self.net, self.training
        total = sum(len(y) for _, y in self.data)
        mean = {k: torch.zeros_like(v) for k, v in self.theta.items()}
        for x, y in self.data:
            net.load_state_dict(self.theta)
            optimiser = torch.optim.SGD(net.parameters(), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay)
            for _ in range(training.local_epochs):
                for batch in torch.randperm(len(y), device=self.device).split(training.batch_size):
                    optimiser.zero_grad()
                    F.cross_entropy(net(self.world.preprocess(x[batch])), y[batch]).backward()
                    optimiser.step()
            for k, v in net.state_dict().items():
                if v.is_floating_point():  # not BatchNorm's counters
                    mean[k] += v * (len(y) / total)
        self.theta = mean
        if self.device != "cpu":
            torch.cuda.synchronize()

    def processor(self) -> float:
        return time.process_time()

    def loss(self) -> float:
        self.net.load_state_dict(self.theta)
        return mean_loss(self.world, self.net, self.device)


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
        contestants: dict[str, Contestant] = {name: Ours(world, training, name) for name in ("sequential", "vmapped")}
        table[str(clients)] = {name: {"ms per client": 1e3 * r["seconds"] / clients} for name, r in race(contestants, repeats).items()}
    return table


def on_gpu(repeats: int) -> dict[str, Any]:
    """Milliseconds per SGD step and images per second of the paper's CNN and of ResNet18 at 224², random images."""
    rng = torch.Generator().manual_seed(0)
    out: dict[str, Any] = {}
    for name, options, channels, side, size, clients, samples in (
        ("cnn", {"channels": 1, "classes": 10, "size": 28}, 1, 28, None, 8, 3200),
        ("resnet18", {"classes": 10, "weights": None}, 3, 32, 224, 4, 1280),
    ):
        x = torch.randint(0, 256, (clients * samples, channels, side, side), generator=rng, dtype=torch.uint8)
        y = torch.randint(0, 10, (clients * samples,), generator=rng)
        preprocess = Preprocess((0.5,) * channels, (0.25,) * channels, 1 / 255, size)
        world = scenario(name, x, y, clients=clients, samples=samples, recipe=ModelRecipe(name, options), preprocess=preprocess)
        training = Training(local_epochs=2, batch_size=64)
        contestants: dict[str, Contestant] = {"bare loop": Bare(world, training, device="cuda")}
        for precision in ("fp32", "tf32", "bf16"):
            contestants[f"graphed {precision}"] = Ours(world, training, "graphed", device="cuda", precision=precision)
        steps, images = clients * 2 * -(-samples // 64), 2 * clients * samples
        out[name] = {
            who: {"ms per step": 1e3 * r["seconds"] / steps, "images/s": images / r["seconds"], "ratio": r["ratio"]}
            for who, r in race(contestants, repeats).items()
        }
    out["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return out


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
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


def measure(only: Sequence[str], repeats: int, clients: int, peers: Path | None = None) -> dict[str, Any]:
    """Run the chosen workloads."""
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": machine(), "repeats": repeats}
    if peers is not None:
        result["peers"] = {name: drive.versions(python, name) for name, python in drive.installed(peers).items()}
    training = Training(local_epochs=1, batch_size=64)
    if "tiny" in only:
        world = tiny()
        contestants: dict[str, Contestant] = {name: Ours(world, training, name) for name in ("sequential", "vmapped")}
        result["tiny"] = against(world, training, contestants, repeats, peers)
    if "cnn" in only:
        world = cnn(clients)
        contestants = {
            "sequential": Ours(world, training, "sequential"),
            "sequential, bf16": Ours(world, training, "sequential", precision="bf16"),
            "sequential, 2 workers": Ours(world, training, "sequential", workers=2),
        }
        result["cnn"] = {"clients": clients, **against(world, training, contestants, repeats, peers)}
    if "growth" in only:
        result["growth"] = growth(repeats)
    if "gpu" in only:
        result["gpu"] = on_gpu(repeats)
    result["load after"] = [round(v, 1) for v in os.getloadavg()]
    return result


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
    parser.add_argument("--only", nargs="+", choices=("tiny", "cnn", "growth", "gpu"), default=("tiny", "cnn", "growth"))
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count, of every contestant")
    parser.add_argument("--clients", type=int, default=20, help="clients of the cnn workload")
    parser.add_argument("--peers", type=Path, default=None, help="folder with an environment per framework (see README.md)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    args = parser.parse_args()
    result = measure(args.only, args.repeats, args.clients, args.peers)
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for workload, table in result.items():
        print(workload)
        for name, value in table.items() if isinstance(table, dict) else (("", table),):
            print(f"  {name:24s} {value if not isinstance(value, dict) else json.dumps(value)}")


if __name__ == "__main__":
    main()
