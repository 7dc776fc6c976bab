"""``emdcfl.compare`` runs what the command runs, on data in memory too."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import emdcfl
from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.methods import METHODS
from emdcfl.methods.fedprox import FedProx
from emdcfl.studies import compare as studies
from emdcfl.studies.results import read_results

QUICK: dict[str, Any] = {"rounds": 1, "local_epochs": 1}


def sites() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    x = np.random.default_rng(0).normal(size=(3, 40, 3)).astype("float32")
    return {f"s{i}": (x[i], (x[i, :, 0] > 0).astype(int)) for i in range(3)}


def test_names_and_instances_on_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    found = emdcfl.compare(sites(), ["fedavg", FedProx(mu=0.1), "local"], seeds=2, progress=True, **QUICK)
    assert found.methods == ["FedAvg", "FedAvg + fine-tuning", "FedProx (mu 0.1)", "Local"]
    assert {row["seed"] for row in found.rows} == {0, 1} and capsys.readouterr().out.count("s0") == 0
    alone = emdcfl.fit(sites(), method="local", personalize="off", **QUICK)
    row = next(r for r in found.rows if r["method"] == "local" and r["seed"] == 0)
    assert row["accuracy"]["mean"] == alone.accuracy.mean and row["config"] == alone.summary["config"]
    assert not studies._in_memory  # the data are not kept
    assert found.plot()._repr_png_().startswith(b"\x89PNG")
    pytest.importorskip("pandas", reason="the extra emdcfl[tables] is not installed")
    table = found.frame
    assert list(table.index) == found.methods and table.loc["Local", "accuracy"] == pytest.approx(
        np.mean([r["accuracy"]["mean"] for r in found.rows if r["method"] == "local"])
    )
    assert (table["low"] <= table["accuracy"]).all() and (table["accuracy"] <= table["high"]).all()


def test_a_run_that_fails_does_not_cost_those_that_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="true groups"):
        emdcfl.compare(sites(), ["local", "oracle"], **QUICK)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ClientError, match=r"method.k between 1 and 3.*start again to retry with out='(.+)', which has") as failed:
        emdcfl.compare(sites(), ["local", "ifca:k=9"], seeds=1, **QUICK)
    folder = Path(str(failed.value).split("'")[-2])
    assert [row["method"] for row in read_results(folder)] == ["local"]


def test_rare_classes_are_not_hidden_behind_the_accuracy() -> None:
    """Always answering the frequent class has 90 % accuracy and a balanced accuracy of 50 %."""
    x = np.random.default_rng(0).normal(size=(3, 60, 3)).astype("float32")
    rare = {f"s{i}": (x[i], (np.arange(60) % 10 == 0).astype(int)) for i in range(3)}
    found = emdcfl.compare(rare, ["local"], seeds=1, **QUICK)
    (column,) = found.table.columns
    assert (
        column.metrics[2:4] == ("balanced", "auc")
        and emdcfl.compare(sites(), ["local"], seeds=1, **QUICK).table.columns[0].metrics[2] == "seconds"
    )
    pytest.importorskip("pandas", reason="the extra emdcfl[tables] is not installed")
    (row,) = found.rows
    assert found.frame.loc["Local", "balanced"] == pytest.approx(row["accuracy"]["balanced"]["mean"])
    assert found.frame.loc["Local", "auc"] == pytest.approx(row["accuracy"]["auc"]["mean"])


def test_the_worst_client_of_several_test_variants_is_that_of_the_first() -> None:
    (row,) = emdcfl.compare(sites(), ["local"], seeds=1, **QUICK).rows
    clean = {**row["accuracy"], "mean": 0.9, "worst": 0.8}
    variants = {"clean": clean["variants"]["test"] | {"mean": 0.9, "worst": 0.8}, "backdoor": clean["variants"]["test"] | {"mean": 0.3}}
    found = emdcfl.Comparison([{**row, "accuracy": {**clean, "variants": variants}}])
    assert "90.0%" in repr(found) and "worst 80.0%" in repr(found)


def test_a_folder_of_results_is_gone_on_with(tmp_path: Path) -> None:
    emdcfl.compare(sites(), ["local"], seeds=[0], out=tmp_path, **QUICK)
    before = (tmp_path / "results.jsonl").read_text(encoding="utf-8")
    found = emdcfl.compare(sites(), ["local"], seeds=[0, 4], out=tmp_path, **QUICK)
    rows = (tmp_path / "results.jsonl").read_text(encoding="utf-8")
    assert rows.startswith(before) and [json.loads(line)["seed"] for line in rows.splitlines()] == [0, 4] == [r["seed"] for r in found.rows]
    assert (tmp_path / "report.html").exists() and found.report(tmp_path / "page.html", show=False).exists()


def test_data_in_memory_stay_in_this_process() -> None:
    with pytest.raises(ConfigError, match="jobs = 1"):
        emdcfl.compare(sites(), ["local"], jobs=2)
    with pytest.raises(ConfigError, match="at least one seed"):
        emdcfl.compare(sites(), ["local"], seeds=0)
    for seeds in ("0,1", [0.5], [-1]):
        with pytest.raises(ConfigError, match="whole numbers from 0 on"):
            emdcfl.compare(sites(), ["local"], seeds=seeds)  # type: ignore[arg-type]
    assert len(emdcfl.compare(sites(), FedProx(), seeds=np.int64(2), **QUICK).rows) == 2  # type: ignore[arg-type]


@dataclass(frozen=True)
class Imported(FedProx):
    name: ClassVar[str] = "imported"


def test_a_method_of_ones_own_runs_in_other_processes_if_they_can_import_it() -> None:
    @dataclass(frozen=True)
    class Local(FedProx):
        name: ClassVar[str] = "nowhere"

    small: dict[str, Any] = {"settings": {"scenario.groups": 1}, "seeds": 1, "jobs": 2, **QUICK}
    try:
        assert emdcfl.compare("rotated-digits", [Imported()], **small).methods == ["imported"]
        with pytest.raises(ConfigError, match="jobs = 1"):
            emdcfl.compare("rotated-digits", [Local()], **small)
    finally:
        METHODS.pop("imported", None)
        METHODS.pop("nowhere", None)


def test_what_a_comparison_would_ignore_is_refused() -> None:
    for key, instead in (
        ("method.k", "emdcfl:tolerance"),
        ("privacy.epsilon", "emdcfl:tolerance"),
        ("run.seed", "seeds="),
        ("run.hold_out", "fit"),
    ):
        with pytest.raises(ConfigError, match=f"{key} .*{instead}"):
            emdcfl.compare(sites(), ["ifca"], settings={key: 3})
    for methods, expected in (([], "at least one method"), ([FedProx], "instance"), (None, "instance")):
        with pytest.raises(ConfigError, match=expected):
            emdcfl.compare(sites(), methods)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Renamed(FedProx):
    pass


@dataclass(frozen=True)
class NoDefault(FedProx):
    name: ClassVar[str] = "nodefault"
    more: float = field(kw_only=True)


class Unnamed:
    State = dict


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Renamed(), "FedProx has the name 'fedprox' already"),
        (NoDefault(more=1.0), "default for every field"),
        (Unnamed(), "a dataclass with a name"),
    ],
)
def test_a_method_of_ones_own_that_cannot_be_named_is_refused(method: Any, said: str) -> None:
    try:
        with pytest.raises(ConfigError, match=said):
            emdcfl.fit(sites(), method=method, **QUICK)
        assert METHODS["fedprox"] is FedProx
    finally:
        METHODS.pop("nodefault", None)


@pytest.mark.parametrize("kind", ["heatmap", "tree", "map"])
def test_pictures_of_a_run(kind: Any, tmp_path: Path) -> None:
    result = emdcfl.fit(sites(), **QUICK)
    assert result.plot(kind)._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="measures no distances"):
        emdcfl.fit(sites(), method="fedavg", **QUICK).plot(kind)
    page = result.report(tmp_path / "page.html", show=False)
    assert "<!doctype html>" in page.read_text(encoding="utf-8").lower()[:100]


def test_distances_among_representatives_are_shown_with_their_names(tmp_path: Path) -> None:
    whole = emdcfl.fit(sites(), method="emdcfl", **QUICK)
    d, rows = whole.serving.distances, np.array([0, 2])
    some = replace(d, sample=rows, tau=d.tau[rows], **{name: getattr(d, name)[np.ix_(rows, rows)] for name in ("W", "epsilon", "kind")})
    result = replace(whole, source=replace(whole.serving, distances=some))
    for found in (result, emdcfl.load(result.save(tmp_path / "run"))):
        assert list(found.distances.index) == list(found.distances.columns) == [whole.clients[0], whole.clients[2]]
        assert all(found.plot(kind)._repr_png_().startswith(b"\x89PNG") for kind in ("heatmap", "tree", "map"))
