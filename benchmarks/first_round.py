"""Play the first round of several methods, with the local trainings done once: they are the same for all methods that start from θ⁰.

    EMDCFL_DATA=… python -m benchmarks.first_round --scenario rotated-cifar10 --out runs/first \\
        --methods emdcfl:tolerance=auto,oracle,emdcfl:tolerance=0.025 --device cuda \\
        --set engine.name=cuda --set engine.precision=bf16 --set engine.compile=yes

Rows are those of ``emdcfl compare`` with ``run.rounds=1``, to the last bit, and merge with them; the time of the shared trainings is
counted in each, and a note says so. Run directories, with all distances, are in ``runs/``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.watch import refusing_fallbacks
from torch import Tensor

from emdcfl.core import tasks
from emdcfl.core.federation import Federation, Fold, Replies
from emdcfl.core.keys import digest
from emdcfl.runs.config import Choice, Config, config_hash, override
from emdcfl.runs.plan import plan
from emdcfl.studies.compare import execute, parse_methods, shared_scenario
from emdcfl.studies.results import ResultRow, Results

NOTE = "local trainings of round 1 were done once for several methods; their time is counted in each"


@dataclass
class Shared:
    """Replies of a training and the seconds it took; ``used`` counts the runs that did not train again."""

    replies: Replies
    seconds: float
    used: int = 0


@contextmanager
def training_once() -> Iterator[dict[bytes, Shared]]:
    """Inside, a federation that asks for a training somebody asked for before gets the replies of then."""
    known: dict[bytes, Shared] = {}
    plain: Callable[..., Replies] = Federation.train

    def train(fed: Federation, starts: Mapping[str, Tensor], *, fold: Any = None, **options: Any) -> Replies:
        if options:
            return plain(fed, starts, fold=fold, **options)
        states = {id(theta): digest(theta.numpy().tobytes()) for theta in starts.values()}
        parts = [part for name, theta in starts.items() for part in (name, states[id(theta)])]
        key = digest(fed.seed, fed.index, fed.training, tasks.train.__name__, *parts)
        if key in known:
            known[key].used += 1
            _book(fed, starts, known[key])
        else:
            begun = time.perf_counter()
            trained = plain(fed, starts)
            if trained.failures:  # whoever asks next has to meet them itself
                return trained if fold is None else _folded(trained, fold)
            known[key] = Shared(trained, time.perf_counter() - begun)
        replies = known[key].replies
        return Replies(dict(replies.valid)) if fold is None else _folded(replies, fold)

    Federation.train = train  # type: ignore[method-assign,assignment]
    try:
        yield known
    finally:
        Federation.train = plain  # type: ignore[method-assign]


def _folded(replies: Replies, fold: Fold) -> Replies:
    for client, reply in replies.valid.items():
        fold(client, reply)
    return Replies({client: {} for client in replies.valid}, replies.failures)


def _book(fed: Federation, starts: Mapping[str, Tensor], shared: Shared) -> None:
    """Count the time and the bytes of a training that is not done again."""
    fed.clock.seconds["train"] = fed.clock.seconds.get("train", 0.0) + shared.seconds
    fed.traffic.sent("train", {client: {"theta": theta} for client, theta in starts.items()}, {})
    for reply in shared.replies.valid.values():
        fed.traffic.received("train", reply)


def first_round(config: Config, methods: str, out: Path) -> Iterator[ResultRow]:
    """Play round 1 of every method; yields rows as they are there, also those of an earlier call."""
    one = override(config, {"run.rounds": 1})
    with Results(out) as results:
        done = {row["config"]: row for row in results.rows}
    with training_once() as known:
        for method in parse_methods(methods):
            key = config_hash(plan(replace(one, method=method), shared_scenario(one)).config)
            if key in done:
                yield done[key]
                continue
            before = {training: shared.used for training, shared in known.items()}
            row = execute(replace(one, method=method), keep=out / "runs")
            again = sum(shared.seconds for training, shared in known.items() if shared.used > before.get(training, 0))
            if again:
                row = {**row, "seconds": {**row["seconds"], "total": round(row["seconds"]["total"] + again, 3)}}
            notes = [*row["notes"], NOTE] if again or known.keys() - before.keys() else row["notes"]
            row = {name: value for name, value in row.items() if name != "directory"} | {"notes": notes}
            with Results(out) as results:
                results.add([row])
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", required=True)
    parser.add_argument("--methods", default="emdcfl:tolerance=auto,oracle,emdcfl:tolerance=0.025")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    settings = {"run.seed": str(args.seed), "engine.device": args.device, **dict(pair.split("=", 1) for pair in args.set)}
    config = override(Config(scenario=Choice(args.scenario)), settings)
    with refusing_fallbacks():
        for row in first_round(config, args.methods, args.out):
            tolerance = row["settings"]["method"].get("tolerance", "")
            print(row["method"], tolerance, "ARI", row["ari"], "accuracy", row["accuracy"]["mean"], row["seconds"], flush=True)


if __name__ == "__main__":
    main()
