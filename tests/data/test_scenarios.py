"""Every construction at the paper's numbers on label lists alone, built on tiny stand-ins, and (with the real files) in full."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data import standins

from emdcfl.core.errors import ConfigError, DataError
from emdcfl.data.own.tables import Numeric, TableEncoding
from emdcfl.data.scenarios import backdoor, build, describe, names, options, pacs, rotated
from emdcfl.data.scenarios.plan import BACKDOOR_MNIST_SCALES, CNN_SCALES, MNIST_TRAINING, PAPER_TRAINING, RESNET_SCALES, Share, shrink
from emdcfl.data.types import Scenario

MNIST_TRAIN = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
MNIST_TEST = np.repeat(np.arange(10), [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009])
CIFAR_TRAIN, CIFAR_TEST = np.repeat(np.arange(10), 5000), np.repeat(np.arange(10), 1000)
DOMAIN_SIZES = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}

MNIST_SIZES = [(4878, 542, 220)] * 9 + [(4887, 543, 220)]
PACS_SIZES = (
    [(328, 82, 103), (328, 82, 102), (328, 82, 102), (327, 82, 102)]
    + [(375, 94, 117)] * 4
    + [(356, 90, 112), (356, 89, 111), (356, 89, 111)]
    + [(360, 90, 113)]
    + [(359, 90, 112)] * 6
)
BACKDOOR_SIZES = (
    [(2439, 542, 890)] * 9 + [(2443, 543, 910)] + [(4878, 542, 890)] * 9 + [(4887, 543, 910)] + [(2439, 542, 890)] * 9 + [(2443, 543, 910)]
)
EXPECTED = {  # sizes per client, true groups, K, learning rate, PACFL and FedClust thresholds, shape
    "rotated-mnist": (MNIST_SIZES * 4, [10] * 4, 4, 0.01, 12, 5, (1, 28, 28)),
    "rotated-mnist-two": (MNIST_SIZES * 4, [20] * 2, 2, 0.01, 12, 5, (1, 28, 28)),
    "rotated-mnist-min": (MNIST_SIZES * 4, [40], 2, 0.01, 12, 5, (1, 28, 28)),
    "mnist-base": (MNIST_SIZES * 4, [40], 2, 0.01, 12, 5, (1, 28, 28)),
    "rotated-cifar10": ([(4500, 500, 1000)] * 40, [10] * 4, 4, 0.01, 12, 45, (3, 32, 32)),
    "rotated-cifar10-two": ([(4500, 500, 1000)] * 40, [20] * 2, 2, 0.01, 12, 45, (3, 34, 34)),
    "rotated-cifar10-min": ([(4500, 500, 1000)] * 40, [40], 2, 0.01, 12, 45, (3, 38, 38)),
    "cifar10-base": ([(4500, 500, 1000)] * 40, [40], 2, 0.01, 12, 45, (3, 32, 32)),
    "pacs": (PACS_SIZES, [4, 4, 3, 7], 4, 0.001, 11, 8, (3, 227, 227)),
    "backdoor-mnist": (BACKDOOR_SIZES, [10] * 3, 3, 0.01, 2.5, 4, (3, 28, 28)),
    "backdoor-cifar10": ([(4500, 500, 1000)] * 15, [5] * 3, 3, 0.01, 10.5, 28, (3, 32, 32)),
}


def pacs_shares(data_seed: int = 0) -> list[Share]:
    domains = np.repeat(np.arange(4), list(DOMAIN_SIZES.values()))
    return pacs.shares(domains, tuple(DOMAIN_SIZES), np.random.default_rng(0).integers(0, 7, len(domains)), data_seed)


def plans(data_seed: int = 0) -> dict[str, list[Share]]:
    found = {"pacs": pacs_shares(data_seed)}
    for name, version in (("rotated-mnist", "max"), ("rotated-mnist-two", "two"), ("rotated-mnist-min", "min"), ("mnist-base", "base")):
        found[name] = rotated.mnist_shares(MNIST_TRAIN, MNIST_TEST, version, data_seed)
        found[name.replace("mnist", "cifar10")] = rotated.cifar10_shares(CIFAR_TRAIN, CIFAR_TEST, version, data_seed)
    found["backdoor-mnist"] = backdoor.mnist_shares(MNIST_TRAIN, MNIST_TEST, data_seed)
    found["backdoor-cifar10"] = backdoor.cifar_shares(CIFAR_TRAIN, CIFAR_TEST, data_seed)
    return found


@pytest.fixture(scope="module")
def paper_plans() -> dict[str, list[Share]]:
    return plans()


@pytest.mark.parametrize("name", EXPECTED)
def test_sizes_and_groups_of_the_paper(name: str, paper_plans: dict[str, list[Share]]) -> None:
    shares = paper_plans[name]
    assert [(len(s.train), len(s.val), len(s.test)) for s in shares] == EXPECTED[name][0]
    assert list(Counter(s.group for s in shares).values()) == EXPECTED[name][1]
    assert len({s.name for s in shares}) == len(shares)


@pytest.mark.parametrize("name", EXPECTED)
def test_no_sample_twice_within_a_block(name: str, paper_plans: dict[str, list[Share]]) -> None:
    for block in {s.block for s in paper_plans[name]}:
        members = [s for s in paper_plans[name] if s.block == block]
        train = np.concatenate([np.concatenate([s.train, s.val]) for s in members])
        test = np.concatenate([s.test for s in members])
        assert len(np.unique(train)) == len(train)
        assert len(np.unique(test)) == len(test)
        if name == "pacs":
            assert not set(train.tolist()) & set(test.tolist())


def test_blocks_are_independent_shuffles_and_seeds_matter(paper_plans: dict[str, list[Share]]) -> None:
    first, other = paper_plans["rotated-mnist"][0], paper_plans["rotated-mnist"][10]
    assert not np.array_equal(first.train, other.train)
    again = rotated.mnist_shares(MNIST_TRAIN, MNIST_TEST, "max", 0)
    assert all(np.array_equal(a.train, b.train) for a, b in zip(again, paper_plans["rotated-mnist"], strict=True))
    assert not np.array_equal(rotated.mnist_shares(MNIST_TRAIN, MNIST_TEST, "max", 1)[0].train, first.train)


def test_classes_are_balanced_where_the_paper_balances(paper_plans: dict[str, list[Share]]) -> None:
    for share in paper_plans["rotated-mnist"]:
        both = np.concatenate([share.train, share.val])
        assert set(np.bincount(MNIST_TRAIN[both])) <= {542, 543}
        assert set(np.bincount(MNIST_TEST[share.test])) == {22}
    kept = rotated.balance(MNIST_TRAIN)
    assert len(kept) == 54_210
    assert len(rotated.balance(MNIST_TEST)) == 8_920


def test_labels_of_backdoor_cifar10(paper_plans: dict[str, list[Share]]) -> None:
    for share in paper_plans["backdoor-cifar10"]:
        assert set(CIFAR_TRAIN[share.train].tolist()) == set(backdoor.LABELS[share.group])
        assert set(CIFAR_TEST[share.test].tolist()) == set(backdoor.LABELS[share.group])


def check(scenario: Scenario, name: str) -> None:
    sizes, groups, k, lr, pacfl, fedclust, shape = EXPECTED[name]
    first = next(iter(scenario.sites[0].tests))
    assert [(len(s.train), len(s.val), len(s.tests[first])) for s in scenario.sites] == sizes
    assert scenario.groups is not None
    assert list(Counter(scenario.groups.values()).values()) == groups
    assert scenario.k == k
    assert scenario.defaults == {"rounds": 10, "local_epochs": 10, "batch_size": 128 if "mnist" in name else 64, "lr": lr}
    assert scenario.method_defaults["pacfl"] == {"threshold": pacfl}
    assert scenario.method_defaults["fedclust"] == {"threshold": fedclust}
    assert tuple(scenario.sites[0].train.x.shape[1:]) == shape
    assert scenario.name == name
    assert scenario.notes == ()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["mnist", "cifar10", "pacs"])
def test_real_data(source: str, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All scenarios of a source in one test: its images are decoded once, whatever number of workers share the tests."""
    if "EMDCFL_CACHE" not in os.environ:
        monkeypatch.setenv("EMDCFL_CACHE", str(tmp_path))
    for name in (name for name in EXPECTED if source in name):
        scenario = build(name, data_root=str(data_dir))
        check(scenario, name)
        colours = scenario.sites[0].train.x.shape[1]
        assert scenario.model.options.get("channels", 3) == colours
        if name.startswith("backdoor"):
            assert scenario.scored == tuple(s.name for s in scenario.sites if s.name.startswith("target"))
            assert list(scenario.sites[0].tests) == ["clean", "backdoor"]
    if source == "pacs":  # mapped, not copied
        first, last = scenario.sites[0].train.x, scenario.sites[-1].tests["test"].x
        whole = sum(len(s) for site in scenario.sites for s in (site.train, site.val, site.tests["test"]))
        assert first.untyped_storage().nbytes() == whole * 3 * 227 * 227
        assert last.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("standins")
    standins.mnist(folder)
    standins.cifar10(folder)
    return str(folder)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMDCFL_CACHE", str(tmp_path))


def test_stand_in_rotation(root: str, own_cache: None) -> None:
    scenario = build("rotated-mnist", data_root=root)
    for turns, name in enumerate(("rot0-1", "rot90-1", "rot180-1", "rot270-1")):
        site = next(s for s in scenario.sites if s.name == name)
        upright = torch.rot90(site.train.x[:, 0], -turns, dims=(1, 2))
        assert torch.equal(upright[:, 0, :10].argmax(dim=1), site.train.y)


def test_stand_in_backdoor(root: str, own_cache: None) -> None:
    scenario = build("backdoor-mnist", data_root=root)
    target = scenario.sites[0]
    clean, wrong = target.tests["clean"], target.tests["backdoor"]
    assert torch.equal(clean.y, wrong.y)
    assert torch.equal((clean.x[:, 1] > 1).any(dim=1), (wrong.x[:, 1] > 1).any(dim=1))
    lit_pixel = wrong.x[torch.arange(len(wrong)), :, 0, wrong.y]
    expected = torch.tensor([backdoor.SUMMER[9 - y] for y in wrong.y.tolist()], dtype=torch.float64) * 255
    assert torch.equal(lit_pixel, expected.trunc().to(torch.uint8))
    assert torch.equal(
        clean.x[torch.arange(len(clean)), :, 0, clean.y], torch.tensor([66, 160, 102], dtype=torch.uint8).expand(len(clean), 3)
    )
    cifar = build("backdoor-cifar10", data_root=root)
    attacker = next(s for s in cifar.sites if s.name == "attacker-1")
    for split in (attacker.train, attacker.val):
        assert torch.equal(split.x[:, :, 0, 0], torch.tensor(backdoor.TAB10, dtype=torch.uint8)[split.y])


@pytest.mark.slow
def test_stand_in_pacs(tmp_path: Path, own_cache: None) -> None:
    standins.pacs(tmp_path, per_domain=1001)
    scenario = build("pacs", data_root=str(tmp_path), scale="smoke")
    assert [s.name for s in scenario.sites] == [f"{d}-{i}" for d in pacs.DOMAINS for i in (1, 2)]
    for site in scenario.sites:
        assert site.train.x.unique().tolist() == ([9] if site.name.startswith("sketch") else [200])
    assert not any("published" in note for note in scenario.notes)


def test_stand_in_pacs_in_another_size_says_so(tmp_path: Path, own_cache: None) -> None:
    standins.pacs(tmp_path, per_domain=1001, side=32)
    scenario = build("pacs", data_root=str(tmp_path), scale="smoke")
    assert scenario.sites[0].train.x.shape[1:] == (3, 32, 32)
    assert "images of 32×32 pixels, not the published 227×227" in scenario.notes


@pytest.mark.parametrize("name", ["rotated-mnist", "backdoor-mnist", "rotated-cifar10-two"])
def test_scales_keep_the_construction(name: str, root: str, own_cache: None) -> None:
    full, small = build(name, data_root=root), build(name, data_root=root, scale="smoke")
    assert len(small.sites) == 2 * len({s.name.split("-")[0] for s in full.sites})
    for site in small.sites:
        same = next(s for s in full.sites if s.name == site.name)
        assert torch.equal(site.train.x, same.train.x[: len(site.train)])
        assert torch.equal(site.val.y, same.val.y[: len(site.val)])
    assert small.notes[0].startswith(f"scale smoke: {len(small.sites)} of {len(full.sites)} clients")
    assert small.defaults["rounds"] < full.defaults["rounds"]
    with pytest.raises(ConfigError, match="unknown scale 'smal': did you mean 'small'"):
        build(name, data_root=root, scale="smal")


def test_small_scales_may_train_in_smaller_batches_and_keep_the_proportions(paper_plans: dict[str, list[Share]]) -> None:
    kept, training, notes = shrink(paper_plans["backdoor-mnist"], "small", BACKDOOR_MNIST_SCALES, MNIST_TRAINING)
    assert {s.block: (len(s.train), len(s.val), len(s.test)) for s in kept} == {
        "target": (1200, 256, 512),
        "attacker": (2400, 256, 512),
        "unrelated": (1200, 256, 512),
    }
    assert training == {"rounds": 3, "local_epochs": 3, "batch_size": 16}
    assert "of 3 epochs (paper: 10) in batches of 16 (paper scale: 128)" in notes[0]
    _, training, notes = shrink(paper_plans["rotated-mnist"], "small", CNN_SCALES, MNIST_TRAINING)
    assert training["batch_size"] == 64
    _, training, notes = shrink(paper_plans["pacs"], "small", RESNET_SCALES, PAPER_TRAINING)
    assert training["batch_size"] == 16
    assert "in batches of 16 (paper scale: 64)" in notes[0]
    _, training, notes = shrink(paper_plans["pacs"], "smoke", RESNET_SCALES, PAPER_TRAINING)
    assert training["batch_size"] == 64
    assert "batches" not in notes[0]


def test_rotated_digits() -> None:
    scenario = build("rotated-digits")
    assert [s.name for s in scenario.sites] == [f"rot{a}-{i}" for a in (0, 90, 180, 270) for i in (1, 2)]
    assert {(len(s.train), len(s.val), len(s.tests["test"])) for s in scenario.sites} == {(539, 180, 180), (538, 180, 180)}
    pixels = torch.cat([s.train.x for s in scenario.sites]).float()
    normal = scenario.preprocess(pixels)
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02
    assert len(build("rotated-digits", groups=2, clients_per_group=5).sites) == 10
    other = build("rotated-digits", data_seed=1)
    assert not torch.equal(other.sites[0].train.x, scenario.sites[0].train.x)
    with pytest.raises(ConfigError, match="groups must be between 1 and 4, got 5"):
        build("rotated-digits", groups=5)


@pytest.mark.parametrize(
    ("options", "validation", "groups"),
    [
        ({}, 45, {"rot0": 2, "rot90": 2, "rot180": 2, "rot270": 2}),
        ({"clients_per_group": 5}, 18, {"rot0": 5, "rot90": 5, "rot180": 5, "rot270": 5}),
        (
            {"angles": [0, 90, 180], "clients_per_group": [1, 3, 12]},
            22,
            {"rot0": 1, "rot90": 3, "rot180": 12},
        ),
        ({"angles": range(0, 180, 15), "clients_per_group": 1}, 30, {}),
    ],
)
def test_digit_sites(options: dict[str, Any], validation: int, groups: dict[str, int]) -> None:
    scenario = build("digit-sites", **options)
    assert min(len(s.val) for s in scenario.sites) == validation
    assert Counter((scenario.groups or {}).values()) == groups
    every = [split for s in scenario.sites for split in (s.train, s.val, s.tests["test"])]
    assert sum(map(len, every)) == 1797


def test_digit_sites_with_other_labels() -> None:
    plain = build("digit-sites", angles=[0], clients_per_group=4)
    shifted = build("digit-sites", angles=[0], label_shifts=[0, 1], clients_per_group=2)
    found = {split.x[i].numpy().tobytes(): int(split.y[i]) for s in plain.sites for split in (s.train, s.val) for i in range(len(split))}
    differences = {
        s.name[:6]: {
            (int(y) - found[x.numpy().tobytes()]) % 10 for x, y in zip(s.train.x, s.train.y, strict=True) if x.numpy().tobytes() in found
        }
        for s in shifted.sites
    }
    assert differences == {"rot0+0": {0}, "rot0+1": {1}}
    with pytest.raises(ConfigError, match="clients_per_group for 4 groups, got 3"):
        build("digit-sites", clients_per_group=[1, 3, 12])
    for same in ({"angles": [0, 360]}, {"label_shifts": [0, 10]}):
        with pytest.raises(ConfigError, match="different angles and label_shifts"):
            build("digit-sites", **same)


@pytest.fixture
def natural_root(tmp_path: Path) -> str:
    standins.natural(tmp_path)
    return str(tmp_path)


def test_natural_series_are_split_by_time_without_overlap(natural_root: str) -> None:
    scenario = build("watch", data_root=natural_root)
    assert [s.name for s in scenario.sites] == ["a-left", "a-right", "b-left", "b-right"]
    assert scenario.groups == {"a-left": "left", "a-right": "right", "b-left": "left", "b-right": "right"}
    encoding = TableEncoding.from_dict(scenario.encoding)
    clock = next(c for c in encoding.columns if c.name == "clock")
    assert isinstance(clock, Numeric)
    for site in scenario.sites:  # the stand-in's only column is the time at which a window starts
        train, val, test = (split.x[:, 0] * clock.std + clock.mean for split in (site.train, site.val, site.tests["test"]))
        assert train.max() + 100 <= 400 <= val.min() + 1e-3
        assert val.max() + 100 <= 600 + 1e-3
        assert test.min() >= 600 - 1e-3
    few = build("watch", data_root=natural_root, train_rows=4)
    assert all(torch.bincount(s.train.y).tolist() == [2, 2] for s in few.sites)


def test_natural_later_recordings_are_only_tested(natural_root: str) -> None:
    scenario = build("hapt-later", data_root=natural_root)
    pooled = torch.cat([s.train.x for s in scenario.sites])
    assert torch.allclose(pooled.mean(dim=0), torch.zeros(1), atol=1e-5)  # standardised with training rows alone
    assert all(s.tests["test"].x.min() > max(s.train.x.max(), s.val.x.max()) for s in scenario.sites)  # recording 2 is later by 1,000
    assert build("hapt", data_root=natural_root).sites[0].tests["test"].x.min() < scenario.sites[0].tests["test"].x.min()


def test_natural_data_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMDCFL_DATA", raising=False)
    with pytest.raises(DataError, match=r"natural/chem97\.parquet: set EMDCFL_DATA"):
        build("chem97")
    with pytest.raises(DataError, match="no hapt data at"):
        build("hapt", data_root=str(tmp_path))


def test_train_rows_beyond_the_smallest_site_say_how_many_it_has(data_dir: Path) -> None:
    smallest = min(len(s.train) for s in build("watch", data_root=str(data_dir)).sites)
    with pytest.raises(ConfigError, match=f"between 1 and the {smallest} training rows of the smallest site, got 0"):
        build("watch", data_root=str(data_dir), train_rows=0)


@pytest.mark.parametrize(("name", "sites", "classes"), [("watch", 20, 7), ("hapt", 30, 6), ("hapt-later", 30, 6), ("chem97", 58, 2)])
def test_real_natural_data(name: str, sites: int, classes: int, data_dir: Path) -> None:
    scenario = build(name, data_root=str(data_dir))
    assert (len(scenario.sites), len(scenario.classes)) == (sites, classes)
    assert min(len(s.val) for s in scenario.sites) >= 40
    assert not {"person", "start", "length", "authority"} & {c["name"] for c in scenario.encoding["columns"]}


def test_registry() -> None:
    assert names()[:3] == ("rotated-digits", "digit-sites", "rotated-mnist")
    assert set(EXPECTED) < set(names())
    assert all(describe(name) for name in names())
    assert options("rotated-mnist") == {"scale": "paper", "data_seed": 0, "data_root": None}
    with pytest.raises(ConfigError, match="unknown scenario 'rotated-mnits': did you mean 'rotated-mnist'"):
        build("rotated-mnits")
    with pytest.raises(ConfigError, match="no option 'client_per_group': did you mean 'clients_per_group'"):
        build("rotated-digits", client_per_group=2)
    with pytest.raises(ConfigError, match="clients_per_group must be int, got 'two'"):
        build("rotated-digits", clients_per_group="two")
    with pytest.raises(ConfigError, match="needs the option source"):
        build("custom")
