"""A run directory from elsewhere names a function: nothing runs it unless the user says so."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny  # noqa: F401  registers the scenario
from tests.e2e.shell import called

import emdcfl
from emdcfl.core.errors import ConfigError, ModelError, StoreError
from emdcfl.models import BUILDERS
from emdcfl.report.load_run import read_run
from emdcfl.report.page import render
from emdcfl.runs.config import Choice, Config, RunConfig, load
from emdcfl.runs.outputs import load_served
from emdcfl.runs.runner import run
from emdcfl.runs.store import RunStore, identity
from emdcfl.runs.store.files import read_json, read_tensors, unsealed, write_json, write_tensors

EVIL = """
from pathlib import Path
from emdcfl.models.networks import mlp
Path(__file__).with_name("ran").write_text("code ran")
def build(features, classes, **options):
    return mlp(features=features, classes=classes, **options)
"""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the tiny scenario."""
    place = tmp_path_factory.mktemp("runs") / "honest"
    run(Config(scenario=Choice("tiny"), run=RunConfig(rounds=1)), place)
    return place


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that leaves a file when it is imported; return the place of that file."""
    (tmp_path / "evil_model.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("evil_model", None)
    return tmp_path / "ran"


def forge_models(honest: Path, tmp_path: Path) -> Path:
    """Copy a run whose model files name the module."""
    place = tmp_path / "models-forged"
    shutil.copytree(honest, place)
    for path in (place / "models").glob("*.safetensors"):
        tensors, metadata = read_tensors(path)
        recipe = {**json.loads(metadata["model"]), "name": "evil_model:build"}
        write_tensors(path, tensors, {**metadata, "model": json.dumps(recipe)}, seal=True)
    return place


def forge_config(honest: Path, tmp_path: Path, where: str = "model") -> Path:
    """Copy a run whose config names the module, as its model or as an option of its scenario."""
    place = tmp_path / "config-forged"
    shutil.copytree(honest, place)
    text = identity.read_config(place)
    if where == "model":
        text = text.replace('name = "mlp"', 'name = "evil_model:build"')
    else:
        text = text.replace('name = "tiny"', 'name = "tiny"\nmodel = "evil_model:build"')
    assert "evil_model" in text
    (place / identity.CONFIG).unlink()
    identity.write_config(place, text)
    return place


@pytest.mark.slow
def test_a_model_file_that_names_a_function_is_not_run(honest: Path, evil: Path, tmp_path: Path) -> None:
    place = forge_models(honest, tmp_path)
    for attempt in (lambda: emdcfl.load(place), lambda: load_served(place, "site-0")):
        with pytest.raises(ModelError, match=r"evil_model:build.*not run.*--trust-model"):
            attempt()
    assert not evil.exists()


@pytest.mark.parametrize("where", ["model", "scenario"])
def test_a_config_that_names_a_function_is_not_run(where: str, honest: Path, evil: Path, tmp_path: Path) -> None:
    place = forge_config(honest, tmp_path, where)
    with pytest.raises(ModelError, match=r"config.toml.*evil_model:build.*not run.*--trust-model"):
        emdcfl.load(place)
    with pytest.raises(ModelError, match="evil_model:build"):
        RunStore.read(place).foreign_config()
    assert not evil.exists()


def test_explicit_trust_runs_it(honest: Path, evil: Path, tmp_path: Path) -> None:
    found = emdcfl.load(forge_models(honest, tmp_path), trust_model=True)
    assert found.model_of("site-0").module() is not None
    assert evil.exists()


@pytest.mark.parametrize("words", [("place",), ("run", "--resume", "--out"), ("report", "--theory")])
def test_commands_refuse_it_in_one_line(
    words: tuple[str, ...], honest: Path, evil: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = forge_config(honest, tmp_path)
    rest = (tmp_path,) if words == ("place",) else ()
    done = called(capfd, *words, place, *rest)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "evil_model:build" in done.err
    assert "--trust-model" in done.err
    assert not evil.exists()


def test_predict_refuses_it_and_report_goes_on_without(honest: Path, evil: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = forge_models(honest, tmp_path)
    table = tmp_path / "rows.csv"
    table.write_text("a,b\n1,2\n")
    done = called(capfd, "predict", place, table, "--client", "site-0")
    assert done.code == 2
    assert "--trust-model" in done.err
    assert called(capfd, "report", place).code == 0
    assert not evil.exists()


def test_a_config_that_the_user_wrote_may_name_a_function(evil: Path) -> None:
    config = Config(scenario=Choice("tiny"), model=Choice("evil_model:build"), run=RunConfig(rounds=1))
    assert run(config).summary["finished"]
    assert evil.exists()


def test_smoke_models_need_no_trust() -> None:
    assert "smoke_model" in BUILDERS


@pytest.mark.parametrize("nested", ["a = " + "[" * 10**5 + "]" * 10**5, ".".join(["a"] * 5000) + " = 1"])
def test_a_config_that_is_nested_without_end_is_refused_in_one_line(nested: str, honest: Path, tmp_path: Path) -> None:
    """The parser, or whoever reads what it gave, would end with Python's own error for an exhausted stack."""
    place = tmp_path / "nested"
    shutil.copytree(honest, place)
    (place / identity.CONFIG).write_text(f"[scenario]\nname = 'tiny'\n{nested}\n")
    assert RunStore.read(place).config() == RunStore.read(honest).config(), "the copy is whole"
    with pytest.raises(StoreError, match=r"config\.toml: truncated or damaged: more than 32 levels"):
        read_run(place)
    with pytest.raises(ConfigError, match="not valid TOML: more than 32 levels"):
        load(place / identity.CONFIG)


def _forged(run: Path, name: str, at: tuple[str | int, ...], value: object) -> None:
    """Set an entry of a sealed file to a value, or delete it (``None``), and seal the file again."""
    content = unsealed(read_json(run / name), name)
    *above, last = at
    holder: Any = content
    for key in above:
        holder = holder[key]
    if value is None:
        del holder[last]
    else:
        holder[last] = value
    write_json(run / name, content)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("summary.json", ("what_differs",), [{"who": "a", "members": [], "found": [{"here": 1}]}]),
        ("summary.json", ("trained_with",), [{"model": 1, "serves": "a"}]),
        ("summary.json", ("failures",), [3]),
        ("summary.json", ("groups", 0), ["a"]),
        ("summary.json", ("accuracy", "variants"), {}),
        ("summary.json", ("accuracy", "variants", "test", "sites"), [1e308]),
        ("summary.json", ("clients", 0), "site-1"),
        ("baselines/local/summary.json", ("accuracy", "high"), None),
        ("baselines/local/summary.json", ("accuracy", "variants"), {}),
        ("reading.json", ("not_compared",), None),
        ("reading.json", ("clusters",), {"0": [1]}),
    ],
)
def test_a_forged_summary_or_reading_is_refused_in_one_line(
    honest: Path, tmp_path: Path, name: str, at: tuple[str | int, ...], value: object
) -> None:
    place = tmp_path / "forged"
    shutil.copytree(honest, place)
    (place / "baselines" / "local").mkdir(parents=True)
    shutil.copyfile(honest / "summary.json", place / "baselines" / "local" / "summary.json")
    shutil.copyfile(honest / "config.toml", place / "baselines" / "local" / "config.toml")
    read_run(place)
    _forged(place, name, at, value)
    with pytest.raises(StoreError, match=f"{name}.*resume the run") as refused:
        render(place)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"client": 5}, {"accuracy": {"test": 1e308}}, {"test_loss": None}])
def test_a_forged_row_of_metrics_is_refused_by_the_report(honest: Path, tmp_path: Path, change: dict[str, object]) -> None:
    place = tmp_path / "forged"
    shutil.copytree(honest, place)
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(place / "state")  # with its checksum
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps({**row, **change})}\n" for row in rows))
    for attempt in (lambda: render(place), lambda: emdcfl.load(place)):
        with pytest.raises(StoreError, match="no run writes|state"):
            attempt()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("classes", ["one"]),
        ("classes", [1, 2, 3, 4]),
        ("input", [1 << 40]),
        ("encoding", {"kind": "table", "label": "y", "columns": [{"mean": 1}]}),
        ("encoding", {"kind": "images", "shape": [3, 8, 8]}),
        ("encoding", {"kind": "table", "label": "y", "columns": [{"name": "x", "mean": math.nan, "std": 1.0, "gaps": False}]}),
        ("preprocess", {"mean": [math.inf], "std": [1.0], "scale": 1.0, "size": None}),
        ("preprocess", {"mean": [0.0, 1.0], "std": [1.0], "scale": 1.0, "size": None}),
        ("preprocess", {"mean": [0.0], "std": [0.0], "scale": 1.0, "size": None}),
    ],
)
def test_a_model_file_whose_inputs_no_run_has_is_refused(honest: Path, tmp_path: Path, key: str, value: object) -> None:
    place = tmp_path / "forged"
    shutil.copytree(honest, place)
    for path in (place / "models").glob("*.safetensors"):
        tensors, metadata = read_tensors(path)
        write_tensors(path, tensors, {**metadata, key: json.dumps(value)}, seal=True)
    for attempt in (lambda: emdcfl.load(place), lambda: load_served(place, "site-0")):
        with pytest.raises(StoreError, match="resume the run"):
            attempt()
    render(place)


@pytest.mark.slow
def test_a_model_of_numbers_that_are_not_finite_is_refused(honest: Path, tmp_path: Path) -> None:
    place = tmp_path / "forged"
    shutil.copytree(honest, place)
    for path in (place / "models").glob("*.safetensors"):
        tensors, metadata = read_tensors(path)
        write_tensors(path, {name: one * torch.nan for name, one in tensors.items()}, metadata, seal=True)
    with pytest.raises(StoreError, match="not finite"):
        load_served(place, "site-0")
