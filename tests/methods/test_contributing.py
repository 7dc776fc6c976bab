"""The worked example of CONTRIBUTING.md is a whole method: it runs, clusters, and survives absences."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.methods import toy

from emdcfl.methods.base import METHODS

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    assert code is not None
    assert len(code.group(1).splitlines()) < 60
    (tmp_path / "signcfl_example.py").write_text(code.group(1), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("signcfl_example")
    yield
    del sys.modules["signcfl_example"]
    del METHODS["signcfl"]


@pytest.mark.usefixtures("example")
def test_example_runs_and_serves_everybody() -> None:
    fed, _, state, serving = toy.run("signcfl", rounds=2)
    assert set(state.labels) == set(fed.clients)
    assert serving.clusters is not None
    assert serving.clusters[0] == 0
    assert serving.weights.sum(1).tolist() == [1.0] * len(fed.clients)


@pytest.mark.usefixtures("example")
def test_example_groups_change_with_its_field() -> None:
    *_, everybody = toy.run("signcfl", rounds=1, least=-1.1)
    *_, alone = toy.run("signcfl", rounds=1, least=0.9999)
    assert len(set(everybody.clusters.tolist())) == 1
    assert alone.clusters.tolist().count(0) == 1
