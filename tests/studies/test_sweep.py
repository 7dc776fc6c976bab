"""Snapshots and sweeps: nothing is trained twice, distances are the method's, the interval of right tolerances is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from emdcfl.cli import studies as command
from emdcfl.cli.app import app
from emdcfl.core.errors import ConfigError, EmdcflError
from emdcfl.core.params import Network
from emdcfl.models import ModelRecipe
from emdcfl.runs.config import Choice, Config, TrainingConfig
from emdcfl.studies import snapshot as snapshots
from emdcfl.studies.snapshot import Snapshot, SnapshotRequest, take
from emdcfl.studies.sweep import Matrix, Setting, ari, interval, measure, sweep, write_sweep
from emdcfl.transport import cost_matrix, exact

CONFIG = Config(scenario=Choice("rotated-digits", {"groups": 2}), training=TrainingConfig(local_epochs=2))
REQUEST = SnapshotRequest(CONFIG, cap=32)


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return take(REQUEST, tmp_path_factory.mktemp("snapshot"))


def test_snapshot_holds_every_view(taken: Snapshot) -> None:
    assert taken.clients == ("rot0-1", "rot0-2", "rot90-1", "rot90-2")
    assert taken.groups == ("rot0", "rot0", "rot90", "rot90")
    row = taken.row(2)
    assert row.train.shape == (32, 64) and row.val.shape == (4, 32, 64)
    assert row.train_labels.shape == (32,) and row.val_labels.shape == (4, 32)
    assert (row.val_labels == taken.row(0).val_labels).all()  # the same samples under another model
    assert not np.allclose(row.val, taken.row(0).val)
    assert np.linalg.eigvalsh(taken.parameters).min() > -1e-9
    assert np.allclose(taken.state, taken.parameters)  # no BatchNorm
    assert np.trace(taken.linear) < np.trace(taken.parameters)
    assert np.allclose(taken.angles, taken.angles.T) and np.allclose(np.diag(taken.angles), 0, atol=0.1)


def test_the_hypothesis_is_the_linear_layers() -> None:
    """Two layers of the paper's CNN, the last one of a ResNet, whose BatchNorm the whole state holds."""
    with torch.device("meta"):
        cnn, resnet = (
            Network(ModelRecipe(name, options), "meta").layout for name, options in (("cnn", {}), ("resnet18", {"weights": None}))
        )
    size = [sum(where.stop - where.start for where in snapshots.linear_layers(layout)) for layout in (cnn, resnet)]
    assert size == [14 * 14 * 128 * 128 + 128 + 128 * 10 + 10, 512 * 10 + 10]


def test_labels_belong_to_the_samples(taken: Snapshot) -> None:
    """A head fitted to a client's own train embeddings knows their labels far better than shuffled ones."""
    from emdcfl.paper.theory import Sample, fit_head

    row = taken.row(0)
    found = fit_head(Sample(row.val[0], row.val_labels[0]), 10)(row.train).argmax(1)
    assert (found == row.train_labels).mean() > 0.4


def test_snapshot_is_taken_once(taken: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_take", lambda *_: pytest.fail("trained again"))
    again = take(REQUEST, taken.folder)
    assert (again.state == taken.state).all()
    with pytest.raises(ConfigError, match="other settings"):
        take(SnapshotRequest(CONFIG, cap=16), taken.folder)


def test_distances_are_transport_less_the_clients_own(taken: Snapshot) -> None:
    matrix = measure(taken, Setting(ratio=1.0, cost="euclidean"))
    assert np.allclose(np.diag(matrix.W), 0.0)
    from emdcfl.core import keys
    from emdcfl.transport import projection

    row = taken.row(1)
    R = projection(keys.digest("sweep", 0, "rot0-2"), 64, 64)
    values = [exact(cost_matrix(row.train @ R, row.val[j] @ R, cost="euclidean")).value for j in range(4)]
    assert matrix.tau[1] == pytest.approx(values[1])
    assert matrix.W[1] == pytest.approx(np.array(values) - values[1])


def test_distances_are_kept(taken: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure(taken, Setting(ratio=0.5))
    monkeypatch.setattr(Snapshot, "row", lambda *_: pytest.fail("read again"))
    second = measure(taken, Setting(ratio=0.5))
    assert (first.W == second.W).all() and first.m == second.m == 32


def test_damaged_distances_are_measured_again(taken: Snapshot) -> None:
    first = measure(taken, Setting(ratio=0.25))
    (file,) = (taken.folder / "distances").glob("*-0.25-*.npz")
    file.write_bytes(whole := file.read_bytes()[:-40])
    assert (measure(taken, Setting(ratio=0.25)).W == first.W).all() and len(file.read_bytes()) > len(whole)


def invented(groups: tuple[str, ...], W: list[list[float]]) -> tuple[Snapshot, Matrix]:
    empty = np.zeros((0, 0))
    found = Snapshot(Path(), tuple(f"c{i}" for i in range(len(groups))), groups, empty, empty, empty, empty, ())
    return found, Matrix(np.array(W), np.zeros(len(groups)), np.zeros(len(groups)), 10)


def test_interval_is_where_the_groups_come_out() -> None:
    snapshot, matrix = invented(("a", "a", "b"), [[0, 0.02, 0.01], [0.03, 0, 0.2], [0.05, 0.1, 0]])
    low, high = interval(snapshot, matrix)
    assert (low, high) == (0.03, 0.05)
    assert ari(snapshot, matrix, low) < 1.0  # strictly below the tolerance
    assert ari(snapshot, matrix, np.nextafter(low, 1)) == 1.0
    assert ari(snapshot, matrix, high) == 1.0
    assert ari(snapshot, matrix, np.nextafter(high, 1)) < 1.0


def test_without_true_groups_no_tolerance_is_right() -> None:
    snapshot, matrix = invented(("a", "b"), [[0, 0.02], [0.01, 0]])
    with pytest.raises(ConfigError, match="no true groups"):
        interval(replace(snapshot, groups=None), matrix)


def test_interval_without_pairs_on_one_side() -> None:
    snapshot, matrix = invented(("a", "a"), [[0, 0.02], [0.01, 0]])
    assert interval(snapshot, matrix) == (0.02, np.inf)
    snapshot, matrix = invented(("a", "b"), [[0, 0.02], [0.01, 0]])
    assert interval(snapshot, matrix) == (-np.inf, 0.02)


@pytest.mark.parametrize("solver", ["exact", "sinkhorn"])
def test_sweep_agrees_with_its_interval(taken: Snapshot, tmp_path: Path, solver: str) -> None:
    record = sweep(taken, Setting(0.9, solver=solver), [0.0, 0.01, 0.03, 0.1, 1.9])
    for epsilon, value in zip(record["epsilons"], record["ari"], strict=True):
        assert (value == 1.0) == (record["low"] < epsilon <= record["high"])
    assert record["ari"][-1] == 0.0  # everything in one cluster
    write_sweep([{"scenario": "x", **record}], tmp_path)
    lines = (tmp_path / "sweep.csv").read_text().splitlines()
    assert len(lines) == 1 + 5 + 1 and ",auto," in lines[-1] and all(all(line.split(",")) for line in lines)


def test_settings_are_checked() -> None:
    for wrong, reason in (({"ratio": 0.0}, "ratio"), ({"cost": "manhattan"}, "unknown cost"), ({"solver": "magic"}, "unknown solver")):
        options: dict[str, Any] = wrong
        with pytest.raises(ConfigError, match=reason):
            Setting(**options)


def test_untrained_snapshot_of_one_client_a_group(tmp_path: Path) -> None:
    found = take(SnapshotRequest(CONFIG, cap=8, per_group=1, trained=False), tmp_path)
    assert found.clients == ("rot0-1", "rot90-1")
    assert "smoke test only" in found.notes[-1]
    assert np.allclose(found.state, 0)


def test_command_line(tmp_path: Path) -> None:
    arguments = ["sweep", "--set", "scenario.groups=2", "--set", "training.local_epochs=1", "--samples", "16", "--ratios", "0.9"]
    done = CliRunner().invoke(app, [*arguments, "--solvers", "exact", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert {p.name for p in tmp_path.iterdir()} == {"ari.png", "sweep.csv", "sweep.json", "snapshots"}
    assert "ARI 1 for" in done.output
    steep = [*arguments, "--costs", "cosine,euclidean", "--solvers", "exact,sinkhorn", "--reg", "0.002"]
    given_up = CliRunner().invoke(app, [*steep, "--out", str(tmp_path)])
    measured = {line.split(",", 3)[2] for line in (tmp_path / "sweep.csv").read_text().splitlines()[1:]}
    assert isinstance(given_up.exception, EmdcflError) and "did not reach" in str(given_up.exception) and measured == {"exact"}
    for wrong in (["--ratios", "many"], ["--epsilons", "0.1,nan"]):  # JSON, which holds what was asked, has no NaN
        refused = CliRunner().invoke(app, [*arguments, *wrong, "--out", str(tmp_path)])
        assert isinstance(refused.exception, ConfigError) and wrong[1] in str(refused.exception)
    alone = ["sweep", "--scenario", "digit-sites", "--set", "scenario.clients_per_group=1", "--out", str(tmp_path / "alone")]
    untrue = CliRunner().invoke(app, alone)
    assert isinstance(untrue.exception, ConfigError) and "true groups" in str(untrue.exception)
    assert not (tmp_path / "alone").exists()  # nobody has trained
    assert command.right_tolerances({"low": None, "high": 0.5}) == "ε ≤ 0.5000"
