from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from emdcfl.core.errors import DataError
from emdcfl.data.own import encoding_of, from_arrays, read_inputs
from emdcfl.data.own.arrays import inputs_like, site_from_arrays
from emdcfl.data.own.parts import sort_words

RNG = np.random.default_rng(0)


def table(n: int = 50, shift: float = 0) -> tuple[np.ndarray, np.ndarray]:
    return RNG.normal(shift, 2, (n, 4)), np.arange(n) % 2


def numbers(width: int) -> Dataset[Any]:
    return TensorDataset(torch.rand(20, width), torch.arange(20) % 2)


def test_list_of_arrays() -> None:
    scenario = from_arrays([table(), table(shift=10), table()], groups=["a", "b", "a"])
    assert [s.name for s in scenario.sites] == ["client-1", "client-2", "client-3"]
    assert scenario.groups == {"client-1": "a", "client-2": "b", "client-3": "a"}
    assert scenario.k == 2
    assert scenario.model.as_dict() == {"name": "mlp", "options": {"classes": 2, "features": 4}}
    z = scenario.preprocess(torch.cat([s.train.x for s in scenario.sites]))
    assert torch.allclose(z.mean(dim=0), torch.zeros(4), atol=1e-4)
    assert torch.allclose(z.std(dim=0, unbiased=False), torch.ones(4), atol=1e-4)
    assert encoding_of(scenario)["kind"] == "arrays"
    with pytest.raises(DataError, match="trained on arrays"):
        read_inputs(["a.csv"], encoding=encoding_of(scenario))


def test_names_given_splits_and_text_labels() -> None:
    x, _ = table()
    y = np.array(["ill", "well"] * 25)
    scenario = from_arrays({"oslo": (x, y), "rome": {"train": (x[:30], y[:30]), "val": (x[30:40], y[30:40]), "test": (x[40:], y[40:])}})
    assert scenario.classes == ("ill", "well")
    rome = scenario.sites[1]
    assert torch.equal(rome.tests["test"].x, torch.from_numpy(x[40:].astype(np.float32)))
    assert [len(rome.train), len(rome.val)] == [30, 10]


@pytest.mark.parametrize(
    ("shape", "dtype", "stored"),
    [((30, 8, 8), np.uint8, (1, 8, 8)), ((30, 8, 8, 3), np.uint8, (3, 8, 8)), ((30, 3, 8, 8), np.float64, (3, 8, 8))],
)
def test_images(shape: tuple[int, ...], dtype: Any, stored: tuple[int, ...]) -> None:
    x = RNG.integers(0, 255, shape).astype(dtype)
    scenario = from_arrays([(x, np.arange(30) % 3)] * 2)
    assert tuple(scenario.sites[0].train.x.shape[1:]) == stored
    assert scenario.sites[0].train.x.dtype == (torch.uint8 if dtype == np.uint8 else torch.float32)
    assert encoding_of(scenario)["kind"] == ("images" if dtype == np.uint8 else "arrays")  # files have bytes
    assert scenario.model.name == "small_cnn"
    assert abs(float(scenario.preprocess(torch.cat([s.train.x for s in scenario.sites])).mean())) < 1e-4


def test_torch_datasets() -> None:
    data = TensorDataset(torch.rand(40, 3), torch.arange(40) % 4)
    scenario = from_arrays([data, data])
    assert scenario.classes == ("0", "1", "2", "3")
    assert sum(map(len, (scenario.sites[0].train, scenario.sites[0].val, scenario.sites[0].tests["test"]))) == 40


def test_numbers_sort_as_numbers() -> None:
    x = RNG.normal(size=(60, 2))
    assert from_arrays([(x, np.arange(60) % 12)] * 2).classes == tuple(str(i) for i in range(12))
    assert sort_words({"2", "1", "01", "001", "1.0", "1.00"}) == ["001", "01", "1", "1.0", "1.00", "2"]  # whatever a set's order
    words = ["nan", "10", "1", "2", "3"]
    assert {tuple(sort_words(set(words[i:] + words[:i]))) for i in range(5)} == {("1", "2", "3", "10", "nan")}


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([table()], "at least two clients"),
        ([table(), (np.ones((20, 4)), np.ones(19))], "client 'client-2': expected one label per sample"),
        ([table(), (np.ones((20, 5)), np.arange(20) % 2)], r"client 'client-2' has \(5,\)"),
        ([table(), (np.full((20, 4), np.nan), np.arange(20) % 2)], "client 'client-2': X has missing or infinite values, first in row 0"),
        ([table(), (np.array([["a"] * 4] * 20), np.arange(20) % 2)], "client 'client-2': X must hold numbers"),
        ([table(), (np.ones((20, 4)), np.linspace(0, 1, 20))], "client 'client-2': labels must be classes"),
        ([table(), (np.ones((20, 4)), ["a", float("nan")] * 10)], "client 'client-2': expected a label for every sample, got gaps"),
        ([table(), (np.ones((20, 4)), np.array(["a", None] * 10))], "client 'client-2': expected a label for every sample, got gaps"),
        ([table(), (np.ones((20, 4)), np.array(["a", " "] * 10))], "client 'client-2': expected a label for every sample, got gaps"),
        ([table(), (np.ma.masked_greater(np.arange(80.0).reshape(20, 4), 70), np.arange(20) % 2)], "client 'client-2'.* masked values"),
        ([table(), ([[1, 2], [3]] * 10, np.arange(20) % 2)], "client 'client-2': expected an array, got .*inhomogeneous"),
        ([table(), (torch.ones(20, 4, dtype=torch.bfloat16), np.arange(20) % 2)], "client 'client-2': expected an array, got .*BFloat16"),
        ([table(), (1j * np.ones((20, 4)), np.arange(20) % 2)], "client 'client-2': X must hold numbers, got complex"),
        ([table(), Dataset()], "client 'client-2': expected a data set with a length"),
        ([table(), TensorDataset(*[torch.arange(20)] * 3)], r"client 'client-2': expected a data set of \(x, y\) pairs"),
        ([table(), ConcatDataset([numbers(4), numbers(5)])], "client 'client-2': expected an array, got .*inhomogeneous"),
        ({1: table(), "1": table(), "b": table()}, "expected 3 clients of different names, got 2: 1, b"),
        ([table(), 5], r"client 'client-2': expected \(X, y\).* or a torch Dataset, got int"),
        ([table(), {"training": table()}], "splits must be called train, val, test; got training"),
        ([table(), (np.ones((20, 2, 3, 4, 5)), np.arange(20) % 2)], "expected X of shape"),
        ([table(), (np.ones((20, 5, 8, 8)), np.arange(20) % 2)], "one or three channels"),
        ([table(), table(6)], "client 'client-2' .* has 6 samples"),
    ],
)
def test_errors_name_the_client(clients: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(clients)


def test_groups_must_fit() -> None:
    with pytest.raises(DataError, match="groups must name every client once: expected 2"):
        from_arrays([table(), table()], groups=["a"])


def test_masked_values_are_not_predicted_as_if_they_were_known() -> None:
    with pytest.raises(DataError, match="masked values"):
        inputs_like(np.ma.masked_greater(np.arange(8.0).reshape(2, 4), 6), (4,))


def test_a_new_site_is_split_without_samples_of_classes_that_training_lacks() -> None:
    x, y = table(60)
    site, notes = site_from_arrays("new", (np.concatenate([x, x]), np.r_[y, np.full(60, 7)]), like=from_arrays([table(), table()]))
    assert [len(site.train), len(site.val), len(site.tests["test"])] == [36, 12, 12]
    assert "client 'new' (array): train samples left out because training lacks their label (7): 36" in notes


def test_a_new_site_has_classes_if_the_run_has() -> None:
    """Numbers that might be measurements at a site so small are classes of the run."""
    scenario = from_arrays([(RNG.normal(size=(400, 4)), np.arange(400) % 25) for _ in range(2)])
    with pytest.raises(DataError, match="classes or measurements"):
        from_arrays([(RNG.normal(size=(100, 4)), np.arange(100) % 25) for _ in range(2)])
    site, _ = site_from_arrays("new", (RNG.normal(size=(100, 4)), np.arange(100) % 25), like=scenario)
    assert sorted({int(y) for split in site.splits.values() for y in split.y}) == sorted(int(name) for name in scenario.classes)
