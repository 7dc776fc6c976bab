"""Comparisons: every run once, whatever happens between; rows that say where they come from; several processes; merging."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result as Ran
from tests.e2e.shell import ROOT, SOURCES
from typer.testing import CliRunner

from emdcfl.cli import compare as command  # noqa: F401  registers the command
from emdcfl.cli.app import app
from emdcfl.core.errors import ClientError, ConfigError, StoreError
from emdcfl.runs.config import Choice, Config, PersonalizeConfig, RunConfig, TrainingConfig, as_dict, loads
from emdcfl.studies import compare, jobs
from emdcfl.studies.compare import configs, parse_methods, parse_seeds
from emdcfl.studies.results import Results, as_result, checked, read_results
from emdcfl.studies.table_files import markdown
from emdcfl.studies.tables import build

BASE = Config(
    run=RunConfig(rounds=1),
    scenario=Choice("rotated-digits", {"groups": 2, "clients_per_group": 1}),
    training=TrainingConfig(local_epochs=1),
)
FOUR = configs(BASE, parse_methods("oracle,fedavg"), [0, 1])


def fake(config: Config, *, keep: Any = None, observer: Any = None) -> dict[str, Any]:
    """A finished run without training: numbers follow from method and seed."""
    plan = compare.plan(config, compare.shared_scenario(config))
    score = (len(config.method.name) + config.run.seed) / 20
    summary = {
        "config": plan.key, "scenario": plan.scenario.name, "method": config.method.name, "seed": config.run.seed,
        "rounds": 1, "k": 1, "ari": 1.0,
        "accuracy": {"mean": score, "worst": score / 2, "variants": {"test": {"mean": score, "worst": score / 2}}},
        "seconds": {"total": 1.0}, "notes": [], "versions": {}, "failures": [],
    }  # fmt: skip
    row = as_result(summary, as_dict(plan.config), [])
    return row if (plain := compare.plain_key(config)) is None else {**row, "plain": {"config": plain, "accuracy": row["accuracy"]}}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace training by ``fake``; the list names what was run."""
    ran: list[str] = []

    def execute(config: Config, **options: Any) -> dict[str, Any]:
        ran.append(f"{config.method.name}-{config.run.seed}")
        return fake(config, **options)

    monkeypatch.setattr(compare, "execute", execute)
    return ran


def test_whoever_watches_is_told_what_begins(tmp_path: Path, quick: list[str]) -> None:
    compare.compare(FOUR[:1], tmp_path)
    begun: list[tuple[str, int, int]] = []
    watch = SimpleNamespace(launch=lambda job, number, total: begun.append((str(job), number, total)), note=lambda *_: None)
    compare.compare(FOUR, tmp_path, watch=watch)
    assert begun == [
        ("fedavg on rotated-digits, seed 0", 2, 4),
        ("oracle on rotated-digits, seed 1", 3, 4),
        ("fedavg on rotated-digits, seed 1", 4, 4),
    ]


def test_the_configs_options_of_a_method_hold_for_it_and_not_for_others() -> None:
    """Among them privacy: without it, a comparison would send what the config protects."""
    base = loads('[method]\nname = "emdcfl"\nevidence = 9.0\nalpha = 0.005\n[privacy]\nepsilon = 64\n')
    found = configs(base, parse_methods("emdcfl,emdcfl:evidence=2,emdcfl+ft,ifca"), [0])
    own = {"evidence": 9.0, "alpha": 0.005, "privacy_epsilon": 64}
    assert [dict(config.method.options) for config in found] == [own, {**own, "evidence": 2.0}, own, {}]
    assert str(compare.Job(found[0], "")).startswith("emdcfl:evidence=9.0:privacy_epsilon=64 on ")  # alpha is the default
    base = loads('[method]\nname = "fedprox"\nmu = 1.0\nprox = "squared"\n')
    (config,) = configs(base, parse_methods("fedprox:preset=reference"), [0])
    assert dict(config.method.options) == {"mu": 1.0, "preset": "reference"}, "a preset's values are not the config's"


def test_a_real_run_leaves_a_row_that_says_where_it_comes_from(tmp_path: Path) -> None:
    outcome = compare.compare(FOUR[:2], tmp_path)
    rows = read_results(tmp_path)
    assert (outcome.ran, outcome.found, outcome.left, outcome.failed) == (2, 0, 0, [])
    assert [r["method"] for r in rows] == ["oracle", "fedavg"]
    for row in rows:
        assert row["config"] in outcome.keys
        assert row["settings"]["training"]["local_epochs"] == 1
        assert row["settings"]["training"]["batch_size"] == 32  # the scenario's default, written out
        assert row["versions"]["torch"] and row["hardware"] and row["seconds"]["total"] > 0
        assert [h["round"] for h in row["history"]] == [1]
        assert row["history"][0]["mean"] == row["accuracy"]["mean"]
    again = compare.compare(FOUR[:2], tmp_path)
    assert (again.ran, again.found) == (0, 2)


def test_kept_runs_are_run_directories_with_the_same_numbers(tmp_path: Path) -> None:
    compare.compare(FOUR[:1], tmp_path / "kept", keep_runs=True)
    compare.compare(FOUR[:1], tmp_path / "not")
    kept, plain = read_results(tmp_path / "kept")[0], read_results(tmp_path / "not")[0]
    assert kept["accuracy"] == plain["accuracy"]
    assert (tmp_path / "kept" / "runs" / kept["directory"] / "summary.json").exists()
    assert [*checked([kept], "results")] == [kept]


def test_one_run_gives_the_rows_with_and_without_fine_tuning(tmp_path: Path) -> None:
    plain, tuned = configs(BASE, parse_methods("fedavg,fedavg+ft"), [0])
    assert (plain.personalize.mode, tuned.personalize.mode, tuned.method) == ("off", "if-it-pays", Choice("fedavg"))
    always = replace(tuned, personalize=PersonalizeConfig("on", epochs=2))
    outcome = compare.compare([plain, always], tmp_path / "both")
    assert (outcome.ran, outcome.left) == (2, 0)
    with_it, without = read_results(tmp_path / "both")
    compare.compare([plain], tmp_path / "plain")
    (alone,) = read_results(tmp_path / "plain")
    for key in ("config", "accuracy", "settings", "history"):
        assert without[key] == alone[key]
    assert without["seconds"].keys() == alone["seconds"].keys() and with_it["accuracy"] != without["accuracy"]
    assert [*checked([with_it, without], "results")] == [with_it, without]
    assert build([with_it, without]).rows == ("FedAvg", "FedAvg + fine-tuning")


def test_fedavg_with_fine_tuning_is_compared_unless_nobody_asks_for_it() -> None:
    names = [c.name for c in compare.with_fine_tuning(BASE, parse_methods("oracle,fedavg"))]
    assert names == ["oracle", "fedavg", "fedavg+ft"]
    assert [c.name for c in compare.with_fine_tuning(BASE, parse_methods("oracle"))] == ["oracle"]
    off = replace(BASE, personalize=PersonalizeConfig("off"))
    assert [c.name for c in compare.with_fine_tuning(off, parse_methods("oracle,fedavg"))] == ["oracle", "fedavg"]
    on = replace(BASE, personalize=PersonalizeConfig("on"))
    assert [c.name for c in compare.with_fine_tuning(on, parse_methods("oracle"))] == ["oracle", "fedavg+ft"]
    assert [c.personalize.mode for c in configs(on, parse_methods("oracle,fedavg+ft"), [0])] == ["on", "on"]
    assert {c.name for c in parse_methods("all+ft")} == {f"{c.name}+ft" for c in parse_methods("all")}


def test_scenario_is_built_once_for_all_methods(tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    original = compare.build_scenario
    monkeypatch.setattr(compare, "build_scenario", lambda config: built.append(1) or original(config))
    compare._scenario.cache_clear()
    compare.compare(FOUR, tmp_path)
    assert (len(built), len(quick)) == (1, 4)


def test_own_files_that_changed_are_read_again_and_do_not_share_a_table(tmp_path: Path) -> None:
    folder = tmp_path / "my\u3000data"
    folder.mkdir()

    def write(word: str) -> None:
        for site in "ab":
            (folder / f"{site}.csv").write_text("u,label\n" + "".join(f"{i},{word if i % 2 else 'no'}\n" for i in range(20)))

    write("yes")
    base = replace(BASE, scenario=Choice("folder", {"path": str(folder)}))
    one = configs(base, parse_methods("fedavg"), [0])
    compare.compare(one, tmp_path / "out")
    assert compare.compare(one, tmp_path / "out").found == 1
    (row,) = checked(read_results(tmp_path / "out"), "results")  # also of a folder with a wide space in its name
    write("other")
    with pytest.raises(StoreError, match="holds runs on other data"):
        compare.compare(one, tmp_path / "out")
    compare.compare(one, tmp_path / "new")
    assert read_results(tmp_path / "new")[0]["data"] != row["data"]
    assert compare.shared_scenario(base).classes == ("no", "other")


def test_all_leaves_out_the_methods_that_the_data_do_not_allow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for site in "ab":
        (folder / f"{site}.csv").write_text("u,label\n" + "".join(f"{i},{i % 2}\n" for i in range(20)))
    base = replace(BASE, scenario=Choice("folder", {"path": str(folder)}))
    numbers = replace(BASE, scenario=Choice("folder", {"path": str(folder), "task": "regression"}))
    named = {c.name for c in parse_methods("all", base)}
    assert {"emdcfl", "fedavg", "pacfl"} < named and not {"oracle", "ifca"} & named
    assert "leaves out oracle, ifca," in caplog.messages[0]
    assert "pacfl" not in {c.name for c in parse_methods("all", numbers)}
    assert {c.name for c in parse_methods("all+ft", BASE)} == {c.name for c in parse_methods("all+ft")}
    with pytest.raises(ConfigError, match="fewer"):  # what refuses all is said
        parse_methods("all", replace(base, run=replace(base.run, hold_out=("a", "b"))))
    with pytest.raises(ConfigError, match="solver"):  # nor is the method left out whose options the config has wrong
        parse_methods("all", replace(BASE, method=Choice("emdcfl", {"solver": "sinkhron"})))
    with pytest.raises(ConfigError, match="ifca needs the number of clusters"):  # before the methods beside it have trained
        compare.compare(configs(base, parse_methods("fedavg,ifca"), [0]), tmp_path / "out")
    assert not (tmp_path / "out" / "results.jsonl").exists()


@pytest.mark.parametrize("seed", range(5))
def test_interrupted_anywhere_it_ends_as_if_it_had_not_been(tmp_path: Path, quick: list[str], seed: int) -> None:
    rng = random.Random(seed)

    def stop(*_: Any) -> None:
        if rng.random() < 0.6:
            raise KeyboardInterrupt

    for _ in range(20):
        try:
            compare.compare(FOUR, tmp_path / "stopped", watch=SimpleNamespace(launch=lambda *_: None, note=stop))
            break
        except KeyboardInterrupt:
            if rng.random() < 0.5:  # a kill in the middle of a line
                with (tmp_path / "stopped" / "results.jsonl").open("ab") as file:
                    file.write(b'{"config": "half')
    assert sorted(quick) == ["fedavg-0", "fedavg-1", "oracle-0", "oracle-1"]
    compare.compare(FOUR, tmp_path / "whole")
    stopped, whole = (read_results(tmp_path / name) for name in ("stopped", "whole"))
    assert stopped == whole
    assert markdown(build(stopped)) == markdown(build(whole))


@pytest.mark.usefixtures("quick")
def test_with_several_jobs_the_next_is_asked_for_when_one_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a time limit says of a run must be said when it begins, not while others still have to end."""
    fork = multiprocessing.get_context("fork")  # which knows the run without training, and imports nothing again
    monkeypatch.setattr(jobs, "multiprocessing", SimpleNamespace(get_context=lambda _: fork))
    ended: list[Any] = []
    asked: list[int] = []

    def source() -> Any:
        for job in compare._queue(FOUR):
            asked.append(len(ended))
            yield job

    for done in jobs.parallel(source(), 2, None):
        assert done.row is not None, done.error
        ended.append(done)
    assert asked == [0, 0, 1, 2]
    assert len(ended) == 4


@pytest.mark.slow
def test_killed_at_any_moment_no_run_is_lost_or_repeated(tmp_path: Path) -> None:
    """Real training: what was on the disk stays and is not run again, and the table is that of an undisturbed comparison."""
    arguments = [sys.executable, "-m", "tests.runs.crash_compare", str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, **SOURCES}, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(life["killed"] for life in lives) >= 2 and not lives[-1]["killed"]
    assert any(life["there"] for life in lives)  # at least one life went on from where another had ended
    for life, after in itertools.pairwise(lives):
        assert after["there"][: len(life["there"])] == life["there"]
    for life in lives:
        assert not set(life["there"]) & set(life["begun"]) and len(set(life["begun"])) == len(life["begun"])
    whole, killed = ([{**row, "seconds": None} for row in read_results(tmp_path / name)] for name in ("whole", "killed"))
    assert whole == killed and len(whole) == 6
    first, second = (table_without_seconds(tmp_path / name / "table.csv") for name in ("whole", "killed"))
    assert first == second and len(first) > 6


def table_without_seconds(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if ",seconds," not in line]


def test_a_failure_costs_its_own_run_only(tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(config: Config, **options: Any) -> dict[str, Any]:
        if config.method.name == "fedavg" and config.run.seed == 0:
            raise ClientError("the training loss became nan")
        if config.method.name == "fedavg":
            raise ZeroDivisionError("a bug")
        return fake(config, **options)

    monkeypatch.setattr(compare, "execute", execute)
    outcome = compare.compare(FOUR, tmp_path)
    assert outcome.ran == 2 and len(outcome.failed) == 2
    text = compare.describe_failures(outcome.failed)
    assert "fedavg on rotated-digits, seed 0: the training loss became nan" in text
    assert "ZeroDivisionError: a bug (test_compare.py, line" in text
    monkeypatch.setattr(compare, "execute", fake)
    assert compare.compare(FOUR, tmp_path).ran == 2


def test_warnings_name_the_run_they_are_about(
    tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def execute(config: Config, **options: Any) -> dict[str, Any]:
        logging.getLogger("emdcfl.doubts").warning("%s are linked", "a – b")
        return fake(config, **options)

    monkeypatch.setattr(compare, "execute", execute)
    compare.compare(FOUR[:1], tmp_path)
    logging.getLogger("emdcfl.doubts").warning("afterwards")
    assert caplog.messages == [f"{compare.Job(FOUR[0], '')}: a – b are linked", "afterwards"]


def test_time_limit_stops_between_runs(tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(compare.time, "monotonic", lambda: float(next(clock)))
    first = compare.compare(FOUR, tmp_path, time_limit=25)
    assert (first.ran, first.left) == (2, 2)
    assert quick == ["oracle-0", "fedavg-0"]
    assert compare.compare(FOUR, tmp_path).ran == 2


def test_a_run_that_would_outlast_the_limit_is_not_begun(tmp_path: Path, quick: list[str]) -> None:
    slow = [{**fake(FOUR[1]), "seconds": {"total": 500.0}}]
    job = compare.Job(FOUR[3], "key")
    assert compare.expected_seconds(job, slow) == 500.0
    assert compare.expected_seconds(compare.Job(FOUR[2], "key"), slow) == 500.0  # another method: what is known of the scenario
    assert compare.expected_seconds(job, []) == 0.0
    with Results(tmp_path) as results:
        results.add(slow)
    assert compare.compare(FOUR, tmp_path, time_limit=100).left == 3


def test_results_of_several_machines_merge(tmp_path: Path, quick: list[str]) -> None:
    compare.compare(FOUR[:3], tmp_path / "a")
    compare.compare(FOUR[1:], tmp_path / "b")
    quick.clear()
    outcome = compare.compare(FOUR, tmp_path / "c", merge=[tmp_path / "a", tmp_path / "b" / "results.jsonl"])
    assert (outcome.ran, outcome.found, quick) == (0, 4, [])
    assert len(read_results(tmp_path / "c")) == 4


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    with Results(tmp_path), pytest.raises(StoreError, match="in use"):
        Results(tmp_path)


def test_methods_and_seeds_are_read() -> None:
    everything = parse_methods("all")
    assert everything[:2] == [Choice("oracle"), Choice("emdcfl")] and len(everything) >= 18
    assert parse_methods("emdcfl:tolerance=auto:solver=sinkhorn,emdcfl:tolerance=auto:solver=sinkhorn") == [
        Choice("emdcfl", {"tolerance": "auto", "solver": "sinkhorn"})
    ]
    assert parse_seeds("0,1,1,5-6") == [0, 1, 5, 6]
    with pytest.raises(ConfigError, match="did you mean 'fedavg'"):
        parse_methods("fedavgg")
    with pytest.raises(ConfigError, match="option=value"):
        parse_methods("emdcfl:tolerance")
    for wrong in ("one", "3-0"):
        with pytest.raises(ConfigError, match="0,1,2 or 0-4"):
            parse_seeds(wrong)


def cli(*arguments: str) -> Ran:
    return CliRunner().invoke(app, ["compare", *arguments])


def test_command_line(tmp_path: Path, quick: list[str]) -> None:
    done = cli("--scenario", "rotated-digits", "--methods", "oracle,fedavg", "--seeds", "0,1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert quick == ["oracle-0", "fedavg-0", "oracle-1", "fedavg-1"]  # with fine-tuning, which brings the row without it
    assert "[6/6] fedavg+ft on rotated-digits, seed 1" in done.output and "fedavg+ft is added" in done.output
    assert "6 of 6 runs are there (6 run now)" in done.output
    assert "FedAvg + fine-tuning" in (tmp_path / "table.md").read_text()
    assert {p.name for p in tmp_path.iterdir()} >= {"results.jsonl", "table.md", "table.tex", "table.csv", "report.html"}
    assert "FedAvg" in (tmp_path / "report.html").read_text(encoding="utf-8")
    for _ in range(2):  # the second takes nothing in
        merged = cli("--merge", str(tmp_path), "--out", str(tmp_path / "more"))
        assert "6 runs are there" in merged.output
        assert merged.exit_code == 0
    assert (tmp_path / "more" / "table.md").read_text() == (tmp_path / "table.md").read_text()


def test_a_failed_run_counts_with_the_one_that_would_have_come_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(config: Config, **options: Any) -> dict[str, Any]:
        if config.method.name == "fedavg":
            raise ClientError("diverged")
        return fake(config, **options)

    monkeypatch.setattr(compare, "execute", execute)
    done = cli("--scenario", "rotated-digits", "--methods", "oracle,fedavg", "--seeds", "0", "--out", str(tmp_path))
    assert "1 of 3 runs are there" in done.output and isinstance(done.exception, ClientError)


def test_command_line_refuses_what_it_cannot_mean(tmp_path: Path) -> None:
    for arguments, reason in (
        (["--scenario", "rotated-digits", "--set", "method.tolerance=1"], "go with its name"),
        (["--scenario", "rotated-digits", "--set", "run.seed=5"], "--seeds"),
        ([], "got none"),
    ):
        done = cli(*arguments, "--out", str(tmp_path))
        assert isinstance(done.exception, ConfigError)
        assert reason in str(done.exception)


@pytest.mark.slow
def test_two_processes_killed_and_started_again(tmp_path: Path) -> None:
    """Real signals to a real command with two workers; what was finished is not run again, and no worker is left."""
    settings = ("scenario.groups=2", "scenario.clients_per_group=1", "run.rounds=1", "training.local_epochs=1")
    wanted = ["--scenario", "rotated-digits", "--methods", "oracle,fedprox,local", "--seeds", "0,1", "--out", str(tmp_path)]
    arguments = ["compare", *wanted, *(word for setting in settings for word in ("--set", setting))]
    before: list[str] = []
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)):
        running = start([*arguments, "--jobs", "2"])
        until(grown, tmp_path, len(before))
        workers = children(running.pid)
        running.send_signal(number)
        _, said = running.communicate(timeout=60)
        assert running.returncode == code, said
        assert said.count("continue with") == (number == signal.SIGTERM)
        assert workers
        until(gone, workers)
        assert lines(tmp_path)[: len(before)] == before
        before = lines(tmp_path)
    last = CliRunner().invoke(app, arguments)
    assert last.exit_code == 0, last.output
    assert lines(tmp_path)[: len(before)] == before
    assert len({json.loads(line)["config"] for line in lines(tmp_path)}) == len(lines(tmp_path)) == 6
    assert f"({6 - len(before)} run now)" in last.output


def until(condition: Callable[..., bool], *given: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition(*given):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def grown(folder: Path, least: int) -> bool:
    return len(lines(folder)) > least


def gone(pids: Sequence[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    words, environment = [sys.executable, "-m", "emdcfl", *arguments], {**os.environ, **SOURCES}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def lines(folder: Path) -> list[str]:
    path = folder / "results.jsonl"
    return path.read_text().splitlines() if path.exists() else []
