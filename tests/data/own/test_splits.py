"""Splits of own data by time, by a column and by group, and what ``data check`` says about rows that leak."""

from __future__ import annotations

from collections import UserList
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from emdcfl.core.errors import ConfigError, DataError
from emdcfl.data import scenarios
from emdcfl.data.own import check_folder, from_arrays, load_folder, load_site
from emdcfl.data.own.checking.check import check_site
from emdcfl.data.own.checking.leaks import MAX_OTHERS, near_duplicates, repeats
from emdcfl.data.own.cleaning import Cleaning
from emdcfl.data.own.splitting import RANDOM, SplitRule
from emdcfl.data.split import grouped_indices
from emdcfl.data.types import Scenario, Site
from emdcfl.engines.flower.node.data import read_site
from emdcfl.engines.flower.node.home import NodeConfig

N = 60


def patients(rng: np.random.Generator, people: int = 40, repeats: int = 5, noise: float = 0.1) -> dict[str, np.ndarray]:
    """Repeated measurements: eight readings of each patient, a few times over."""
    who = np.repeat(np.arange(people), repeats)
    x = rng.normal(size=(people, 8))[who] + noise * rng.normal(size=(len(who), 8))
    return {"patient": who + 1000, **{f"x{i}": x[:, i] for i in range(8)}, "label": (who % 2).astype(str)}


def table(path: Path, columns: dict[str, np.ndarray]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def days(tmp_path: Path) -> Path:
    """Two sites whose only feature is the day's number, in random order, so that splits can be read off."""
    for seed, site in enumerate("ab"):
        day = np.random.default_rng(seed).permutation(N)
        said = np.where(day < 30, "Train", np.where(day < 40, "valid", "test"))
        table(tmp_path / f"{site}.parquet", {"x": day, "day": day, "part": said, "who": day // 6, "label": day % 2})
    return tmp_path


def values(scenario: Scenario, site: Site) -> list[list[int]]:
    column = next(c for c in scenario.encoding["columns"] if c["name"] == "x")
    splits = (site.train, site.val, site.tests["test"])
    return [sorted(round(float(v)) for v in split.x[:, 0] * column["std"] + column["mean"]) for split in splits]


def test_the_newest_rows_test_and_the_time_is_no_feature(days: Path) -> None:
    scenario = load_folder(days, rule=SplitRule.of("time:day"))
    for site in scenario.sites:
        assert values(scenario, site) == [list(range(36)), list(range(36, 48)), list(range(48, 60))]
    assert [c["name"] for c in scenario.encoding["columns"]] == ["x", "who", "part"]


def test_a_column_says_the_split(days: Path) -> None:
    scenario = load_folder(days, rule=SplitRule.of(split_column="part"))
    assert values(scenario, scenario.sites[0]) == [list(range(30)), list(range(30, 40)), list(range(40, 60))]


def test_groups_stay_in_one_split_also_by_time(days: Path) -> None:
    scenario = load_folder(days, rule=SplitRule.of(group="who"))
    for site in scenario.sites:
        owners = [{v // 6 for v in part} for part in values(scenario, site)]
        assert sum(map(len, owners)) == 10 == len(set.union(*owners))
        assert [len(owner) for owner in owners] == [6, 2, 2]
    dropped = load_folder(days, rule=SplitRule.of(group="who"), cleaning=Cleaning(drop=("who",)))  # it is no feature anyway
    assert dropped.encoding == scenario.encoding
    both = load_folder(days, rule=SplitRule.of("time:day", group="who"))
    assert values(both, both.sites[0]) == [list(range(36)), list(range(36, 48)), list(range(48, 60))]


def test_a_new_site_is_split_as_the_run_was(days: Path) -> None:
    rule = SplitRule.of("time:day")
    scenario = load_folder(days, rule=rule)
    site, _ = load_site(days / "a.parquet", encoding=scenario.encoding, classes=scenario.classes, rule=rule)
    assert values(scenario, site) == values(scenario, scenario.sites[0])


def test_options_of_a_config_and_of_a_node_split_alike(days: Path, tmp_path: Path) -> None:
    scenario = scenarios.build("folder", path=str(days), split="time:day")
    data = {"encoding": scenario.encoding, "classes": scenario.classes, "seed": 0}
    config = NodeConfig(data=str(days / "a.parquet"), split="time:day")
    site = read_site("a", tmp_path, config, data)
    assert values(scenario, site) == values(scenario, scenario.sites[0])
    other = read_site("a", tmp_path, NodeConfig(data=config.data), data)
    assert values(scenario, other) != values(scenario, site)
    with pytest.raises(ConfigError, match="expected --split"):
        NodeConfig(split="newest")


def test_rows_without_a_time_are_left_out(tmp_path: Path) -> None:
    day = np.arange(float(N))
    day[:4] = np.nan
    for site in "ab":
        table(tmp_path / f"{site}.parquet", {"x": np.arange(N), "day": day, "label": np.arange(N) % 2})
    scenario = load_folder(tmp_path, rule=SplitRule.of("time:day"))
    assert any("rows without day, by which they are split, left out: 4" in note for note in scenario.notes)
    assert len(scenario.sites[0].train) + len(scenario.sites[0].val) + len(scenario.sites[0].tests["test"]) == N - 4


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (SplitRule.of(split_column="who"), "must say train, val or test, got '"),
        (SplitRule.of(group="label"), "no column 'label' to split by"),
    ],
)
def test_columns_that_cannot_split(days: Path, rule: SplitRule, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_folder(days, rule=rule)


def test_rules_that_make_no_sense() -> None:
    for split in ("newest", "time", "time:", "random:day"):
        with pytest.raises(ConfigError, match="expected --split random or --split time:COLUMN"):
            SplitRule.of(split)
    with pytest.raises(ConfigError, match="--split-column names the split"):
        SplitRule.of("time:day", "part")


def test_images_are_grouped_by_file_name(tmp_path: Path) -> None:
    for site in "ab":
        for i in range(N):
            file = tmp_path / site / f"class{i % 2}" / f"p{i // 6}_{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), 4 * (i // 6), np.uint8)).save(file)
    scenario = load_folder(tmp_path, rule=SplitRule.of(group=r"p(\d+)_"))
    for site in scenario.sites:
        shades = [set(split.x.flatten().tolist()) for split in (site.train, site.val, site.tests["test"])]
        assert sum(map(len, shades)) == 10 == len(set.union(*shades))


def test_arrays_with_groups() -> None:
    def site(seed: int) -> tuple[np.ndarray, ...]:
        who = np.arange(N) // 6
        return np.column_stack([who, np.random.default_rng(seed).normal(size=N)]), np.arange(N) % 2, who

    scenario = from_arrays({"a": site(0), "b": site(1)})
    for s in scenario.sites:
        owners = [set(split.x[:, 0].tolist()) for split in (s.train, s.val, s.tests["test"])]
        assert sum(map(len, owners)) == 10
    with pytest.raises(DataError, match="one group per sample, got 60 samples and 3"):
        from_arrays({"a": site(0), "b": (*site(1)[:2], [1, 2, 3])})
    with pytest.raises(DataError, match="one group per sample, got 60 samples and gaps"):
        from_arrays({"a": site(0), "b": (*site(1)[:2], ["x", None] * 30)})


def test_patients_with_one_label_each_train_every_class() -> None:
    groups = np.repeat(np.arange(12), [9, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3])
    labels = groups % 3
    parts = grouped_indices(labels, groups, (0.6, 0.2, 0.2), np.random.default_rng(0))
    assert set(labels[parts[0]].tolist()) == {0, 1, 2}
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(groups)))
    assert all(len(part) for part in grouped_indices(np.arange(3), np.arange(3), (0.6, 0.2, 0.2), np.random.default_rng(0)))


def checks(folder: Path, rule: SplitRule = RANDOM) -> list[str]:
    """What is said of two sites together, and of the first alone, as at a node."""
    return [" ".join(report.notes) for report in (check_folder(folder, rule=rule), check_site(folder / "a.parquet", "a", rule=rule))]


def test_check_names_repeated_measurements_and_the_column(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site in "ab":
        table(tmp_path / f"{site}.parquet", patients(rng))
    for notes in checks(tmp_path):
        assert "almost repeat a training row" in notes
        assert "--group patient" in notes
    for grouped in checks(tmp_path, SplitRule.of(group="patient")):
        assert "almost repeat" not in grouped
        assert "--group" not in grouped


def test_runs_name_repeated_measurements_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site in "ab":
        table(tmp_path / f"{site}.parquet", patients(rng))
    assert "--group patient" in " ".join(load_folder(tmp_path).notes)
    rows = {site: patients(rng) for site in "ab"}
    measured = {site: (np.column_stack([c[f"x{i}"] for i in range(8)]), c["label"]) for site, c in rows.items()}
    assert "a third array" in " ".join(from_arrays(measured).notes)


@pytest.mark.parametrize("number", [2, 6])
def test_check_proposes_no_category_that_rows_of_a_patient_share(tmp_path: Path, number: int) -> None:
    rng = np.random.default_rng(0)
    for site in "ab":
        columns = patients(rng)
        table(tmp_path / f"{site}.parquet", {"ward": columns.pop("patient") % number, **columns})
    notes = " ".join(check_folder(tmp_path).notes)
    assert "almost repeat a training row" in notes
    assert "--group COLUMN" in notes and "--group ward" not in notes


def test_check_groups_neither_by_the_label_nor_by_a_measurement(tmp_path: Path) -> None:
    """Near-duplicates share both; but rows of one class, or of one area, are no repeats of each other."""
    rng = np.random.default_rng(0)
    for site in "ab":
        columns = patients(rng, people=60, repeats=3)
        who = columns.pop("patient") - 1000
        area = 5 * rng.integers(0, 12, 60)[who]
        table(tmp_path / f"{site}.parquet", {**columns, "area": area, "label": who % 12})
    notes = " ".join(check_folder(tmp_path).notes)
    assert "almost repeat a training row" in notes
    assert "--group COLUMN" in notes and "--group area" not in notes and "--group label" not in notes


def test_check_takes_what_is_measured_of_a_patient_for_no_identifier(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site in "ab":
        columns = {"patient_age": rng.integers(20, 90, 150), "lot_area": 10 * rng.integers(100, 200, 150), "x": rng.normal(size=150)}
        table(tmp_path / f"{site}.parquet", {**columns, "label": rng.integers(0, 2, 150)})
    notes = " ".join(check_folder(tmp_path).notes)
    assert "patient_age" not in notes and "lot_area" not in notes


def test_check_takes_how_many_for_no_identifier(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site in "ab":
        counts = {name: rng.poisson(60, 120) for name in ("n_users", "patients", "number of visits", "Number_of_reviews")}
        who = {name: rng.integers(100, 160, 120) for name in ("ids", "patient", "patients_id", "UserNumber")}
        table(tmp_path / f"{site}.parquet", {"x": rng.normal(size=120), **counts, **who, "label": rng.integers(0, 2, 120)})
    report = check_folder(tmp_path)
    assert {column.name for column in report.columns if column.doubt is not None} == set(who)
    assert "--group patient" in " ".join(report.notes) and "--group n_users" not in " ".join(report.notes)


def test_check_does_not_suspect_independent_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site in "ab":
        columns = patients(rng, people=200, repeats=1)
        del columns["patient"]
        table(tmp_path / "continuous" / f"{site}.parquet", columns)
        answers = {f"q{i}": rng.integers(0, 3, 200) for i in range(3)}  # a questionnaire: many equal rows
        table(tmp_path / "discrete" / f"{site}.parquet", {**answers, "label": rng.integers(0, 2, 200)})
        mood = rng.normal(size=400)
        alike = {f"q{i}": np.round(mood + 0.3 * rng.normal(size=400)) for i in range(6)}  # whose questions ask for the same
        table(tmp_path / "correlated" / f"{site}.parquet", {**alike, "label": rng.integers(0, 2, 400)})
        city = rng.integers(0, 25, 400)
        places = {"city": [f"c{i}" for i in city], "state": [f"s{i // 3}" for i in city], "region": [f"r{i // 8}" for i in city]}
        houses = {"size": np.round(rng.gamma(2, 30, 400)), "rooms": rng.integers(1, 7, 400)}
        table(tmp_path / "nested" / f"{site}.parquet", {**places, **houses, "label": rng.integers(0, 2, 400)})
    for folder in ("continuous", "discrete", "correlated", "nested"):
        assert not [notes for notes in checks(tmp_path / folder) if "almost repeat" in notes]


def test_rows_of_few_categories_are_judged_by_all_other_sites(tmp_path: Path) -> None:
    """One site that writes its words otherwise says nothing about how often rows of the others coincide."""
    for seed, site in enumerate("abcd"):
        rng, n = np.random.default_rng(seed), 300
        grade = np.array(["high", "LOW"] if site == "c" else ["hi", "lo"])[rng.integers(0, 2, n)]
        answers = {"age": rng.integers(0, 12, n), "sex": rng.integers(0, 2, n), "grade": grade}
        table(tmp_path / f"{site}.parquet", {**answers, "label": rng.integers(0, 2, n).astype(str)})
    assert not any("b" in note.partition(":")[0] for note in check_folder(tmp_path).notes if "almost repeat" in note)


def test_of_many_small_sites_with_few_values_none_is_suspected_by_chance() -> None:
    rng, n = np.random.default_rng(0), 100
    rows = (np.stack([rng.integers(0, 2, n), rng.integers(-6, 6, n), np.round(rng.normal(5.7, 0.9, n), 1)], axis=1) for _ in range(60))
    sites = from_arrays({str(i): (x.astype(np.float32), rng.integers(0, 2, n)) for i, x in enumerate(rows)}).sites
    assert not [site.name for site in sites if near_duplicates(site, [one for one in sites if one is not site])]


def test_of_many_other_sites_some_tell_what_is_usual() -> None:
    rng, measured = np.random.default_rng(0), {}
    for i in range(60):
        columns = patients(rng) if i == 7 else patients(rng, people=200, repeats=1)
        measured[f"site-{i}"] = np.column_stack([columns[f"x{k}"] for k in range(8)]), columns["label"]
    sites = from_arrays(measured).sites
    looked_at: set[str] = set()

    class Others(UserList[Site]):
        def __getitem__(self, i: Any) -> Any:
            looked_at.add(self.data[i].name)
            return self.data[i]

    for i in (6, 7, 8):
        looked_at.clear()
        found = near_duplicates(sites[i], Others(sites[:i] + sites[i + 1 :]))
        assert (found is not None) == (i == 7)
        assert len(looked_at) == MAX_OTHERS


@pytest.mark.parametrize(("sites", "pairs"), [(MAX_OTHERS, MAX_OTHERS * (MAX_OTHERS - 1) // 2), (3 * MAX_OTHERS, 3 * MAX_OTHERS - 1)])
def test_samples_of_hundreds_of_sites_are_not_counted_for_every_two_of_them(sites: int, pairs: int) -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32), np.arange(20) % 2
    found = repeats(from_arrays({str(i): (x, y) for i in range(sites)}))
    assert len(found.across) == pairs and set(found.across.values()) == {20}
    assert found.notes("here")[0].startswith("here: samples at two sites: 20 of site 1 at site 0")


def test_what_all_rows_of_a_site_share_makes_them_no_repeats(tmp_path: Path) -> None:
    """Coarse answers coincide by chance, at a site and between sites, whose size and budget differ."""
    for seed, site in enumerate("abcd"):
        rng, n = np.random.default_rng(seed), 200
        answers = {"age": rng.integers(20, 60, n), "sex": rng.integers(0, 2, n), "degree": rng.integers(0, 2, n)}
        table(tmp_path / f"{site}.parquet", {**answers, "size": np.full(n, 100 + seed), "label": rng.integers(0, 2, n)})
    report = check_folder(tmp_path)
    assert report.repeats is not None and min(report.repeats.held.values()) > 20 and max(report.repeats.across.values(), default=0) == 0
    assert not [note for note in report.notes if "repeat" in note or "equal a training sample" in note]


def test_a_score_that_has_other_values_at_every_site_coincides_by_chance(tmp_path: Path) -> None:
    for seed, site in enumerate("abcd"):
        rng, n = np.random.default_rng(seed), 60
        own = {"score": 0.01 * (100 * seed + rng.integers(0, 60, n)), "sex": rng.integers(0, 2, n), "label": rng.integers(0, 2, n)}
        table(tmp_path / f"{site}.parquet", own)
    report = check_folder(tmp_path)
    assert report.repeats is not None and max(report.repeats.held.values()) >= 5 and not report.repeats.by_chance
    assert not [note for note in report.notes if "equal a training sample" in note]


def test_check_points_to_identifiers_and_dates(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site in "ab":
        columns = patients(rng, noise=3.0)
        dates = np.datetime64("2024-01-01") + np.arange(len(columns["label"]))
        table(tmp_path / f"{site}.parquet", {**columns, "patient no": columns["patient"], "day": dates, "last day": dates})
    notes = " ".join(check_folder(tmp_path).notes)
    assert "column 'patient' has 5.0 rows per value" in notes
    assert "--split time:day" in notes
    assert "use --group 'patient no'," in notes and "--split 'time:last day'" in notes
    for site in "ab":
        table(tmp_path / f"{site}.parquet", {**patients(rng, noise=3.0), "label": dates[np.arange(len(dates)) % 2]})
    assert not any("time:label" in note for note in check_folder(tmp_path).notes)
