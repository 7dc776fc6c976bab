"""Every table and figure of the paper by its label: what it is (a TOML each, in ``paper/``), at which scale, and where it goes.

Runs and snapshots are shared: what one table has run, another finds finished.
"""

from __future__ import annotations

import functools
import json
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from emdcfl.core.errors import ConfigError, nearest
from emdcfl.engines.local.sequential import pick_device
from emdcfl.runs.config import Choice, Config, EngineConfig
from emdcfl.runs.runner import versions
from emdcfl.runs.store.files import write_file
from emdcfl.studies.compare import ComparisonObserver, parse_methods
from emdcfl.studies.results import commit, hardware
from emdcfl.studies.snapshot import Snapshot, SnapshotRequest, take

Kind = Literal["comparison", "timing", "models", "parameters", "overview", "matrices", "examples", "sweep"]

EMDCFL = "emdcfl:tolerance=0.025,emdcfl:tolerance=auto"
HARD = f"oracle,{EMDCFL},cfl,pacfl,fedclust,ifca,flexcfl,fesem,cflgp"
METHOD_SETS = {"hard": HARD, "paper": f"{HARD},fedem,fedsoft,fedrc,fedce,fedavg,fedprox,pfedgraph,fedsac"}
"""EMD-CFL stands in every table twice: at the paper's tolerance, and at the one each client finds for itself."""


@dataclass(frozen=True)
class Spec:
    """One table or figure of the paper."""

    name: str
    title: str
    element: Literal["table", "figure"]
    kind: Kind
    scenarios: tuple[str, ...] = ()
    methods: str = ""
    participants: tuple[float, ...] = ()
    """Shares of the clients that take part in a round; none: all of them."""
    measure: str = "emd"
    solvers: tuple[str, ...] = ("exact",)
    models: tuple[Mapping[str, Any], ...] = ()

    def choices(self) -> list[Choice]:
        return parse_methods(METHOD_SETS.get(self.methods, self.methods))


@functools.cache
def specs() -> dict[str, Spec]:
    """Every table and figure, tables first, by name."""
    found = {}
    for file in resources.files("emdcfl.paper").joinpath("data").iterdir():
        if file.name.endswith(".toml"):
            name = file.name.removesuffix(".toml")
            raw: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
            found[name] = Spec(name, **fields)
    return dict(sorted(found.items(), key=lambda item: (item[1].element != "table", item[0])))


def find(name: str) -> Spec:
    """Return a table or figure by its label, with or without ``tab:`` or ``fig:``."""
    key = name.removeprefix("tab:").removeprefix("fig:")
    if key not in specs():
        raise ConfigError(f"the paper has no table or figure {name!r}: {nearest(key, specs())}")
    return specs()[key]


@dataclass(frozen=True)
class PaperScale:
    """Seeds, samples and projections of one of the scales, and what to say of its numbers."""

    name: str
    seeds: tuple[int, ...]
    samples: int
    ratios: tuple[float, ...]
    note: str = ""


SMOKE = "smoke test only: a tiny network, 2 rounds of 1 epoch and a few samples show that the code runs; its numbers mean nothing"
SCALES = {
    "smoke": PaperScale("smoke", (0,), 24, (0.5, 0.9), SMOKE),
    "small": PaperScale(
        "small", (0,), 128, (0.1, 0.5, 0.9), "a small part of the paper's data and training; its numbers are of the full size"
    ),
    "paper": PaperScale("paper", (0, 1, 2), 512, (0.1, 0.25, 0.5, 0.75, 0.9)),
}


@dataclass
class Context:
    """Where and how a table or figure is made; handlers add notes."""

    spec: Spec
    scale: PaperScale
    out: Path
    seeds: tuple[int, ...]
    engine: EngineConfig
    jobs: int = 1
    time_limit: float | None = None
    random_weights: bool = False
    say: Callable[[str], None] = print
    watch: ComparisonObserver | None = None
    notes: list[str] = field(default_factory=list)
    reused: float = 0.0
    """Seconds that runs and snapshots took which were there already: this table or figure costs them too."""

    @property
    def shared(self) -> Path:
        """Where finished runs and snapshots lie, for all tables and figures of a scale."""
        return self.out / self.scale.name

    @property
    def place(self) -> Path:
        return self.shared / self.spec.name

    def config(self, scenario: str, model: Mapping[str, Any] | None = None) -> Config:
        """Return the config of a scenario at this scale, with the network asked for."""
        options: dict[str, Any] = {} if scenario == "rotated-digits" else {"scale": self.scale.name}
        base = Config(scenario=Choice(scenario, options), engine=self.engine)
        base = replace(base, run=replace(base.run, seed=self.seeds[0]))
        if model is not None:
            weights = {"weights": None} if self.random else {}
            rate = model["lr"] if self.scale.name != "smoke" else None
            return replace(base, model=Choice(model["name"], weights), training=replace(base.training, lr=rate))
        if self.scale.name == "smoke" and scenario != "rotated-digits":  # two rounds: the second is where methods differ from the first
            short = replace(base.training, local_epochs=1)
            return replace(base, model=Choice("smoke_model"), run=replace(base.run, rounds=2), training=short)
        return base

    @property
    def random(self) -> bool:
        """Whether larger networks start from random weights: they are 0.1 to 0.4 GB each to fetch."""
        return self.random_weights or self.scale.name == "smoke"

    def snapshot(self, scenario: str, model: Mapping[str, Any] | None = None) -> Snapshot:
        """Take the snapshot of a scenario, or find it."""
        request = SnapshotRequest(self.config(scenario, model), self.scale.samples)
        if model is not None and self.scale.name == "smoke":  # minutes per image batch without a GPU: one client a group, untrained
            request = SnapshotRequest(request.config, 8, per_group=1, trained=False)
        if model is not None and self.random:
            self.note(f"smoke test only: {model['name']} with random weights")
        self.say(f"snapshot of {scenario}{'' if model is None else ' with ' + str(model['name'])}")
        place, started = self.shared / "snapshots" / request.key(), time.perf_counter()
        found, took = take(request, place), place / "seconds.json"
        if took.exists():
            self.reused += float(json.loads(took.read_text(encoding="utf-8")))
        else:
            write_file(took, [json.dumps(time.perf_counter() - started).encode()])
        for note in found.notes:
            self.note(note)
        return found

    def note(self, text: str) -> None:
        """Keep a note, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    def write(self, name: str, content: str | bytes) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        write_file(self.place / name, [content.encode() if isinstance(content, str) else content])


def reproduce(context: Context) -> dict[str, Any]:
    """Make one table or figure and return what was made: files, seconds (those of what others had made for it included), notes."""
    from emdcfl.paper.elements import HANDLERS

    started = time.perf_counter()
    if context.scale.note and context.spec.kind not in ("models", "examples", "overview"):
        context.note(f"{context.scale.name}: {context.scale.note}")
    left = HANDLERS[context.spec.kind](context)
    about = {
        "name": context.spec.name,
        "element": context.spec.element,
        "title": context.spec.title,
        "scale": context.scale.name,
        "seeds": list(context.seeds),
        "complete": left == 0,
        "seconds": round(time.perf_counter() - started + context.reused, 1),
        "hardware": hardware(str(pick_device(context.engine.device))),
        "notes": context.notes,
        "versions": versions(),
        "commit": commit(),
    }
    context.write("about.json", json.dumps(about, indent=2, ensure_ascii=False) + "\n")
    return {**about, "files": sorted(p.name for p in context.place.iterdir())}


def listing(out: Path | None = None) -> list[dict[str, Any]]:
    """Say what every table and figure is, and how long it took where: recorded in the package, and in ``out``."""
    recorded = json.loads(resources.files("emdcfl.paper").joinpath("data/timings.json").read_text(encoding="utf-8"))
    rows = []
    for name, spec in specs().items():
        files = [] if out is None else [out / scale / name / "about.json" for scale in SCALES]
        made = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
        took = [*recorded.get(name, []), *({k: about[k] for k in ("scale", "seconds", "hardware")} for about in made)]
        label = f"{'tab' if spec.element == 'table' else 'fig'}:{name}"
        rows.append({"name": name, "label": label, "title": spec.title, "kind": spec.kind, "scenarios": list(spec.scenarios), "took": took})
    return rows
