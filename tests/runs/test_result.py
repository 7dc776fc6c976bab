"""One run, however it was started: from Python, from the command line, in a comparison; in memory, on disk, and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import emdcfl
from emdcfl.cli.app import app
from emdcfl.core.errors import DataError, StoreError
from emdcfl.data.scenarios import registry
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.runs.config import AT_NODES, Choice, Config, RunConfig, TrainingConfig
from emdcfl.runs.plan import build_scenario
from emdcfl.studies import compare

pytestmark = pytest.mark.usefixtures("sketches")
SCENARIO = {"groups": 2, "clients_per_group": 2}
OPTIONS = ["--set", "scenario.groups=2", "--set", "scenario.clients_per_group=2", "--rounds", "2", "--local-epochs", "1"]


def fitted(method: object = "emdcfl", **options: object) -> emdcfl.Result:
    scenario = emdcfl.scenarios.build("rotated-digits", **SCENARIO)
    return emdcfl.fit(scenario, method=method, rounds=2, local_epochs=1, **options)


def cli(*arguments: str) -> str:
    import emdcfl.cli.run
    import emdcfl.cli.use  # noqa: F401  the commands register themselves

    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_data_that_stay_at_nodes_are_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._ENTRIES, AT_NODES, raising=False)  # known where the server runs
    config = Config(scenario=Choice(AT_NODES), model=Choice("mlp"))
    with pytest.raises(DataError, match="nodes of a federation"):
        build_scenario(config)


def models(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((folder / "models").iterdir())}


@pytest.fixture(scope="module")
def by_command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "run"
    cli("run", "--scenario", "rotated-digits", *OPTIONS, "--out", str(out), "--quiet")
    return out


@pytest.mark.slow
def test_fit_run_and_compare_give_the_same_bytes(by_command: Path, tmp_path: Path) -> None:
    fit = fitted().save(tmp_path / "fit")
    config = Config(run=RunConfig(rounds=2), scenario=Choice("rotated-digits", SCENARIO), training=TrainingConfig(local_epochs=1))
    compare.compare([config], tmp_path / "compare", keep_runs=True)
    (kept,) = (tmp_path / "compare" / "runs").iterdir()
    for other in (fit, kept):
        assert models(other) == models(by_command) and len(models(other)) > 1
        for name in ("config.toml", "metrics.jsonl", "distances.npz", "reading.json"):
            assert (other / name).read_bytes() == (by_command / name).read_bytes(), name


def test_a_loaded_run_is_the_run(by_command: Path) -> None:
    loaded, fit = emdcfl.load(by_command), fitted()
    assert loaded.clusters == fit.clusters and loaded.accuracy == fit.accuracy and loaded.config == fit.config
    assert torch.equal(loaded.serving.models, fit.serving.models) and torch.equal(loaded.serving.weights, fit.serving.weights)
    assert np.array_equal(loaded.serving.distances.W, fit.serving.distances.W, equal_nan=True)
    x = emdcfl.scenarios.build("rotated-digits", **SCENARIO).sites[0].val.x
    assert torch.equal(loaded.predict_proba(loaded.clients[0], x), fit.predict_proba(fit.clients[0], x))


@pytest.mark.parametrize("inside", ["copy", "models/copy", "models/../state/copy"])
def test_a_run_is_not_copied_into_itself(by_command: Path, inside: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(emdcfl.load(by_command).save(tmp_path / "run"))
    before = {path: path.is_file() and path.read_bytes() for path in (tmp_path / "run").rglob("*")}
    for folder in ("run", "link"):
        with pytest.raises(StoreError, match="expected a folder outside the run directory"):
            emdcfl.load(tmp_path / "run").save(tmp_path / folder / inside)
    assert before == {path: path.is_file() and path.read_bytes() for path in (tmp_path / "run").rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ifca", "fedem", "pfedgraph", EMDCFL(tolerance=0.03)])
def test_methods_by_name_or_instance_survive_saving(method: object, tmp_path: Path) -> None:
    result = fitted(method)
    loaded = emdcfl.load(result.save(tmp_path / "saved"))
    assert loaded.config == result.config and dict(loaded.summary) == json.loads(json.dumps(result.summary))
    x = np.zeros((3, 1, 8, 8), dtype=np.uint8)
    assert loaded.predict("rot0-1", x) == result.predict("rot0-1", x)


def test_predict_is_the_commands(by_command: Path, tmp_path: Path) -> None:
    from PIL import Image

    x = emdcfl.scenarios.build("rotated-digits", **SCENARIO).sites[0].val.x[:3]
    files = []
    for i, image in enumerate(x):
        files.append(tmp_path / f"{i}.png")
        Image.fromarray(image[0].numpy()).save(files[-1])
    loaded = emdcfl.load(by_command)
    client = loaded.clients[0]
    rows = json.loads(cli("predict", str(by_command), *map(str, files), "--client", client, "--json"))
    assert [row["class"] for row in rows] == loaded.predict(client, x)
    shown = torch.tensor([list(row["probabilities"].values()) for row in rows])
    assert torch.equal(shown, loaded.predict_proba(client, x))


def site(sign: int, seed: int, n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 6)).astype("float32") + 2 * sign
    return x, (sign * x[:, 0] > 2).astype(int)


@pytest.mark.slow
def test_arrays_are_saved_loaded_placed_and_resumed(tmp_path: Path) -> None:
    sites = {name: site(sign, i) for i, (name, sign) in enumerate({"a": 1, "b": 1, "c": -1, "d": -1}.items())}
    result = emdcfl.fit(sites, rounds=2, local_epochs=2, out=tmp_path / "run")
    assert result.clusters == {"a": 0, "b": 0, "c": 1, "d": 1}
    copy = emdcfl.load(result.save(tmp_path / "copy"))
    assert copy.predict("c", sites["c"][0]) == result.predict("c", sites["c"][0]) and set(result.predict("c", sites["c"][0])) == {0, 1}
    with pytest.raises(DataError, match=r"emdcfl\.load\(folder, clients="):
        copy.place(site(1, 9))
    again = emdcfl.load(tmp_path / "copy", clients=sites)
    assert again.place(site(1, 9)).cluster == result.place(site(1, 9)).cluster == 0
    with pytest.raises(DataError, match="other data"):
        emdcfl.load(tmp_path / "copy", clients={**sites, "a": site(1, 7)})
    resumed = emdcfl.fit(sites, rounds=2, local_epochs=2, out=tmp_path / "run", resume=True)
    assert models(tmp_path / "run") == models(tmp_path / "copy") and resumed.summary["finished"]
    with pytest.raises(StoreError, match="another config"):
        emdcfl.fit({**sites, "a": site(1, 7)}, rounds=2, local_epochs=2, out=tmp_path / "run", resume=True)


def test_a_result_is_one_line_and_a_small_table() -> None:
    result = fitted("oracle")
    assert (
        repr(result).startswith("Result(oracle on rotated-digits, seed 0: 4 clients in 2 clusters, accuracy ") and len(repr(result)) < 160
    )
    page = result._repr_html_()
    assert page.count("<tr>") == 3 and "rot0-1, " in page


def test_a_network_of_ones_own_and_settings_by_key() -> None:
    result = emdcfl.fit(
        {"a": site(1, 0), "b": site(1, 1)},
        lambda: torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)),
        "fedavg",
        rounds=1,
        settings={"training.momentum": 0.0},
    )
    assert result.config.training.momentum == 0.0 and isinstance(result.models["a"][0], torch.nn.Linear)
