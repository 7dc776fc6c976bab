"""What people hold in Python becomes the same run, whatever holds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import emdcfl
from emdcfl.api.clients import read_clients
from emdcfl.core.errors import ConfigError, DataError, ModelError, StoreError
from emdcfl.data.own.frames import encode
from emdcfl.data.own.hub import hub_entry
from emdcfl.data.types import Scenario, Site
from emdcfl.models import ModelRecipe
from emdcfl.runs.config import Choice, Config
from emdcfl.runs.plan import plan
from emdcfl.runs.served import ModelInfo

pd = pytest.importorskip("pandas", reason="the extra emdcfl[tables] is not installed")
QUICK: dict[str, Any] = {"rounds": 1, "local_epochs": 1}


def frame(sites: tuple[str, ...] = ("a", "b", "c"), n: int = 40) -> Any:
    rng, found = np.random.default_rng(0), []
    for name in sites:
        x = rng.normal(size=(n, 2))
        one = pd.DataFrame({"age": x[:, 0], "dose": x[:, 1], "sex": np.where(x[:, 1] > 0, "f", "m"), "outcome": x[:, 0] > 0})
        found.append(one.assign(hospital=name, outcome=np.where(one["outcome"], "ill", "well")))
    table = pd.concat(found, ignore_index=True)
    table.loc[3, "dose"] = np.nan
    return table


def scenario_of(clients: Any, **about: Any) -> Scenario:
    return read_clients(clients, None, None, 0, about)[1]


def same(one: Scenario, other: Scenario) -> bool:
    def equal(a: Site, b: Site) -> bool:
        return a.name == b.name and torch.equal(a.train.x, b.train.x) and torch.equal(a.tests["test"].y, b.tests["test"].y)

    return all(equal(a, b) for a, b in zip(one.sites, other.sites, strict=True))


def test_frames_are_read_as_their_files_are(tmp_path: Path) -> None:
    table = frame()
    for name, rows in table.groupby("hospital"):
        rows.drop(columns="hospital").to_csv(tmp_path / f"{name}.csv", index=False)
    files = emdcfl.scenarios.build("folder", path=str(tmp_path), label="outcome")
    apart = {name: rows.drop(columns="hospital") for name, rows in table.groupby("hospital")}
    assert same(files, scenario_of(table, label="outcome", client="hospital"))
    assert same(files, scenario_of(apart, label="outcome"))
    with_y = {name: (rows.drop(columns="outcome"), rows["outcome"]) for name, rows in apart.items()}
    assert same(files, scenario_of(with_y))
    assert files.classes == ("ill", "well") and files.sites[0].train.x.shape[1] == 2 + 1 + 2  # one column has gaps, one is text


def test_data_in_memory_are_split_as_files_are_whatever_the_seed(tmp_path: Path) -> None:
    table, quick = frame(), {**QUICK, "method": "local", "label": "outcome", "site": "hospital"}
    table.to_csv(tmp_path / "all.csv", index=False)
    files, memory = (emdcfl.fit(given, seed=4, **quick) for given in (tmp_path / "all.csv", table))
    assert same(files.scenario, memory.scenario)
    other = emdcfl.fit(table, **quick, settings={"scenario.data_seed": 4}, out=tmp_path / "run")
    assert not same(other.scenario, memory.scenario)
    again = emdcfl.load(tmp_path / "run", clients=table)
    assert same(again.scenario, other.scenario)


def test_frames_of_splits_keep_groups_together_as_files_do(tmp_path: Path) -> None:
    table = frame().assign(patient=[f"p{i // 4}" for i in range(120)], part="train")
    halves = {split: table.iloc[start::2] for start, split in enumerate(("train", "test"))}
    about: dict[str, Any] = {"label": "outcome", "group": "patient", "drop": "part"}
    apart: dict[str, dict[str, Any]] = {name: {} for name in "abc"}
    for split, rows in halves.items():
        for name, own in rows.groupby("hospital"):
            apart[name][split] = own.drop(columns="hospital")
            (tmp_path / name).mkdir(exist_ok=True)
            apart[name][split].to_csv(tmp_path / name / f"{split}.csv", index=False)
    files = emdcfl.scenarios.build("folder", path=str(tmp_path), **about)
    assert [column["name"] for column in files.encoding["columns"]] == ["age", "dose", "sex"]
    assert same(files, scenario_of(apart, **about)) and same(files, scenario_of(halves, client="hospital", **about))
    for clients, more in ((apart, {}), (halves, {"client": "hospital"})):
        with pytest.raises(DataError, match="split-column has nothing to do"):
            scenario_of(clients, label="outcome", split_column="part", **more)


def test_dates_written_as_text_and_marks_of_gaps_in_frames_are_read_as_in_files(tmp_path: Path) -> None:
    about: dict[str, Any] = {"label": "outcome", "date": ["seen"], "missing": ["-1"], "split": "time:day"}
    days = pd.date_range("2024-01-01", periods=120)
    table = frame().assign(day=days.strftime("%Y-%m-%d"), seen=days.strftime("%d.%m.%Y"), dose=-1)
    table.to_csv(tmp_path / "all.csv", index=False)
    files = emdcfl.scenarios.build("folder", path=str(tmp_path / "all.csv"), client="hospital", **about)
    assert same(files, scenario_of(table, client="hospital", **{**about, "date": ["seen", "day"]}))
    assert torch.equal(encode(table, files.encoding)[:3], encode(table.head(3), files.encoding))


def test_categories_of_pandas_are_read_as_text_is(tmp_path: Path) -> None:
    table = frame().assign(stage=["I", "II", "?"] * 40, dose=["5 mg", "10 mg"] * 60)
    kinds, about = {"stage": "category", "dose": "category", "sex": "category"}, {"label": "outcome", "client": "hospital", "missing": "?"}
    table.astype(kinds).to_parquet(tmp_path / "all.parquet")
    table.to_csv(tmp_path / "all.csv", index=False)
    text, stored = (emdcfl.scenarios.build("folder", path=str(tmp_path / f"all.{kind}"), **about) for kind in ("csv", "parquet"))
    assert text.encoding == stored.encoding == scenario_of(table.astype(kinds), **about).encoding
    assert [column.get("words") for column in text.encoding["columns"] if column["name"] == "stage"] == [["I", "II"]]


def test_one_part_for_each_split_and_two_frames_are_two_sites() -> None:
    table = frame().drop(columns="hospital")
    twice = {"train": table, "val": table, "valid": table}
    with pytest.raises(DataError, match="got train, val, valid; put those of one split together"):
        scenario_of({"a": twice, "b": twice}, label="outcome")
    with pytest.raises(DataError, match="got train, val, valid; put those of one split together"):
        scenario_of({split: frame() for split in twice}, label="outcome", client="hospital")
    assert [site.name for site in scenario_of((table, table), label="outcome").sites] == ["client-1", "client-2"]
    parts = scenario_of({"train": frame(n=30), "test": frame(n=12)}, label="outcome", client="hospital").sites
    assert [(site.name, len(site.train) + len(site.val), len(site.tests["test"])) for site in parts] == [(name, 30, 12) for name in "abc"]
    with pytest.raises(DataError, match="expected one label per row, got 120 rows and None"):
        scenario_of([(table, None)] * 2, label="y")


def test_clients_may_come_from_a_generator_and_not_from_a_number() -> None:
    table = frame().drop(columns="hospital")
    assert same(scenario_of([table, table], label="outcome"), scenario_of((table for _ in range(2)), label="outcome"))
    for clients in (None, 5):
        with pytest.raises(DataError, match=f"expected clients as a list, .* got {type(clients).__name__}"):
            scenario_of(clients)


def test_numbers_as_text_are_numbers_and_what_is_meant_as_text_is_not(tmp_path: Path) -> None:
    """A CSV has no types: its reader takes what reads as a number for one, and so do the readers of frames and Parquet files."""
    rng, frames = np.random.default_rng(0), {}
    for site, mark in {"a": "n.a.", "b": "-"}.items():
        size, code = rng.normal(5, 1, 60).round(2).astype(str), [f"{i % 3:03d}" for i in range(60)]
        columns = {"size": [mark, *size[1:]], "count": rng.integers(1, 30, 60).astype(str), "code": code, "label": ["1", "2"] * 30}
        frames[site] = pd.DataFrame(columns).assign(stage=pd.Categorical([str(1 + i % 4) for i in range(60)]))
        (tmp_path / "d").mkdir(exist_ok=True)
        frames[site].to_parquet(tmp_path / "d" / f"{site}.parquet")
    for scenario in (scenario_of(frames), emdcfl.scenarios.build("folder", path=str(tmp_path / "d"))):
        assert scenario.label_kind == "text"
        kinds = {column["name"]: column.get("words") for column in scenario.encoding["columns"]}
        assert kinds == {"size": None, "count": None, "code": ["000", "001", "002"], "stage": ["1", "2", "3", "4"]}
    shared = pd.concat([frame.assign(site=site) for site, frame in frames.items()])
    assert [c["name"] for c in scenario_of(shared, client="site").encoding["columns"] if "words" not in c] == ["size", "count"]
    big = {site: frame.assign(size="1e200") for site, frame in frames.items()}
    with pytest.raises(DataError, match="'size' holds a number beyond"):
        scenario_of(big)


def test_sparse_columns_are_read_as_dense_ones() -> None:
    table = frame().assign(dose=0.0, visits=[0, 0, 3] * 40).rename(columns={"visits": "self"})
    sparse = table.astype({"dose": pd.SparseDtype(float, 0.0), "self": pd.SparseDtype(int)})
    assert encode(sparse, scenario_of(sparse, label="outcome", client="hospital").encoding).equal(
        encode(table, scenario_of(table, label="outcome", client="hospital").encoding)
    )


def test_intervals_lists_and_bytes_in_frames_and_files_are_words(tmp_path: Path) -> None:
    table = frame().assign(band=lambda t: pd.cut(t["age"], [-9, -1, 1, 9]), tags=[["x"], ["x", "y"]] * 60, code=[b"k", b"l"] * 60)
    found = scenario_of(table, label="outcome", client="hospital").encoding["columns"]
    words = {column["name"]: column["words"] for column in found if "words" in column}
    assert words["band"] == ["(-1, 1]", "(-9, -1]", "(1, 9]"] and words["tags"] == ["['x', 'y']", "['x']"] and words["code"] == ["k", "l"]
    table.drop(columns="band").to_parquet(tmp_path / "all.parquet")
    files = emdcfl.scenarios.build("folder", path=str(tmp_path / "all.parquet"), client="hospital", label="outcome")
    assert same(files, scenario_of(table.drop(columns="band"), label="outcome", client="hospital"))
    with pytest.raises(DataError, match="two columns named 'age'"):
        scenario_of(pd.concat([table, table[["age"]]], axis=1), label="outcome", client="hospital")


@pytest.mark.parametrize("gap", [np.nan, None])
@pytest.mark.parametrize("words", [("ill", "well"), (0.0, 1.0)])
def test_a_gap_in_y_is_no_class(words: tuple[Any, Any], gap: Any) -> None:
    y = [gap if i == 4 else words[i % 2] for i in range(40)]
    x = pd.DataFrame({"x": np.arange(40.0)})
    scenario = scenario_of({"a": (x, pd.Series(y)), "b": (x, y)})
    assert len(scenario.classes) == 2
    assert any("rows without a label left out: 1" in note for note in scenario.notes)


def test_a_frame_with_rows_that_training_left_out_is_refused_by_row() -> None:
    found = scenario_of(frame(), label="outcome", client="hospital", gaps="drop-rows")
    assert len(encode(frame()[4:], found.encoding)) == 116
    with pytest.raises(DataError, match=r"drop-rows.*row 4;"):
        encode(frame(), found.encoding)


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ((0, 1), [0, 1]),
        ((2.5, 3.5), [2.5, 3.5]),
        ((True, False), [False, True]),
        (("0", "1"), ["0", "1"]),
    ],
)
def test_labels_come_back_as_they_were(labels: tuple[Any, Any], found: list[Any]) -> None:
    table = frame()
    table["outcome"] = pd.Series([labels[0] if word == "ill" else labels[1] for word in table["outcome"]])
    in_frames = ModelInfo.of(scenario_of(table, label="outcome", client="hospital", task="classification"))
    stored = ModelInfo.from_metadata(in_frames.as_metadata(), "a model")
    for about in (in_frames, stored):
        assert about.labels == found and [type(one) for one in about.labels] == [type(one) for one in found]
    if not isinstance(labels[0], float):  # classes in arrays are whole
        arrays = {name: (rows[["age"]].to_numpy(), rows["outcome"].to_numpy()) for name, rows in table.groupby("hospital")}
        assert ModelInfo.of(scenario_of(arrays)).labels == found
    lying = ModelInfo.from_metadata({**in_frames.as_metadata(), "labels": "int", "classes": '["a", "b"]'}, "a model")
    assert lying.labels == ["a", "b"]


def test_one_site_with_text_makes_labels_text_and_new_names_are_names() -> None:
    apart = {name: rows.drop(columns="hospital").assign(outcome=rows["age"] > 0) for name, rows in frame().groupby("hospital")}
    renamed = scenario_of(apart, label="outcome", label_map="True=ill,False=well")
    apart["a"] = apart["a"].assign(outcome=apart["a"]["outcome"].astype(str))
    assert ModelInfo.of(scenario_of(apart, label="outcome")).labels == ["False", "True"] and ModelInfo.of(renamed).labels == ["ill", "well"]


def test_numbers_of_numpy_and_one_name_are_taken_as_they_are_meant() -> None:
    clients = {name: (rows[["age", "dose"]].fillna(0).to_numpy(), rows["outcome"].to_numpy()) for name, rows in frame().groupby("hospital")}
    clients["north"] = clients.pop("c")
    result = emdcfl.fit(clients, rounds=np.int64(1), local_epochs=np.int32(1), lr=np.float32(0.5), seed=np.int64(3), hold_out="north")
    assert (result.config.run.seed, result.config.training.lr, result.clients) == (3, 0.5, ("a", "b"))


def test_sites_and_columns_may_be_numbers(tmp_path: Path) -> None:
    rows = pd.DataFrame(np.random.default_rng(0).normal(size=(90, 4)))
    rows[2], rows[3] = np.repeat([1, 2, 3], 30), (rows[0] > 0).astype(int)
    found = emdcfl.fit(rows, label=3, site=2, hold_out=3, **QUICK)  # type: ignore[arg-type]
    assert found.clients == ("1", "2") and found.predict(1, rows) == found.predict("1", rows)  # type: ignore[arg-type]
    assert [site["site"] for site in found.summary["unseen"]["sites"]] == ["3"]
    assert emdcfl.fit(rows, label=3, site=2, hold_out=np.int64(3), **QUICK).clients == found.clients  # type: ignore[arg-type]
    assert emdcfl.load(found.save(tmp_path / "run"), clients=rows).place(rows, name=4).site == "4"  # type: ignore[arg-type]
    with pytest.raises(DataError, match="30, with 30 different labels"):
        emdcfl.fit(rows.assign(who=[f"p{i}" for i in range(90)]), label="who", site="2", **QUICK)


def test_a_run_on_a_frame_predicts_places_and_comes_back(tmp_path: Path) -> None:
    table = frame()
    result = emdcfl.fit(table, label="outcome", site="hospital", **QUICK)
    new = table[table["hospital"] == "a"]
    assert set(result.predict("a", new)) <= {"ill", "well"} and len(result.predict_proba("a", new)) == len(new)
    assert list(result.distances.columns) == ["a", "b", "c"]
    x, y = np.zeros((20, 5)), np.arange(20) % 2  # as wide as the encoded rows, which are standardised
    for use in (lambda: result.predict("a", x), lambda: result.place_unlabelled(x), lambda: result.place((x, y))):
        with pytest.raises(DataError, match="expected a frame"):
            use()
    result.save(tmp_path / "run")
    for one in (result, emdcfl.load(tmp_path / "run")):
        with pytest.raises(StoreError, match="expected a new or empty folder") as refused:
            one.save(tmp_path / "run")
        assert "--" not in str(refused.value)  # Python has no flags
    again = emdcfl.load(tmp_path / "run", clients=table)
    assert again.predict("b", new) == result.predict("b", new)
    assert again.place(new, name="new").site == "new" and again.place_unlabelled(new, name="new").cluster in set(result.clusters.values())


@pytest.mark.parametrize(
    ("clients", "about", "said"),
    [
        (frame(), {"label": "outcome"}, "site="),
        (dict(list(frame().groupby("hospital"))), {"label": "outcome", "client": "hospital"}, "got a frame per site"),
        (frame(), {"label": "outcome", "client": "hospitl"}, "did you mean 'hospital'"),
        ({"a": frame(), "b": (np.zeros((20, 2)), np.zeros(20))}, {"label": "outcome"}, "expected a frame as at the other sites"),
        ([(np.zeros((20, 2)), np.zeros(20))] * 2, {"client": "hospital"}, "site= names a column"),
        ("rotated-digits", {"label": "y"}, "label= describes your own data"),
        ("rotated-digit", {}, "did you mean 'rotated-digits'"),
    ],
)
def test_what_does_not_fit_is_named(clients: Any, about: dict[str, str], said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_clients(clients, None, None, 0, about)


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 2), (3, 1), (3, 4)])
def test_a_network_of_other_shapes_is_refused_before_training(inputs: int, outputs: int) -> None:
    sites = {name: (np.random.default_rng(i).normal(size=(40, 3)), np.arange(40) % 2) for i, name in enumerate("ab")}
    with pytest.raises(ModelError, match=r"shape \(1, 3\) into outputs of shape \(1, 2\)"):
        emdcfl.fit(sites, lambda: torch.nn.Sequential(torch.nn.Linear(inputs, 4), torch.nn.Linear(4, outputs)), rounds=1)
    one = torch.nn.Linear(3, 2)
    with pytest.raises(ModelError, match="the same network twice"):
        emdcfl.fit(sites, lambda: one, rounds=1)
    with pytest.raises(ConfigError, match="method='fedavg'"):
        emdcfl.fit(sites, "fedavg")


@pytest.mark.parametrize(("last", "warned"), [(torch.nn.Softmax(1), True), (torch.nn.LogSoftmax(1), False), (torch.nn.Identity(), False)])
def test_a_network_that_answers_with_probabilities_is_doubted(
    last: torch.nn.Module, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sites = {name: (np.random.default_rng(i).normal(size=(40, 3)), np.arange(40) % 2) for i, name in enumerate("ab")}
    model = lambda: torch.nn.Sequential(torch.nn.Linear(3, 2), last)  # noqa: E731
    emdcfl.compare(sites, ["local", "fedprox"], model=model, seeds=1, rounds=1, local_epochs=1)
    assert caplog.text.count("leave its last Softmax out") == warned


def network(classes: int, width: int = 4) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.Linear(width, classes))


def test_a_network_by_its_import_path_is_given_what_it_takes() -> None:
    made = plan(Config(model=Choice(f"{__name__}:network", {"width": 5})), emdcfl.scenarios.build("rotated-digits"))
    assert dict(made.scenario.model.options) == {"classes": 10, "width": 5}


def passed_on(**options: Any) -> torch.nn.Module:
    return network(**options)


def test_a_network_that_hands_its_options_on_is_given_those_of_the_user_alone() -> None:
    """As torchvision's do, which know no ``channels``."""
    made = plan(Config(model=Choice(f"{__name__}:passed_on", {"classes": 10})), emdcfl.scenarios.build("rotated-digits"))
    assert dict(made.scenario.model.options) == {"classes": 10}


def sized(classes: int, channels: int, size: int, features: int, width: int = 4) -> torch.nn.Module:
    assert features == channels * size * size
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(features, width), torch.nn.Linear(width, classes))


def test_a_network_is_given_what_the_data_determine_whatever_the_scenarios_own_takes(tmp_path: Path) -> None:
    """As a function or by its import path, also where the scenario's network has other parameters."""
    other = replace(emdcfl.scenarios.build("rotated-digits"), model=ModelRecipe("resnet18", {"classes": 10}))
    wanted = {"classes": 10, "channels": 1, "size": 8, "features": 64}
    assert dict(plan(Config(model=Choice(f"{__name__}:sized")), other).scenario.model.options) == wanted
    for scenario in (other, "rotated-digits"):
        result = emdcfl.fit(scenario, sized, "fedavg", rounds=1, local_epochs=1, out=tmp_path / str(scenario == other))
        assert dict(result.config.model.options) == wanted
    assert torch.equal(emdcfl.load(result.folder, trust_model=True).serving.models, result.serving.models)
    assert dict(plan(result.config, emdcfl.scenarios.build("rotated-digits")).scenario.model.options) == wanted
    narrow = emdcfl.fit("rotated-digits", sized, "local", rounds=1, local_epochs=1, settings={"model.width": 2})
    assert dict(narrow.config.model.options) == {**wanted, "width": 2}


def halved(classes: int, size: int = 4) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(size), torch.nn.Flatten(), torch.nn.Linear(size * size, classes))


def test_a_network_found_again_keeps_its_defaults(tmp_path: Path) -> None:
    """Else new sites would be placed by a network of another size than was trained."""
    emdcfl.fit("rotated-digits", halved, "oracle", rounds=1, local_epochs=1, out=tmp_path)
    train = emdcfl.scenarios.build("rotated-digits").sites[0].train
    assert emdcfl.load(tmp_path, trust_model=True).place((train.x.numpy(), train.y.numpy()), name="new").site == "new"


class Hub:
    """What is used of a Hugging Face data set of images, without the library."""

    def __init__(self, labels: list[int], **columns: list[str]) -> None:
        self.features = {"image": type("Image", (), {})(), "label": type("ClassLabel", (), {"names": ["cat", "dog"]})(), **columns}
        self.columns = {"image": [np.full((8, 8), i, np.uint8) for i in range(len(labels))], "label": np.array(labels), **columns}
        self.column_names = list(self.columns)

    def with_format(self, form: str | None) -> Any:
        return self.columns

    def __getitem__(self, column: str) -> Any:
        return self.columns[column]

    def remove_columns(self, names: list[str]) -> Any:
        return self

    def select(self, rows: list[int]) -> Any:
        return Hub(self.columns["label"][rows].tolist())


class Federated:
    """What is used of a data set of ``flwr_datasets``."""

    def __init__(self) -> None:
        self.partitioners = {split: type("Partitioner", (), {"num_partitions": 2})() for split in ("train", "test")}

    def load_partition(self, partition: int, split: str) -> Hub:
        return Hub([0, 1] * (10 + partition))


def test_data_sets_of_images_are_divided_by_a_column_or_by_their_partitions() -> None:
    def sizes(clients: Any, **about: Any) -> dict[str, list[int]]:
        return {site.name: [len(site.train) + len(site.val), len(site.tests["test"])] for site in scenario_of(clients, **about).sites}

    whole = Hub([0, 1] * 30, who=["a"] * 20 + ["b"] * 40)
    assert sizes(whole, client="who") == {"a": [16, 4], "b": [32, 8]}
    assert sizes({"train": whole, "test": whole}, client="who") == {"a": [20, 20], "b": [40, 40]}
    assert sizes(Federated()) == {"partition-0": [20, 20], "partition-1": [22, 22]}
    for clients, about, said in (
        (whole, "where", "no site column 'where'; it has image, label, who"),
        (Hub([0, 1] * 30, who=["a"] * 20 + [None] * 40), "who", "a site for every row, got gaps in 'who'"),
        (Federated(), "who", "are its sites"),
    ):
        with pytest.raises(DataError, match=said):
            scenario_of(clients, client=about)


def test_images_of_a_hub_without_a_label_are_not_of_the_last_class() -> None:
    _, y = hub_entry(Hub([0, 1] * 10), None)
    assert y.tolist() == ["cat", "dog"] * 10
    with pytest.raises(DataError, match="expected a label for every sample, got gaps"):
        scenario_of({"a": Hub([0, 1] * 10), "b": {"train": Hub([0, 1] * 10), "test": Hub([-1] * 10)}})


def test_hugging_face_data_sets() -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    table = frame().dropna()
    whole = datasets.Dataset.from_pandas(table, preserve_index=False).class_encode_column("outcome")
    assert same(scenario_of(table, label="outcome", client="hospital"), scenario_of(whole, label="outcome", client="hospital"))
    shuffled = whole.shuffle(seed=0)  # rows are taken through its indices
    half = len(whole) // 2
    splits = datasets.DatasetDict(train=shuffled.select(range(half)), test=shuffled.select(range(half, len(whole))))
    found = scenario_of(splits, label="outcome", client="hospital")
    assert sum(len(s.tests["test"]) for s in found.sites) == len(whole) - half and found.classes == ("ill", "well")
    images = datasets.Dataset.from_dict(
        {"image": [np.full((8, 8), i, np.uint8) for i in range(40)], "label": [i % 2 for i in range(40)], "who": ["a", "b"] * 20}
    ).cast_column("image", datasets.Array2D((8, 8), "uint8"))
    drawn = scenario_of(images, client="who")
    assert drawn.sites[0].train.x.shape[1:] == (1, 8, 8) and [s.name for s in drawn.sites] == ["a", "b"]


def test_flower_data_sets(tmp_path: Path) -> None:
    flwr_datasets = pytest.importorskip("flwr_datasets", reason="the package flwr-datasets is not installed")
    frame(n=60).drop(columns="hospital").dropna().to_csv(tmp_path / "all.csv", index=False)
    partitioner = flwr_datasets.partitioner.IidPartitioner(num_partitions=3)
    federated = flwr_datasets.FederatedDataset(
        dataset="csv", partitioners={"train": partitioner}, data_files=str(tmp_path / "all.csv"), cache_dir=str(tmp_path / "cache")
    )
    result = emdcfl.fit(federated, label="outcome", method="fedavg", **QUICK)
    assert result.clients == ("partition-0", "partition-1", "partition-2")


def test_inputs_are_read_as_fit_reads_them() -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    result = emdcfl.fit({"a": (images, np.arange(40) % 2), "b": (images, np.arange(40) % 2)}, **QUICK)
    assert torch.equal(result.inputs(images), torch.from_numpy(images.transpose(0, 3, 1, 2)))
    assert torch.equal(result.inputs(images[:, ::-1]), torch.from_numpy(images.transpose(0, 3, 1, 2)).flip(2))
    assert result.predict("a", images[:0]) == []
    with pytest.raises(DataError, match="missing or infinite values, first in row 1"):
        result.predict("a", np.stack([images[0], np.full_like(images[0], np.nan, dtype=np.float32)]))


def test_true_groups_of_what_is_not_in_memory_are_refused(tmp_path: Path) -> None:
    for name, rows in frame(("a", "b")).groupby("hospital"):
        rows.drop(columns="hospital").rename(columns={"outcome": "label"}).to_csv(tmp_path / f"{name}.csv", index=False)
    for clients in (tmp_path, "rotated-digits", scenario_of(frame(), label="outcome", client="hospital")):
        with pytest.raises(ConfigError, match="groups="):
            emdcfl.fit(clients, groups={"a": "x", "b": "y", "c": "y"}, **QUICK)
