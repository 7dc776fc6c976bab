"""``emdcfl run``: one experiment, from a config file and flags to a run directory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emdcfl.cli import STARTED
from emdcfl.cli.app import Scale, TrustModel, app, complete_methods, complete_scenarios, print_json
from emdcfl.cli.own_data import PANEL, add_flags, own_data
from emdcfl.cli.show import show_result, show_unseen
from emdcfl.core.errors import ConfigError
from emdcfl.core.units import plural, seconds
from emdcfl.runs.config import OWN_FILES, Config, config_keys, load, override, parse_settings
from emdcfl.runs.loop import Observer
from emdcfl.runs.store.identity import Baselines, noted_baselines
from emdcfl.runs.verdict.advice import BASELINES, advice
from emdcfl.runs.verdict.findings import in_brief
from emdcfl.runs.watching.progress import Live, terminal
from emdcfl.runs.watching.trackers import TRACKERS, Tracking, open_tracker

if TYPE_CHECKING:
    from rich.console import Console

    from emdcfl.runs.plan import RunPlan
    from emdcfl.runs.result import Result

TRAINING, MACHINES = "Training", "Engine and machines"
"""Headings of options in the help."""


def _training(help: str, default: str | bool = "the scenario's") -> Any:
    return typer.Option(help=help, show_default=default, rich_help_panel=TRAINING)


def _machines(help: str, default: str | bool = "auto") -> Any:
    return typer.Option(help=help, show_default=default, rich_help_panel=MACHINES)


def build_config(config: Path | None, flags: Mapping[str, Any], settings: Sequence[str]) -> Config:
    """Return the config: the file, then the flags that were given, then ``--set``."""
    if config is not None and config.is_dir():
        raise ConfigError(f"expected a config file, got the folder {config}; for your own files use: emdcfl run --data {config}")
    base = load(config) if config is not None else Config()
    base = override(base, {key: value for key, value in flags.items() if value is not None}, "command line")
    return override(base, parse_settings(settings))


@app.command()
@own_data(after="data")
def run(
    own: dict[str, Any],
    config: Annotated[
        Path | None, typer.Argument(help="Config file (TOML); 'emdcfl init' writes one.", show_default="run.toml of --federation")
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(
            help="Clients and their data: see 'emdcfl data list'.", show_default="rotated-digits", autocompletion=complete_scenarios
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Your own files instead of a scenario: a folder of sites, or one table.")] = None,
    baselines: Annotated[
        bool | None,
        typer.Option(
            "--baselines/--no-baselines",
            help="Also train one model for all and every site alone, to compare.",
            show_default="yes for own data; with --resume, as the run began",
            rich_help_panel=PANEL,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="See 'emdcfl methods'. Options follow colons: ifca:k=2.", show_default="emdcfl", autocompletion=complete_methods),
    ] = None,
    rounds: Annotated[int | None, _training("Global rounds T.")] = None,
    local_epochs: Annotated[int | None, _training("Local epochs E per round.")] = None,
    batch_size: Annotated[int | None, _training("Local batch size B.")] = None,
    lr: Annotated[float | None, _training("Learning rate of local SGD.")] = None,
    personalize: Annotated[
        str | None,
        _training("Every client fine-tunes its model after the last round: off, on or if-it-pays.", "the scenario's; own data: if-it-pays"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same results.", show_default="0")] = None,
    participants: Annotated[int | None, _training("Clients drawn per round.", "all")] = None,
    hold_out: Annotated[
        str | None, _training("Leave the sites A,B,… out of training. After the run, place them without labels and test them.", False)
    ] = None,
    scale: Scale = None,
    device: Annotated[str | None, _machines("auto, cpu, cuda or cuda:N.")] = None,
    workers: Annotated[int | None, _machines("Processes of the sequential engine. Their number does not change the results.", "1")] = None,
    engine: Annotated[str | None, _machines("auto, sequential, batched, cuda or flower.")] = None,
    federation: Annotated[Path | None, _machines("Run over the nodes of this federation; see 'emdcfl federation'.", False)] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Set any key of a config, for example --set method.tolerance=0.03; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory.", show_default="runs/DATA-METHOD-seedN")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out from its last complete round.")] = False,
    trust_model: TrustModel = False,
    track: Annotated[
        list[str] | None,
        typer.Option(help=f"Also follow the run with {', '.join(TRACKERS)}; repeatable.", autocompletion=lambda: list(TRACKERS)),
    ] = None,
    budget: Annotated[
        str | None, _training("Time that the run may take, for example 10m or 2h. Rounds and epochs are reduced if necessary.", "none")
    ] = None,
    keep_baselines: Annotated[
        bool, typer.Option("--keep-baselines", help="Also keep the models of these comparisons on disk.", rich_help_panel=PANEL)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress, only the result.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")] = False,
) -> None:
    """Run one method on one scenario and write a run directory."""
    from emdcfl.runs import runner
    from emdcfl.runs.plan import refuse_numbers
    from emdcfl.runs.verdict.baselines import run_baselines

    flags = whose_data(scenario, data, own, config) | config_keys(
        method=method, rounds=rounds, local_epochs=local_epochs, batch_size=batch_size, lr=lr, personalize=personalize, seed=seed,
        participants=participants, hold_out=None if hold_out is None else [name.strip() for name in hold_out.split(",")],
        scale=scale, device=device, workers=workers, engine="flower" if engine is None and federation is not None else engine,
    )  # fmt: skip
    chosen = _choose(config, flags, set_ or [], federation, resumed=out if resume else None, trust_model=trust_model)
    what = _data_name(chosen)
    place = out or Path("runs") / f"{what}-{chosen.method.name}-seed{chosen.run.seed}"
    comparisons = _comparisons(chosen, baselines, keep=keep_baselines, resumed=place if resume else None)
    compare = comparisons is not Baselines.NONE
    remote = chosen.engine.name == "flower"
    if remote:
        refuse_numbers(chosen)
    logging.getLogger("emdcfl").setLevel(logging.WARNING if quiet or as_json else logging.INFO)
    logging.getLogger("emdcfl.doubts").setLevel(logging.ERROR)  # the result says them
    console = terminal()
    with nullcontext() if quiet or as_json else Live(console) as live, _tracked(track or [], place, chosen) as watch:
        say: Callable[..., None] = console.print if live else lambda *_, **__: None
        start: Callable[..., Result] = runner.run
        if remote:
            from emdcfl.cli.federation import runner_over

            start = runner_over(federation, live)
        say(f"{chosen.method.name} on {what}, seed {chosen.run.seed}")
        planned = _timed(_with_doubts(chosen, place, say), place, budget, baselines=compare, resume=resume, live=live, say=say)
        result = start(planned, place, resume=resume, observer=watch(live), baselines=comparisons)
        if compare and not remote:  # else the federation has trained them
            run_baselines(result, observer=live, keep=comparisons is Baselines.MODELS, workers=chosen.engine.workers, say=say)
    _finish(console, result, place, merging=not remote, baselines=compare, as_json=as_json)


def _choose(
    config: Path | None,
    flags: Mapping[str, Any],
    settings: Sequence[str],
    federation: Path | None,
    *,
    resumed: Path | None,
    trust_model: bool,
) -> Config:
    """Return the config of the run that is resumed, if at most ``--workers`` was said; else that of file (or federation) and flags."""
    from emdcfl.runs.store import RunStore
    from emdcfl.runs.store.identity import FREE

    implied = None if federation is None else "flower"
    said = {key for key, value in flags.items() if value is not None and (key, value) != ("engine.name", implied)}
    if resumed is not None and config is None and not settings and said <= {FREE}:  # wherever its clients are
        store = RunStore.read(resumed)
        return override(store.config() if trust_model else store.foreign_config(), {key: flags[key] for key in said}, "command line")
    if federation is not None and config is None and (federation / "run.toml").is_file():
        config = federation / "run.toml"
    return build_config(config, flags, settings)


def _comparisons(config: Config, wanted: bool | None, *, keep: bool, resumed: Path | None) -> Baselines:
    """Return what is trained beside the run: as said now, else as the run that is resumed began, else scores for own data."""
    if wanted is False or config.method.name in BASELINES:
        if keep:
            raise ConfigError("--keep-baselines keeps models that are trained beside a run to compare, got a run without; leave it out")
        return Baselines.NONE
    if keep or wanted:
        return Baselines.MODELS if keep else Baselines.SCORES
    began = noted_baselines(resumed) if resumed is not None else None
    return began or Baselines.usual(config.scenario.name)


def _finish(console: Console, result: Result, place: Path, *, merging: bool, baselines: bool, as_json: bool) -> None:
    """Write the report and show what came out, beside the baselines where there are some."""
    from emdcfl.paper.merging import write_quick_merging
    from emdcfl.report import write_report
    from emdcfl.report.load_run import read_run
    from emdcfl.runs.outputs import write_summary

    if merging:
        write_quick_merging(result)
    found = read_run(place)
    others, reading = found.others if baselines else {}, found.reading
    told = {topic.lower().replace(" ", "_"): said for topic, said in in_brief(found.summary, reading, others)}
    summary = {**result.summary, "answers": told}
    write_summary(place, summary)
    report = write_report(place)
    if as_json:
        to_do = advice(found.summary, others)
        extra = {} if not others else {"baselines": others, "advice": None if to_do is None else asdict(to_do)}
        print_json({**summary, **extra})
        return
    show_result(console, found.summary, [row for row in result.history if row["round"] == result.summary["rounds"]], place, others)
    if "unseen" in result.summary:
        show_unseen(console, result.summary["unseen"])
    console.print(f"report: {report}", soft_wrap=True)
    console.print(f"this command took {seconds(time.perf_counter() - STARTED)}: reading, measuring and drawing included")


def _with_doubts(chosen: Config, place: Path, say: Callable[..., None]) -> Config | RunPlan:
    """Read own files before the run starts, and say at once what a flag would repair: training may take long."""
    from emdcfl.runs.plan import plan

    if chosen.scenario.name != OWN_FILES or chosen.engine.name == "flower":
        return chosen
    planned = plan(chosen, folder=place)
    for doubt in planned.scenario.doubts:
        say(f"note: {doubt}", soft_wrap=True)
    return planned


def _timed(
    planned: Config | RunPlan,
    place: Path,
    budget: str | None,
    *,
    baselines: bool,
    resume: bool,
    live: Live | None,
    say: Callable[..., None],
) -> Config | RunPlan:
    """Say how long a run on own files will take, and shorten it to a budget; a run that goes on keeps what it began with."""
    from emdcfl.runs.plan import plan
    from emdcfl.runs.store import RunStore
    from emdcfl.runs.store.identity import is_run
    from emdcfl.runs.watching.forecast import forecast, measure_speed, parse_budget, within

    limit = None if budget is None else parse_budget(budget)
    if limit is not None and isinstance(planned, Config):
        if planned.engine.name == "flower":
            raise ConfigError("--budget measures this machine, got a run over a federation; set --rounds and --local-epochs instead")
        planned = plan(planned, folder=place)
    if isinstance(planned, Config):
        return planned
    if is_run(place):  # without --resume it is refused when it starts
        if limit is None or not resume:
            return planned
        return plan(_as_before(planned.config, RunStore.read(place).foreign_config()), planned.whole, place)
    if limit is None and live is None:
        return planned
    speed = measure_speed(planned)
    if limit is not None:
        config = within(planned, speed, limit, baselines=baselines)
        usual = f"{planned.rounds} of {planned.training.local_epochs}"
        planned = plan(config, planned.whole, place)
        chosen = f"{plural(planned.rounds, 'round')} of {plural(planned.training.local_epochs, 'epoch')}"
        fine = f", {config.personalize.epochs} of fine-tuning" if config.personalize.wanted else ""
        say(f"within {budget}: {chosen}{fine} (without a budget {usual})", soft_wrap=True)
    expected = forecast(planned, speed, baselines=baselines)
    say(str(expected), soft_wrap=True)
    if live is not None:
        live.expect(expected)
    return planned


def _as_before(config: Config, before: Config) -> Config:
    """Take what a budget chose when the run began."""
    return replace(
        config,
        run=replace(config.run, rounds=before.run.rounds),
        training=replace(config.training, local_epochs=before.training.local_epochs),
        personalize=replace(config.personalize, epochs=before.personalize.epochs),
    )


def _data_name(config: Config) -> str:
    """Name a run's data: the scenario, or the folder or file of own data."""
    path = config.scenario.options.get("path") if config.scenario.name == OWN_FILES else None
    return Path(path).resolve().stem if isinstance(path, str) else config.scenario.name


def whose_data(scenario: str | None, data: Path | None, about: Mapping[str, Any], config: Path | None = None) -> dict[str, Any]:
    """Settings that name a scenario, or people's own files: those of ``data`` or of a config, to whose lists flags add."""
    if data is not None and scenario is not None:
        raise ConfigError(f"expected --data or --scenario, got both ({data} and {scenario}); leave one out")
    chosen = load(config).scenario if about and config is not None and scenario is None else None
    known = chosen.options if chosen is not None and chosen.name == OWN_FILES else None
    if data is None and about and known is None:
        flag = next(iter(about)).replace("_", "-")
        raise ConfigError(f"--{flag} describes your own files and goes with --data, or with a config of own files (data check --fix)")
    named = {"scenario": scenario} if data is None else {"scenario": "folder", "scenario.path": str(data)}
    return {**named, **{f"scenario.{name}": value for name, value in add_flags(known or {}, about).items()}}


@contextmanager
def _tracked(names: Sequence[str], place: Path, config: Config) -> Iterator[Callable[[Observer | None], Observer | None]]:
    """Give a function that lets trackers watch a run beside another observer."""
    with ExitStack() as stack:
        found = [stack.enter_context(closing(open_tracker(name, place, config))) for name in dict.fromkeys(names)]

        def watch(observer: Observer | None) -> Observer | None:
            for tracker in found:
                observer = Tracking(tracker, observer)
            return observer

        yield watch
