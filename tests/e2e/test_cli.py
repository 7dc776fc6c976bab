"""What the command line prints and how it ends. Processes cost seconds, so most cases call ``main`` in this one."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import tests.tiny
from tests.e2e.shell import Ended, emdcfl

from emdcfl import __version__, fit, load
from emdcfl.cli.show import draw_table
from emdcfl.cli.start import about, refill
from emdcfl.methods import METHODS
from emdcfl.runs import runner
from emdcfl.runs.watching.progress import terminal
from emdcfl.studies.tables import UNSEEN_HEADS


def refused(ended: Ended, *words: str) -> None:
    """Exit code 2, one line that names the culprit, no traceback, nothing else."""
    assert ended.code == 2, ended
    lines = ended.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), ended.err
    assert "Traceback" not in ended.err
    for word in words:
        assert word in lines[0], lines[0]


QUICK = ("run", "--scenario", "tiny", "--rounds", 1, "--local-epochs", 1, "--device", "cpu")


def test_version_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = emdcfl("--version", cwd=tmp_path, module="emdcfl")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"emdcfl {__version__}\n", "")


def test_pictures_in_a_notebook_whose_backend_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    done = emdcfl("data", "show", "rotated-digits", "--out", "grid.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_no_arguments_show_the_help(cli) -> None:
    ended = cli()
    assert "Usage" in ended.out and ended.err == "" and ended.code == 2
    assert cli("--help").code == 0


def test_every_method_is_described_without_marks_of_latex() -> None:
    for name, cls in METHODS.items():
        known = about(cls)
        text = refill(f"{known['description']}\n\n{known['parameters']}", 80)
        assert not re.search(r"\\|frac|:math:|``|^\.\. ", text, re.M), name
        assert max(map(len, text.splitlines())) <= 80, name


def test_init_then_run_that_file(cli, tmp_path: Path) -> None:
    written = cli("init", "first.toml")
    assert written.code == 0 and "emdcfl run first.toml" in written.out
    refused(cli("init", "first.toml"), "first.toml exists already")
    ended = cli("run", "first.toml", "--scenario", "tiny", "--rounds", 1, "--lr", 0.01, "--seed", 3, "--out", "out", "--quiet")
    assert ended.code == 0, ended.err
    config = tomllib.loads((tmp_path / "out" / "config.toml").read_text())
    assert config["scenario"]["name"] == "tiny" and config["run"] == {"seed": 3, "rounds": 1, "evaluate_every": 1}
    assert config["training"]["lr"] == 0.01 and config["training"]["momentum"] == 0.9


def test_flags_win_over_the_file_and_set_over_both(cli, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[run]\nrounds = 9\nseed = 5\n[scenario]\nname = "tiny"\n[method]\nname = "emdcfl"\ntolerance = 0.5\n')
    assert cli("run", "c.toml", "--rounds", 1, "--set", "method.tolerance=0.03", "--out", "a", "--quiet").code == 0
    config = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert (config["run"]["rounds"], config["run"]["seed"], config["method"]["tolerance"]) == (1, 5, 0.03)
    assert cli("run", "c.toml", "--rounds", 1, "--method", "fedavg", "--out", "b", "--quiet").code == 0  # the file's options were emdcfl's
    assert tomllib.loads((tmp_path / "b" / "config.toml").read_text())["method"] == {"name": "fedavg"}


def test_progress_is_one_plain_line_per_round_where_there_is_no_terminal(cli) -> None:
    ended = cli(*QUICK[:3], "--rounds", 2, "--set", "method.tolerance=0.08", "--out", "run")
    assert ended.code == 0 and ended.err == ""
    lines = ended.out.splitlines()
    assert [
        bool(re.match(r"round [12]/2  \d clusters?  train loss [\d.]+  accuracy [\d.]+%, worst [\d.]+%  \d+ s$", x)) for x in lines[1:3]
    ] == [True] * 2
    assert "\x1b" not in ended.out and "\r" not in ended.out
    text = ended.out
    assert "Clusters found" in text and "site-0, site-1" in text and "group-0" in text
    assert re.search(r"accuracy [\d.]+% \(95% interval [\d.]+–[\d.]+%\), worst client [\d.]+%; K = \d, ARI = -?\d\.\d\d", text)
    assert re.search(r"time: training [\d.]+ s · comparing [\d.]+ s · testing [\d.]+ s · total [\d.]+ s", text)
    assert "run directory: run" in text


def test_quiet_leaves_the_result_and_json_nothing_but_json(cli, tmp_path: Path) -> None:
    quiet = cli(*QUICK, "--out", "quiet", "--quiet")
    assert quiet.code == 0 and "round 1/1" not in quiet.out and "ARI" in quiet.out and quiet.err == ""
    as_json = cli(*QUICK, "--out", "json", "--json")
    summary = json.loads(as_json.out)
    assert as_json.code == 0 and as_json.err == ""
    assert summary == {k: v for k, v in json.loads((tmp_path / "json" / "summary.json").read_text()).items() if k != "sha256"}
    assert len(summary["clusters"]) == 4 and list(summary["answers"]) == ["use", "look_at", "how_sure"]


def test_resume_from_the_folder_alone(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = runner.RunStore.save_state

    def stop_after_two(self, index: int, *rest: object, **how: object) -> None:
        save(self, index, *rest, **how)
        if index == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(runner.RunStore, "save_state", stop_after_two)
    arguments = ("run", "--scenario", "tiny", "--rounds", 3, "--seed", 2)
    stopped = cli(*arguments, "--out", "run", "--quiet")
    assert stopped.code == 130 and "--resume" in stopped.err and "Traceback" not in stopped.err
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    refused(cli(*arguments, "--out", "run"), "already holds this run", "--resume")
    assert cli("run", "--out", "run", "--resume", "--quiet").code == 0
    assert cli(*arguments, "--out", "whole", "--quiet").code == 0
    assert tests.tiny.contents(tmp_path / "run") == tests.tiny.contents(tmp_path / "whole")
    assert cli("run", "--out", "run", "--resume", "--quiet").code == 0  # finished: shown again
    refused(cli("run", "--out", "nowhere", "--resume"), "nowhere", "not a run directory")


BAD = {
    "method": (("run", "--method", "emdclf"), ("unknown method 'emdclf'", "did you mean 'emdcfl'")),
    "scenario": (("run", "--scenario", "rotated-digit"), ("unknown scenario 'rotated-digit'", "did you mean 'rotated-digits'")),
    "key of the method": (("run", "--set", "method.tolerence=0.03"), ("tolerence", "did you mean 'tolerance'")),
    "key of a table": (("run", "--set", "training.learning_rate=0.03"), ("learning_rate",)),
    "table": (("run", "--set", "traning.lr=0.03"), ("traning", "did you mean 'training'")),
    "option of the scenario": (("run", "--scenario", "tiny", "--set", "scenario.grops=3"), ("grops", "did you mean 'groups'")),
    "device": (("run", "--device", "gpu"), ("gpu", "cpu")),
    "absent device": (("run", "--device", "cuda:77"), ("cuda:77", "--device cpu")),
    "participants": (("run", "--scenario", "tiny", "--participants", 5), ("participants", "between 1 and 4", "got 5")),
    "no participants": (("run", "--scenario", "tiny", "--participants", 0), ("participants", "0")),
    "rounds": (("run", "--rounds", 0), ("rounds", "at least 1")),
    "rounds in words": (("run", "--rounds", "many"), ("--rounds", "many")),
    "value of an option": (("run", "--scenario", "tiny", "--set", "method.solver=quick"), ("solver", "quick", "sinkhorn")),
    "range of an option": (("run", "--scenario", "tiny", "--set", "method.projection_ratio=2"), ("projection_ratio", "2")),
    "setting without a value": (("run", "--set", "rounds"), ("--set rounds", "table.key=value")),
    "config file": (("run", "missing.toml"), ("missing.toml", "emdcfl init")),
    "folder for a config": (("run", "."), ("config file", "emdcfl run --data .")),
    "no validation data": (("run", "--scenario", "tiny", "--set", "scenario.val=[70, 0]"), ("'site-1'", "validation")),
    "NaN loss": (("run", "--scenario", "tiny", "--lr", "1e30"), ("'site-0'", "round 1", "loss became", "learning rate")),
    "models of comparisons that are not made": (
        ("run", "--scenario", "tiny", "--keep-baselines", "--no-baselines"),
        ("--keep-baselines", "got a run without"),
    ),
    "flag": (("run", "--nope"), ("--nope", "run --help")),
    "command": (("rnu",), ("rnu", "--help")),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line_that_names_the_culprit(cli, kind: str) -> None:
    arguments, words = BAD[kind]
    refused(cli(*arguments, *(("--quiet",) if arguments[0] == "run" else ())), *words)


def test_folders_and_states_that_do_not_fit(cli, tmp_path: Path) -> None:
    assert cli(*QUICK, "--out", "run", "--quiet").code == 0
    refused(cli(*QUICK, "--seed", 1, "--out", "run", "--resume"), "run", "run.seed", "0 there, 1 here")
    refused(cli("run", "--out", "run", "--resume", "--engine", "batched"), "another config", "--resume and --out alone")
    refused(cli("run", "--out", "run", "--resume", "--workers", 2), "batched engine runs in one process", "workers = 2")
    assert cli(*QUICK, "--engine", "sequential", "--out", "one", "--quiet").code == 0
    assert cli("run", "--out", "one", "--resume", "--workers", 2, "--quiet").code == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "holiday.jpg").touch()
    refused(cli(*QUICK, "--out", "other"), "other", "holiday.jpg")
    (tmp_path / "file").touch()
    refused(cli(*QUICK, "--out", "file"), "file")
    state = tmp_path / "run" / "state" / "round-1.json"
    state.write_bytes(state.read_bytes()[:-100])
    ended = cli("run", "--out", "run", "--resume")
    assert ended.code == 2 and "Traceback" not in ended.err
    assert "round-1.json: truncated or damaged" in ended.err.splitlines()[-1] and ended.err.splitlines()[-1].startswith("error: ")


def test_labels_are_repaired_by_a_flag(cli, tmp_path: Path) -> None:
    for site, label in {"a": "benign", "b": "BENIGN "}.items():
        rows = [f"{i % 7},{i % 3},{label if i % 2 else 'malignant'}" for i in range(40)]
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / f"{site}.csv").write_text("\n".join(["x,z,label", *rows]))
    assert "'BENIGN' at b" in cli("data", "check", "d").out
    quick = ("run", "--data", "d", "--rounds", 1, "--local-epochs", 1, "--no-baselines", "--quiet", "--device", "cpu")
    plain = cli(*quick, "--out", "plain")
    assert plain.code == 0 and "'BENIGN' at b" in plain.out, plain.err
    shown = cli(*(part for part in quick if part != "--quiet"), "--out", "shown").out
    assert shown.index("'BENIGN' at b") < shown.index("round 1/1")  # before it takes time
    merged = cli(*quick, "--merge-labels", "--out", "merged")
    assert merged.code == 0 and "BENIGN" not in merged.out
    assert tomllib.loads((tmp_path / "merged" / "config.toml").read_text())["scenario"]["merge_labels"] is True
    refused(cli("data", "check", "d", "--label-map", "benign"), "--label-map OLD=NEW", "benign")
    dropped = cli(*quick, "--merge-labels", "--drop", "z", "--out", "dropped")
    assert dropped.code == 0, dropped.err
    assert tomllib.loads((tmp_path / "dropped" / "config.toml").read_text())["model"]["features"] == 1
    settings = {"scenario.merge_labels": True, "scenario.only": ["x"]}
    result = fit("d", rounds=1, local_epochs=1, settings=settings, out="python", device="cpu")
    assert result.about.classes == ("benign", "malignant") and result.about.shape == (1,)
    assert load("python").place("d/b.csv", name="again").site == "again"


SHORT = ("--rounds", 1, "--local-epochs", 1, "--no-baselines", "--quiet", "--device", "cpu", "--set", "method.tolerance=0.5")


@pytest.fixture
def clinics(cli, tmp_path: Path) -> Path:
    """A folder with the tables of three clinics, another table, and a run."""
    rng = random.Random(0)
    for site in ("a", "b", "c", "new"):
        rows = [f"{rng.gauss(i % 2, 1):.3f},{rng.gauss(0, 1):.3f},{i % 2}" for i in range(60)]
        table = tmp_path / "tree" / ("new" if site == "new" else "d") / f"{site}.csv"
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text("\n".join(["x,z,label", *rows]))
    os.chdir(tmp_path / "tree")
    assert cli("run", "--data", "d", *SHORT, "--out", "runs/r").code == 0
    return tmp_path / "tree"


def test_baselines_have_the_workers_that_the_resumed_run_was_given(cli, clinics: Path) -> None:
    short = [part for part in SHORT if part != "--no-baselines"]
    assert cli("run", "--data", "d", *SHORT, "--engine", "sequential", "--workers", 2, "--out", "one").code == 0
    ended = cli("run", "--data", "d", *short, "--engine", "sequential", "--workers", 1, "--out", "one", "--resume", "--baselines")
    assert ended.code == 0, ended.err
    for folder, workers in {"one": 2, "one/baselines/fedavg": 1, "one/baselines/local": 1}.items():
        assert tomllib.loads((clinics / folder / "config.toml").read_text())["engine"]["workers"] == workers
    trained = (clinics / "one/baselines/fedavg/metrics.jsonl").stat().st_mtime_ns
    assert cli("run", "--out", "one", "--resume", "--quiet").code == 0  # with two, as it began
    assert (clinics / "one/baselines/fedavg/metrics.jsonl").stat().st_mtime_ns == trained


def test_a_resumed_run_keeps_to_its_choice_of_baselines(cli, clinics: Path) -> None:
    beside, again = clinics / "runs/r/baselines", ("run", "--resume", "--quiet", "--out", "runs/r")
    assert cli(*again).code == 0 and not beside.exists()  # as it began: without
    assert cli(*again, "--keep-baselines").code == 0
    models = beside / "fedavg" / "models"
    shutil.rmtree(beside)
    assert cli(*again).code == 0 and models.is_dir()  # and the last word counts
    shutil.rmtree(beside)
    assert cli(*again, "--baselines").code == 0 and beside.is_dir() and not models.exists()


def test_a_budget_chooses_the_rounds_and_a_used_folder_is_refused_before_anything_is_measured(cli, clinics: Path) -> None:
    wanted = ("run", "--data", "d", "--rounds", 2, "--local-epochs", 1, "--no-baselines", "--out", "b")
    first = cli(*wanted, "--budget", "1h")
    assert first.code == 0 and "within 1h: 2 rounds of 1 epoch" in first.out and "epochs" not in first.out.partition("(without")[0], (
        first.out
    )
    again = cli(*wanted)
    assert again.code != 0 and "already holds this run" in again.err and "about" in first.out and "about" not in again.out, again.out


def test_baselines_of_a_scenario_are_trained_where_they_are_asked_for(cli, tmp_path: Path) -> None:
    again = ("run", "--scenario", "tiny", "--rounds", 1, "--local-epochs", 1, "--quiet", "--out", "r")
    assert cli(*again).code == 0 and not Path("r/baselines").exists()
    assert cli(*again, "--resume", "--baselines").code == 0 and Path("r/baselines/fedavg").is_dir()
    shutil.rmtree("r/baselines")
    assert cli(*again, "--resume").code == 0 and Path("r/baselines/fedavg").is_dir()  # as it began
    Path("r/state/baselines.json").write_text("{}")
    assert "say --baselines, --no-baselines or" in " ".join(cli(*again, "--resume").err.split())


def test_a_cluster_that_shares_no_class_with_a_new_site_is_not_compared_in_words(cli, tmp_path: Path) -> None:
    rng = random.Random(0)
    for site, first in {"d/a": 0, "d/b": 0, "d/c": 2, "new": 0}.items():
        rows = [f"{rng.gauss(i % 2, 1):.3f},{rng.gauss(0, 1):.3f},{first + i % 2}" for i in range(240)]
        (tmp_path / site).parent.mkdir(exist_ok=True)
        (tmp_path / f"{site}.csv").write_text("\n".join(["x,z,label", *rows]))
    neighbourhoods = ("--set", "method.grouping=neighbourhoods", "--set", "method.tolerance=auto")
    assert cli("run", "--data", "d", *SHORT, *neighbourhoods, "--out", "r").code == 0
    placed = cli("place", "r", "new.csv")
    assert placed.code == 0 and "not compared" in placed.out and "inf" not in placed.out, placed
    assert [c["ratio"] for c in json.loads(cli("place", "r", "new.csv", "--json").out)["candidates"]][1:] == [None]


def test_a_run_finds_its_data_from_anywhere(cli, clinics: Path, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    placed = cli("place", "tree/runs/r", "tree/new/new.csv")
    assert placed.code == 0, placed.err
    assert cli("run", "--out", "tree/runs/r", "--resume", "--quiet").code == 0
    assert cli("run", "--data", "tree/d", *SHORT, "--out", "tree/runs/r", "--resume").code == 0  # the same place in other words
    clinics.rename(tmp_path / "moved")
    assert cli("place", "moved/runs/r", "moved/new/new.csv").out.replace("moved/", "tree/") == placed.out
    ended = cli("run", "--out", "moved/runs/r", "--resume", "--quiet")
    assert ended.code == 0, ended.err
    (tmp_path / "moved" / "d").rename(tmp_path / "gone")
    refused(cli("place", "moved/runs/r", "moved/new/new.csv"), "moved/runs/r", str(tmp_path / "moved" / "d"), "put them back")


def test_flags_add_to_the_lists_of_a_config_of_own_files(cli, clinics: Path) -> None:
    (clinics / "own.toml").write_text('[scenario]\nname = "folder"\npath = "d"\nleave_out = ["a"]\n')
    refused(cli("run", "own.toml", "--leave-out", "b", *SHORT), "at least two clients", "1 client ('c')")
    (clinics / "other.toml").write_text("[run]\nrounds = 1\n")
    refused(cli("run", "other.toml", "--leave-out", "b"), "--leave-out", "config of own files")


def test_own_data_are_compared(cli, clinics: Path) -> None:
    asked = ("compare", "--data", "d", "--methods", "fedavg,local", "--seeds", 0, "--set", "run.rounds=1", "--out", "c")
    found = json.loads(cli(*asked, "--json").out)
    assert {row["method"] for row in found["table"]} == {"FedAvg", "FedAvg + fine-tuning", "Local"} and found["runs"]["ran"] == 3
    again = cli(*asked)
    assert "3 of 3 runs are there (0 run now)" in again.out and "FedAvg + fine-tuning" in again.out
    refused(cli("compare", "--scenario", "tiny", "--label", "y"), "--label", "--data")


def test_the_shell_completes_names(tmp_path: Path) -> None:
    done = emdcfl(
        cwd=tmp_path, module="emdcfl", _EMDCFL_COMPLETE="complete_bash", COMP_WORDS="emdcfl compare --methods local,fedp", COMP_CWORD="3"
    )
    assert done.stdout.split() == ["local,fedprox"]


def test_a_run_names_the_sites_whose_data_changed(cli, clinics: Path) -> None:
    table = clinics / "d" / "b.csv"
    whole = table.read_text()
    table.write_text("\n".join(whole.splitlines()[:-3]))
    for command in (("run", "--out", "runs/r", "--resume"), ("place", "runs/r", "new/new.csv")):
        refused(cli(*command), "changed: b)", "--out")
    table.write_text(whole.replace("\n", "\r\n"))  # other bytes, the same rows
    assert cli("run", "--out", "runs/r", "--resume", "--quiet").code == 0
    table.rename(clinics / "d" / "e.csv")
    refused(cli("run", "--out", "runs/r", "--resume"), "are gone: b", "are new: e")


def test_methods_are_listed_and_described(cli) -> None:
    listed = cli("methods")
    assert listed.code == 0 and all(name in listed.out for name in ("emdcfl", "oracle", "fedavg", "local"))
    described = json.loads(cli("methods", "emdcfl", "--json").out)
    assert described["fields"]["tolerance"] == {"type": "float or 'auto'", "default": "auto"}
    assert all(field in described["parameters"] for field in described["fields"])
    shown = cli("methods", "emdcfl").out
    assert "Clustered Federated Learning via Embedding" in shown and max(map(len, shown.splitlines())) <= 80
    refused(cli("methods", "emdclf"), "did you mean 'emdcfl'")


def test_names_and_places_are_printed_as_they_are(cli, tmp_path: Path) -> None:
    """Square brackets are markup to the library that prints; a client may be called that."""
    rng = random.Random(0)
    lines = ["clinic,a,b,label"]
    for clinic in ("ward [bold]", "x[/y]", "[red]z", "a:100:b"):
        lines += [f"{clinic},{rng.gauss(label, 1):.3f},{rng.gauss(0, 1):.3f},{label}" for label in [0, 1] * 40]
    table, out = tmp_path / "t.csv", tmp_path / "runs[" / "old]"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ("--client", "clinic")
    for ended in (
        cli("data", "check", table, *options),
        cli("run", "--data", table, *options, "--out", out, "--set", "run.rounds=1", "--set", "training.local_epochs=1"),
    ):
        assert ended.code == 0, ended.err
        assert all(clinic in ended.out for clinic in ("ward [bold]", "x[/y]", "[red]z", "a:100:b"))
    assert "runs[/old]" in ended.out.replace("\n", "")
    assert cli("report", out).code == 0


def test_headings_make_room_for_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cells = ["digit-sites", "EMD-CFL (tolerance 0.03)", "24", *["91.2%"] * (len(UNSEEN_HEADS) - 3)]
    terminal().print(draw_table(UNSEEN_HEADS, [cells], left=("scenario", "method"), title="Sites held out of training"))
    shown = capsys.readouterr().out
    assert "digit-sites" in shown and shown.count("91.2%") == len(UNSEEN_HEADS) - 3 and "nearest groups" not in shown
    monkeypatch.setenv("COLUMNS", "150")
    terminal().print(draw_table(UNSEEN_HEADS, [cells], left=("scenario", "method")))
    assert "nearest groups" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    heads = ("site", "nearest cluster", "nearest groups", "one model for all", "best group", "worst group")
    terminal().print(draw_table(heads, [["UPPER", "0", *["50.0%"] * 4]], left=("site",)))
    assert "one model" in capsys.readouterr().out, "a heading takes no more lines than the width needs"


def test_numbers_in_own_tables(cli, tmp_path: Path) -> None:
    rng = random.Random(0)
    (tmp_path / "towns").mkdir()
    for site in "abcd":
        rows = [(size, 3 * size + rng.gauss(0, 10)) for size in (rng.uniform(50, 150) for _ in range(60))]
        text = "size,price\n" + "".join(f"{size:.2f},{price:.2f}\n" for size, price in rows)
        (tmp_path / "towns" / f"{site}.csv").write_text(text, encoding="utf-8")
    own = ["--data", "towns", "--label", "price"]
    refused(cli("run", *own), "--task regression")
    own += ["--task", "regression"]
    refused(cli("run", *own, "--engine", "cuda"), "leave it out")
    refused(cli("run", *own, "--engine", "flower"), "one machine")
    ended = cli("run", *own, "--out", "run")
    assert ended.code == 0 and "linear regression" in ended.out and "RMSE" in ended.out and "accuracy" not in ended.out, ended
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["r2"]["mean"] > 0.8 and "R²" in summary["answers"]["how_sure"]
    assert "tabular-regression" in (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    values = [row["value"] for row in json.loads(cli("predict", "run", "towns/a.csv", "--client", "a", "--json").out)]
    assert len(values) == 60 and 100 < min(values) < max(values) < 500
    placed = json.loads(cli("place", "run", "towns/a.csv", "--name", "new", "--json").out)
    assert placed["candidates"][0]["r2"] > 0.8
    exported = json.loads(cli("export", "run", "--json").out)
    assert set(json.loads((Path(exported[0]) / "config.json").read_text(encoding="utf-8"))["target"]) == {"mean", "std"}
    compared = cli("compare", *own, "--methods", "fedavg,local", "--seeds", "0", "--set", "run.rounds=1", "--json")
    assert {row["metric"] for row in json.loads(compared.out)["table"]} >= {"r2", "worst_r2", "rmse", "against_best"}
