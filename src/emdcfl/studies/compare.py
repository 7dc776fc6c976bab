"""Many runs, each once: what is missing in ``results.jsonl`` is run, several at a time if wanted, and what is there is left alone.

A run counts when its line is on the disk; a comparison that was interrupted therefore starts again where it stopped, and ends with the
rows it would have had. Scenarios are built once per process and shared by the runs on them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from emdcfl.core.errors import ConfigError, EmdcflError, StoreError
from emdcfl.core.units import plural
from emdcfl.data.types import Scenario
from emdcfl.methods import METHODS, find
from emdcfl.methods.base import default_options, preset_values
from emdcfl.runs.config import CHOICES, OWN_FILES, Choice, Config, PersonalizeConfig, as_dict, from_dict, override
from emdcfl.runs.loop import Observer
from emdcfl.runs.personal import FINE_TUNED
from emdcfl.runs.plan import build_scenario, plan
from emdcfl.runs.runner import run
from emdcfl.runs.scoring import by_round
from emdcfl.studies.results import ResultRow, Results, as_result, checked, plain_row, read_results

log = logging.getLogger("emdcfl")

TITLES = {
    "oracle": "Oracle", "emdcfl": "EMD-CFL", "cfl": "CFL", "pacfl": "PACFL", "fedclust": "FedClust", "ifca": "IFCA", "flexcfl": "FlexCFL",
    "fesem": "FeSEM", "cflgp": "CFLGP", "fedem": "FedEM", "fedsoft": "FedSoft", "fedrc": "FedRC", "fedce": "FedCE", "fedavg": "FedAvg",
    "fedprox": "FedProx", "pfedgraph": "pFedGraph", "fedsac": "FedSaC", "local": "Local",
}  # fmt: skip
"""What tables call a method, in the order of the paper's tables."""


def paper_place(method: str) -> tuple[int, str]:
    """Return what sorts methods: the paper's in the order of its tables, then others by name."""
    return list(TITLES).index(method) if method in TITLES else len(TITLES), method


def parse_methods(text: str, base: Config | None = None) -> list[Choice]:
    """Read ``all`` or ``a,b,c``; a method may carry options after colons, as in ``emdcfl:tolerance=0.025:solver=sinkhorn``.

    A name that ends in ``+ft`` is the method with fine-tuning at home. With ``base``, ``all`` leaves out what its data or settings refuse.

    Examples
    --------
    >>> parse_methods("fedavg+ft,emdcfl:tolerance=0.03")
    [Choice(name='fedavg+ft', options={}), Choice(name='emdcfl', options={'tolerance': 0.03})]
    """
    found: list[Choice] = []
    for part in (p.strip() for p in text.split(",")):
        name, *settings = part.split(":")
        if name.removesuffix(FINE_TUNED) == "all" and not settings:
            every = [Choice(method + name.removeprefix("all")) for method in sorted(METHODS, key=paper_place)]
            found += every if base is None else _accepted(base, every)
            continue
        find(name.removesuffix(FINE_TUNED))
        found.append(override(Config(), {"method": part}).method)
    unique = {json.dumps([c.name, dict(c.options)], sort_keys=True): c for c in found}
    return list(unique.values())


def _accepted(base: Config, methods: Sequence[Choice]) -> list[Choice]:
    """Return the methods that the data and settings allow, and name the others; raise where they allow none."""
    refused: dict[str, ConfigError] = {}
    for method in methods:
        try:
            plan(_with_method(base, method), shared_scenario(base))
        except ConfigError as error:
            if base.method.options and method.name.removesuffix(FINE_TUNED) == base.method.name:  # a mistake in what was asked for
                raise
            refused[method.name] = error
    if len(refused) == len(methods):
        raise next(iter(refused.values()))
    if refused:
        log.warning("'all' leaves out %s: the data or settings do not allow them; name one to see why", ", ".join(refused))
    return [method for method in methods if method.name not in refused]


def parse_seeds(text: str) -> list[int]:
    """Read ``0,1,2`` or ``0-4``.

    Examples
    --------
    >>> parse_seeds("0,2-4")
    [0, 2, 3, 4]
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not (last.isdecimal() and int(first) <= int(last))):
            raise ConfigError(f"--seeds {text}: expected numbers like 0,1,2 or 0-4, got {part.strip()!r}")
        seeds += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(seeds))


def configs(base: Config, methods: Sequence[Choice], seeds: Sequence[int]) -> list[Config]:
    """Return one config per run; all methods of a seed before the next seed, so that an early stop leaves a whole table."""
    return [replace(_with_method(base, method), run=replace(base.run, seed=seed)) for seed in seeds for method in methods]


def folds_of(base: Config, folds: int | None) -> list[Config]:
    """Return the config once per fold of sites to hold out: neighbours in the scenario's list share a fold; by default one site each."""
    sites = [site.name for site in shared_scenario(base).sites]
    count = len(sites) if folds is None else folds
    if not 2 <= count <= len(sites):
        raise ConfigError(f"--folds: expected 2 to {len(sites)}, the number of sites, got {count}")
    parts = [[str(name) for name in part] for part in np.array_split(sites, count)]
    return [replace(base, run=replace(base.run, hold_out=tuple(part))) for part in parts]


def _with_method(base: Config, method: Choice) -> Config:
    """Return the config for a method; the options of the one that the base config is about hold where its name and preset say nothing."""
    if method.name.removesuffix(FINE_TUNED) == base.method.name:
        preset = preset_values(find(base.method.name), method.options.get("preset"))
        usual = {name: value for name, value in base.method.options.items() if name not in preset}
        method = replace(method, options={**usual, **method.options})
    if not method.name.endswith(FINE_TUNED):
        return replace(base, method=method, personalize=replace(base.personalize, mode=base.personalize.mode or "off"))
    wanted = base.personalize if base.personalize.wanted else replace(base.personalize, mode="if-it-pays")
    return replace(base, method=Choice(method.name.removesuffix(FINE_TUNED), method.options), personalize=wanted)


def with_fine_tuning(base: Config, methods: Sequence[Choice]) -> list[Choice]:
    """Add FedAvg with fine-tuning where FedAvg is compared, or the base config fine-tunes: the baseline that is easy to forget.

    Not where the base config says that nobody fine-tunes (``personalize.mode = "off"``).
    """
    fine_tuned = Choice(f"fedavg{FINE_TUNED}")
    due = base.personalize.wanted or (Choice("fedavg") in methods and base.personalize.mode != "off")
    return [*methods, *([fine_tuned] if due and fine_tuned not in methods else [])]


@functools.lru_cache(maxsize=2)
def _scenario(key: str) -> Scenario:
    return build_scenario(from_dict(json.loads(key), "scenario"))


_in_memory: dict[str, Scenario] = {}


@contextmanager
def data_in_memory(config: Config, scenario: Scenario | None) -> Iterator[None]:
    """Let ``shared_scenario`` find data that no config can build, while the block lasts."""
    key = json.dumps(as_dict(config)["scenario"], sort_keys=True)
    if scenario is not None:
        _in_memory[key] = scenario
    try:
        yield
    finally:
        _in_memory.pop(key, None)


def shared_scenario(config: Config) -> Scenario:
    """Build the scenario of a config, or return the one built before for the same settings."""
    tables = as_dict(config)
    if (given := _in_memory.get(json.dumps(tables["scenario"], sort_keys=True))) is not None:
        return given
    return _scenario(json.dumps({t: tables[t] for t in CHOICES if t != "method" and t in tables}, sort_keys=True))


def execute(config: Config, *, keep: Path | None = None, observer: Observer | None = None) -> ResultRow:
    """Run one config and return its row; with ``keep``, in a run directory below that folder, resuming one that was interrupted."""
    planned = plan(config, shared_scenario(config))
    name = f"{planned.scenario.name}-{config.method.name}-seed{config.run.seed}-{planned.key[:8]}"
    result = run(planned, None if keep is None else keep / name, resume=keep is not None, observer=observer)
    row = as_result(result.summary, as_dict(planned.config), by_round(result.history, result.summary))
    row |= {} if (data := _data_of(planned.whole)) is None else {"data": data}
    if "personalized" in result.summary:
        metric = result.metric.value
        row["plain"] = {"config": plain_key(config), metric: row[metric]}
        row[metric] = result.summary["personalized"][metric]
    return row if keep is None else {**row, "directory": name}


def _data_of(scenario: Scenario) -> str | None:
    """Return a hash over the samples of own files, which a config knows by their path only; ``None`` for other data."""
    found = scenario.fingerprints
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest() if found else None


def plain_key(config: Config) -> str | None:
    """Return the hash of the same run without fine-tuning; ``None`` for a run that has none."""
    if not config.personalize.wanted:
        return None
    return plan(replace(config, personalize=PersonalizeConfig("off")), shared_scenario(config)).key


@dataclass(frozen=True)
class Job:
    """A run to do: its config as asked for, the hashes of the complete one, of the run without tuning that comes with it, of own files."""

    config: Config
    key: str
    plain: str | None = None
    data: str | None = None

    def __str__(self) -> str:
        usual = default_options(find(self.config.method.name))
        options = "".join(f":{k}={v}" for k, v in self.config.method.options.items() if k not in usual or v != usual[k])
        method = self.config.method.name + ("" if self.plain is None else FINE_TUNED)
        without = f" without {', '.join(self.config.run.hold_out)}" if self.config.run.hold_out else ""
        where = Path(str(self.config.scenario.options.get("path") or self.config.scenario.name)).stem
        return f"{method}{options} on {where}{without}, seed {self.config.run.seed}"


@dataclass(frozen=True)
class Done:
    """A run that ended: its row, or why there is none."""

    job: Job
    row: ResultRow | None
    error: str = ""


@dataclass
class ComparisonOutcome:
    """What a comparison did: runs found finished, run now, failed, and left for the next time; and the keys of all that were wanted."""

    found: int = 0
    ran: int = 0
    failed: list[Done] = field(default_factory=list)
    left: int = 0
    keys: list[str] = field(default_factory=list)


class ComparisonObserver(Observer, Protocol):
    """Whoever wants to see a comparison progress."""

    def launch(self, job: Job, number: int, total: int) -> None:
        """Note that a run begins, the ``number``-th of all."""

    def note(self, done: Done, results: Results, ended: int, total: int) -> None:
        """Note that a run ended, with the results so far and the number of runs ended."""


def compare(
    wanted: Sequence[Config],
    out: Path,
    *,
    jobs: int = 1,
    time_limit: float | None = None,
    keep_runs: bool = False,
    merge: Sequence[Path] = (),
    watch: ComparisonObserver | None = None,
) -> ComparisonOutcome:
    """Run what is missing in ``out/results.jsonl``, ``jobs`` runs at a time, each in a process of its own.

    Parameters
    ----------
    time_limit : float, optional
        Seconds after which no run begins; a run is not begun either if what is known of its method says that it would not end in time.
    keep_runs : bool
        Keep a run directory for every run (under ``out/runs``), from which an interrupted run goes on.
    merge : sequence of Path
        Further results to take in first.
    watch : ComparisonObserver, optional
        Told of every run that begins and ends and, unless it runs in a process of its own, of its rounds.
    """
    from emdcfl.studies.jobs import parallel

    started = time.monotonic()
    if any(config.scenario.name == OWN_FILES for config in wanted):
        _scenario.cache_clear()  # files may have changed since another comparison of this process
    with Results(out) as results:
        results.add([row for path in merge for row in checked(read_results(path), path)])
        queue = _queue(wanted)
        _refuse_other_data(queue, results)
        missing = {job.key: job for job in queue if job.key not in results.known()}
        with_others = {job.plain for job in missing.values()}
        outcome = ComparisonOutcome(found=len(queue) - len(missing), keys=[job.key for job in queue])
        keep = out / "runs" if keep_runs else None
        due = _within_limit([job for job in missing.values() if job.key not in with_others], results, started, time_limit)
        if watch is not None:
            due = _announced(due, watch, outcome.found, len(queue))
        ended = parallel(due, jobs, keep) if jobs > 1 else (attempt(job, keep, watch) for job in due)
        with closing(ended):
            for done in ended:
                if done.row is not None:
                    results.add([done.row, *plain_row(done.row)])
                    outcome.ran = len(missing.keys() & results.known())
                else:
                    log.warning("%s failed: %s", done.job, done.error)
                    outcome.failed.append(done)
                if watch is not None:
                    watch.note(done, results, outcome.found + outcome.ran + len(outcome.failed), len(queue))
        failed = {key for done in outcome.failed for key in (done.job.key, done.job.plain)}
        outcome.left = len(missing.keys() - results.known() - failed)
    return outcome


def _queue(wanted: Sequence[Config]) -> list[Job]:
    jobs: dict[str, Job] = {}
    for config in wanted:
        scenario = shared_scenario(config)
        key = plan(config, scenario).key
        jobs.setdefault(key, Job(config, key, plain_key(config), _data_of(scenario)))
    return list(jobs.values())


def _refuse_other_data(queue: Sequence[Job], results: Results) -> None:
    """Raise where a finished run had other samples: a config names own files by their path, and they may have changed."""
    data = {row["config"]: row.get("data") for row in results.rows}
    changed = next((job for job in queue if data.get(job.key) not in (None, job.data)), None)
    if changed is not None:
        path = changed.config.scenario.options["path"]
        raise StoreError(f"{results.path}: holds runs on other data than {path} has now; restore the files, or choose another --out")


def attempt(job: Job, keep: Path | None, observer: Observer | None = None) -> Done:
    """Run a job; whatever goes wrong ends this run, not the others."""
    try:
        with _warnings_named(job):
            return Done(job, execute(job.config, keep=keep, observer=observer))
    except EmdcflError as error:
        return Done(job, None, str(error))
    except Exception as error:  # a method's bug must not cost the runs behind it
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Done(job, None, f"{type(error).__name__}: {' '.join(str(error).split())} ({Path(place.filename).name}, line {place.lineno})")


@contextmanager
def _warnings_named(job: Job) -> Iterator[None]:
    """Let warnings begin with the run they are about."""

    def name(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            record.msg, record.args = f"{job}: {record.getMessage()}", ()
        return True

    loggers = (log, logging.getLogger("emdcfl.doubts"))
    for one in loggers:
        one.addFilter(name)
    try:
        yield
    finally:
        for one in loggers:
            one.removeFilter(name)


def _within_limit(jobs: Sequence[Job], results: Results, started: float, limit: float | None) -> Iterator[Job]:
    """Yield the jobs that can be expected to end before the limit."""
    for job in jobs:
        left = None if limit is None else limit - (time.monotonic() - started)
        if left is not None and left <= max(0.0, expected_seconds(job, results.rows)):
            log.debug("time limit: %s waits for the next start", job)
            continue
        yield job


def _announced(jobs: Iterator[Job], watch: ComparisonObserver, found: int, total: int) -> Iterator[Job]:
    for number, job in enumerate(jobs, found + 1):
        watch.launch(job, number, total)
        yield job


def expected_seconds(job: Job, rows: Sequence[ResultRow]) -> float:
    """Say how long a run may take: the longest of its method on its scenario, else the median on its scenario, else 0 (unknown)."""
    same = [r for r in rows if r["settings"]["scenario"]["name"] == job.config.scenario.name]
    own = [float(r["seconds"]["total"]) for r in same if r["method"] == job.config.method.name]
    others = sorted(float(r["seconds"]["total"]) for r in same)
    return max(own) if own else (others[len(others) // 2] if others else 0.0)


def describe_failures(failed: Sequence[Done]) -> str:
    """One line that names what failed."""
    shown = "; ".join(f"{d.job}: {d.error}" for d in failed[:3])
    return f"{plural(len(failed), 'run')} failed ({shown}{'; …' if len(failed) > 3 else ''}); start again to retry"
