"""A node at home: its secret, its config, its data and what it keeps between messages that are each a new process."""

from __future__ import annotations

import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from flwr.app import Context, Message, RecordDict
from safetensors import SafetensorError
from tests.e2e.shell import called
from tests.engines.flower.loopback import LoopbackGrid

from emdcfl.apps import server
from emdcfl.apps.options import Options
from emdcfl.core.errors import ClientError, ConfigError, DataError
from emdcfl.core.tasks import Training
from emdcfl.data import scenarios
from emdcfl.data.own import load_folder
from emdcfl.data.own.cleaning import AS_THEY_ARE, Cleaning
from emdcfl.data.own.splitting import RANDOM
from emdcfl.engines.flower.messages import MessageSettings
from emdcfl.engines.flower.node.data import read_site, read_table, training_rows
from emdcfl.engines.flower.node.home import HomeNode, read_config
from emdcfl.engines.flower.node.policy import TASKS, Policy, PolicyError
from emdcfl.engines.flower.node.serve import make_app
from emdcfl.engines.flower.node.survey import MEASURE, answer_survey
from emdcfl.engines.flower.session import Session, connect, session
from emdcfl.engines.local.sequential import SequentialFederation
from emdcfl.privacy.exchange import public_key
from emdcfl.privacy.keylist import KeyList
from emdcfl.report.load_run import read_run
from emdcfl.runs.config import Config, dump, override
from emdcfl.runs.verdict.advice import advice

QUICK = MessageSettings(deadline=30, poll=0.01, wait=0.0)


def home(folder: Path, **values: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in values.items()]
    (folder / "node.toml").write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_a_new_node_draws_a_secret_and_keeps_it(tmp_path: Path) -> None:
    first, second = (HomeNode("a", home(tmp_path)) for _ in range(2))
    assert public_key(first.secret) == public_key(second.secret)
    assert stat.S_IMODE((tmp_path / "secret.key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dta = 'x'", "did you mean 'data'"),
        ("label_map = '0'", "OLD=NEW"),
        ("details = 'yes'", "must be bool"),
        ("[policy]\ntasks = 'embed'", "must be a list of str"),
        ("[policy]\ntask = ['embed']", "did you mean 'tasks'"),
        ("policy = 'open'", "must be a table"),
        ("privacy_epsilon = true", "must be float"),
        ("privacy_epsilon = -4", "must be above 0"),
        ("data = ", "cannot read"),
        ("trust = 'blind'", "trust must be 'relay' or 'first-use' or 'pinned'"),
    ],
)
def test_a_mistake_in_node_toml_is_told(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "node.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=expected):
        HomeNode("a", tmp_path)


def test_without_node_toml_the_defaults_protect(tmp_path: Path) -> None:
    config = read_config(tmp_path / "node.toml")
    assert not {"embed", "deposit", "data_subspace"} & set(config.policy.tasks)
    assert not config.details


JOB = {"run": "r", "seed": 0, "precision": "fp32", "threads": 1}


def digits_job() -> dict[str, Any]:
    scenario = scenarios.build("rotated-digits", groups=2)
    data = {"scenario": "rotated-digits", "options": {"groups": 2}}
    return {**JOB, "model": scenario.model.as_dict(), "preprocess": scenario.preprocess.as_dict(), "data": data}


def test_a_share_of_a_scenario_is_read_once_and_then_kept(tmp_path: Path) -> None:
    node = HomeNode("rot90-1", home(tmp_path))
    first = node.client(digits_job())
    (kept,) = (tmp_path / "state" / "site").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    second = node.client(digits_job())
    for split in ("train", "val", "test:test"):
        assert torch.equal(first.split(split).x, second.split(split).x)
        assert torch.equal(first.split(split).y, second.split(split).y)
    kept.write_bytes(b"damaged")
    assert torch.equal(node.client(digits_job()).split("train").x, first.split("train").x)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_by_half_behind(tmp_path: Path) -> None:
    """Neither a part of the samples, which nobody would delete, nor a label column without a name, to which the node would be held."""
    node = HomeNode("rot90-1", home(tmp_path))
    with full_disk(), pytest.raises((OSError, SafetensorError)):
        node.client(digits_job())
    assert list((tmp_path / "state" / "site").iterdir()) == []
    for column, disk in (("wrong", full_disk()), ("outcome", nullcontext())):
        (tmp_path / "a.csv").write_text(f"age,{column}\n" + "".join(f"{i},{i % 2}\n" for i in range(40)))
        raw, _ = read_table("a", tmp_path / "a.csv", column, RANDOM, AS_THEY_ARE)
        with disk, pytest.raises(OSError) if column == "wrong" else nullcontext():
            training_rows(raw, 0, tmp_path / "state", None, Policy())


def test_the_least_noise_of_node_toml_reaches_the_client(tmp_path: Path) -> None:
    assert HomeNode("rot90-1", home(tmp_path / "some", privacy_epsilon=4)).client(digits_job()).most_epsilon == 4
    assert HomeNode("rot90-1", home(tmp_path / "none")).client(digits_job()).most_epsilon is None


def test_a_client_that_the_scenario_does_not_have_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no client 'rot90-7'"):
        HomeNode("rot90-7", home(tmp_path)).client(digits_job())


def test_a_node_with_files_does_not_serve_a_scenario(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="--scenario nodes"):
        HomeNode("a", home(tmp_path, data="here")).client(digits_job())


class HomeGrid(LoopbackGrid):
    """Nodes with homes: every message opens its node anew, as a new process would."""

    def __init__(self, homes: dict[int, tuple[str, Path]]) -> None:
        super().__init__({})
        self.online = set(homes)
        for node, (name, folder) in homes.items():
            self._apps[node] = make_app(lambda context, name=name, folder=folder: HomeNode(name, folder), survey=answer_survey)


def images(folder: Path, shift: int) -> None:
    rng = np.random.default_rng(shift)
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for i in range(20):
            pixels = rng.integers(0, 120, (12, 12)) + (100 if label == "dog" else 0) + shift
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / label / f"{i}.png")


def table(path: Path, shift: float) -> None:
    rng = np.random.default_rng(int(shift * 10))
    rows = ["age,ward,label"]
    for i in range(60):
        label = i % 2
        rows.append(f"{'' if i == 7 else f'{40 + 5 * label + shift + rng.normal():.3f} y'},{'north' if i % 3 else 'south'},{label}")
    path.write_text("\n".join(rows), encoding="utf-8")


def own(tmp_path: Path, kind: str) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    for i, name in enumerate(("a", "b", "c")):
        images(data / name, 10 * i) if kind == "images" else table(data / f"{name}.csv", float(i))
    return data


@pytest.mark.parametrize("kind", ["images", "tables"])
def test_nodes_with_their_own_files_agree_with_one_folder_read_in_one_place(tmp_path: Path, kind: str) -> None:
    data = own(tmp_path, kind)
    places = {name: data / name if kind == "images" else data / f"{name}.csv" for name in ("a", "b", "c")}
    grid = HomeGrid({i: (name, home(tmp_path / f"home-{name}", data=str(path))) for i, (name, path) in enumerate(places.items(), start=1)})
    whole = load_folder(data)
    with session(Session(grid, QUICK, KeyList())):
        surveyed = scenarios.build("nodes", clients=["a", "b", "c"])
        assert surveyed.classes == whole.classes
        assert surveyed.encoding == whole.encoding and surveyed.label_kind == whole.label_kind == ("text" if kind == "images" else "int")
        assert kind == "images" or surveyed.encoding["columns"][0]["unit"] == "y"
        assert surveyed.model == whole.model
        assert surveyed.preprocess == whole.preprocess
        training = Training(local_epochs=1, batch_size=8, lr=0.01)
        options = {"threads": 1, "precision": "fp32", "run": "r", "training": training, "seed": 0}
        flower = connect(surveyed, ("nodes", {}), **options)
        local = SequentialFederation(whole, device="cpu", **options)
        results = []
        for fed in (flower, local):
            fed.begin(1)
            results.append(fed.train(dict.fromkeys(fed.clients, fed.initial())).stack("theta"))
    assert torch.allclose(results[0], results[1], atol=1e-6)


def test_labels_and_columns_of_nodes_that_do_not_fit_are_told_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = own(tmp_path, "tables")
    text = (data / "b.csv").read_text().splitlines()
    (data / "b.csv").write_text(
        "\n".join([f"extra,no more,{text[0]}", *(f"{i},{i},{line[:-1]}{'ny'[int(line[-1])]}" for i, line in enumerate(text[1:]))])
    )
    grid = HomeGrid({i: (name, home(tmp_path / f"home-{name}", data=str(data / f"{name}.csv"))) for i, name in enumerate("abc", start=1)})
    with session(Session(grid, QUICK, KeyList())):
        with pytest.raises(DataError, match=r"'extra' only at b; 'no more' only at b: .*--set 'scenario\.drop=extra,no more'$"):
            scenarios.build("nodes", clients=["a", "b", "c"])
        with pytest.raises(DataError, match="did you mean 'extra'"):
            scenarios.build("nodes", clients=["a", "b", "c"], drop="extras")
        surveyed = scenarios.build("nodes", clients=["a", "b", "c"], drop=["extra", "no more"])
    assert [column["name"] for column in surveyed.encoding["columns"]] == ["age", "ward"]
    (told,) = [note for note in surveyed.notes if "numbers at a, c (0, 1) and words at b (n, y)" in note and "node" in note]
    assert told in caplog.messages, "before training, which may take long"


def test_a_node_that_is_enrolled_and_no_client_of_the_run_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The config of a federation lists the sites it began with; one enrolled later would be left out in silence."""
    data = own(tmp_path, "tables")
    grid = HomeGrid({i: (name, home(tmp_path / f"home-{name}", data=str(data / f"{name}.csv"))) for i, name in enumerate("abc", start=1)})
    for clients, told in ((["a", "b"], 1), (["a", "b", "c"], 0)):
        caplog.clear()
        with session(Session(grid, QUICK, KeyList())):
            scenarios.build("nodes", clients=clients)
        assert sum("not a client of this run: c;" in message for message in caplog.messages) == told


def test_a_node_repairs_its_own_files_and_its_owner_reads_the_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain, messy = own(tmp_path, "tables"), tmp_path / "messy"
    messy.mkdir()
    for name in "abc":
        head, *lines = (plain / f"{name}.csv").read_text().splitlines()
        dated = [f"{i % 28 + 1}.3.2024,{line}" if name == "b" else f"2024-03-{i % 28 + 1:02d},{line}" for i, line in enumerate(lines)]
        (plain / f"{name}.csv").write_text(
            "\n".join([f"seen,{head}", *(f"2024-03-{i % 28 + 1:02d},{line}" for i, line in enumerate(lines))])
        )
        if name == "b":
            dated = [f"{i},{line[:-1]}{'ny'[int(line[-1])]}".replace(",,", ",-999,") for i, line in enumerate(dated)]
        (messy / f"{name}.csv").write_text("\n".join([f"{',' if name == 'b' else ''}seen,{head}", *dated]))
    places = {name: home(tmp_path / f"home-{name}", data=str(messy / f"{name}.csv")) for name in "abc"}
    home(places["b"], name="b-town", data=str(messy / "b.csv"), label="label", label_map="n=0,y=1", date=["seen"], missing=["-999"])
    whole = load_folder(plain)
    with session(Session(HomeGrid({i: (name, place) for i, (name, place) in enumerate(places.items(), start=1)}), QUICK, KeyList())):
        surveyed = scenarios.build("nodes", clients=["a", "b", "c"])
        assert surveyed.encoding == whole.encoding and surveyed.classes == ("0", "1") and not surveyed.notes
        job = {"encoding": surveyed.encoding, "classes": list(surveyed.classes), "seed": 0}
        config = read_config(places["b"] / "node.toml")
        site = read_site("b", tmp_path, config, job)
    assert torch.equal(site.train.x, whole.sites[1].train.x) and torch.equal(site.train.y, whole.sites[1].train.y)
    ended = called(capfd, "node", "data", places["b"], "--html", tmp_path / "b.html")
    assert ended.code == 0 and "'n' at b-town" in ended.out and "Unnamed: 0" in ended.out
    assert "home-b" not in ended.out.split("options such as")[0]
    assert 'drop = ["COLUMN"]' in ended.out  # an owner has no command line to add options to
    assert (tmp_path / "b.html").is_file()


def test_columns_and_rows_that_an_owner_leaves_out_are_left_out_as_in_one_place(tmp_path: Path) -> None:
    data = own(tmp_path, "tables")
    for name in "abc":
        head, *lines = (data / f"{name}.csv").read_text().splitlines()
        numbered = [f"{1000 + i},{'' if i % 9 == 3 else 2 * i % 7},{line}" for i, line in enumerate(lines)]
        (data / f"{name}.csv").write_text("\n".join([f"patient_id,dose,{head}", *numbered]), encoding="utf-8")
    chosen: dict[str, dict[str, Any]] = {
        "a": {"drop": ["patient_id"]},
        "b": {"drop": ["patient_id"]},
        "c": {"only": ["dose", "age", "ward"]},
    }
    places = {c: home(tmp_path / f"home-{c}", data=str(data / f"{c}.csv"), gaps="drop-rows", **keys) for c, keys in chosen.items()}
    whole = load_folder(data, cleaning=Cleaning.of(drop="patient_id", gaps="drop-rows"))
    with session(Session(HomeGrid({i: (name, place) for i, (name, place) in enumerate(places.items(), start=1)}), QUICK, KeyList())):
        surveyed = scenarios.build("nodes", clients=["a", "b", "c"])
    assert surveyed.encoding["columns"] == whole.encoding["columns"] and not any(c.get("gaps") for c in surveyed.encoding["columns"])
    job = {"encoding": surveyed.encoding, "classes": list(surveyed.classes), "seed": 0}
    for i, name in enumerate("abc"):
        site = HomeNode(name, places[name])._site({"data": job})
        assert len(site.train) and torch.equal(site.train.x, whole.sites[i].train.x) and torch.equal(site.val.y, whole.sites[i].val.y)
    asked = {"question": MEASURE, "seed": 0, "label": None, "numeric": ["age", "patient_id"], "categorical": []}
    with pytest.raises(PolicyError, match="'patient_id', or its owner leaves it out"):
        answer_survey(HomeNode("a", places["a"]), asked)


@pytest.mark.parametrize("size", [0, 2, 50_000])
def test_a_size_that_one_folder_refuses_is_refused_at_nodes(tmp_path: Path, size: int) -> None:
    data = own(tmp_path, "images")
    homes = {i: (name, home(tmp_path / f"home-{name}", data=str(data / name))) for i, name in enumerate("abc", start=1)}
    with pytest.raises(DataError, match=f"scenario.size = {size}"):
        load_folder(data, size=size)
    with session(Session(HomeGrid(homes), QUICK, KeyList())), pytest.raises(DataError, match=f"scenario.size = {size}"):
        scenarios.build("nodes", clients=["a", "b", "c"], size=size)


def test_images_are_measured_over_the_samples_that_are_trained_on(tmp_path: Path) -> None:
    """Samples are divided class by class, so that a repair of labels changes which ones are in the train split."""
    rng = np.random.default_rng(0)
    for folder, count in (("Cat", 7), ("cat", 6), ("dog", 9)):
        (tmp_path / "images" / folder).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / "images" / folder / f"{folder}{i}.png")
    node = HomeNode("a", home(tmp_path / "home", data=str(tmp_path / "images"), merge_labels=True))
    measured = answer_survey(node, {"question": MEASURE, "seed": 0, "shape": [1, 8, 8]})["reply"]
    site = node._site({"data": {"encoding": {"kind": "images", "shape": [1, 8, 8]}, "classes": ["cat", "dog"], "seed": 0}})
    assert measured["count"] == site.train.x[:, 0].numel()
    assert torch.equal(measured["sums"], site.train.x.double().sum((0, 2, 3)))


def test_a_resumed_run_keeps_its_survey_whoever_is_there(tmp_path: Path) -> None:
    data = own(tmp_path, "tables")
    late = "\n".join(line.replace("north", "west").replace("4", "9", 1) for line in (data / "c.csv").read_text().splitlines())
    (data / "c.csv").write_text(late, encoding="utf-8")  # another ward, other ages
    homes = {i: (name, home(tmp_path / f"home-{name}", data=str(data / f"{name}.csv"))) for i, name in enumerate("abc", start=1)}
    state = tmp_path / "run" / "state"
    state.mkdir(parents=True)
    with session(Session(HomeGrid({i: homes[i] for i in (1, 2)}), QUICK, KeyList(), state)) as first:
        before = scenarios.build("nodes", clients=["a", "b", "c"])
        first.keep_survey()
    with session(Session(HomeGrid(homes), QUICK, KeyList(), state)):
        again = scenarios.build("nodes", clients=["a", "b", "c"])
        assert (again.encoding, again.classes, again.model, again.notes) == (before.encoding, before.classes, before.model, before.notes)
        training = Training(local_epochs=1, batch_size=8, lr=0.01)
        fed = connect(again, ("nodes", {}), threads=1, precision="fp32", run="r", training=training, seed=0)
        fed.begin(1)
        trained = fed.train(dict.fromkeys(fed.clients, fed.initial()))
    assert sorted(trained.valid) == ["a", "b", "c"], "the late one takes part, its unknown ward encoded as none"
    told = (state / "survey.json").read_text()
    (state / "survey.json").write_text(told.replace('"mean": ', '"mean": 1', 1))
    with pytest.raises(DataError, match="checksum does not fit"):
        Session(HomeGrid(homes), QUICK, KeyList(), state)


def test_a_node_that_cannot_write_its_log_releases_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = own(tmp_path, "tables")
    homes = {i: (name, home(tmp_path / f"home-{name}", data=str(data / f"{name}.csv"))) for i, name in enumerate("abc", start=1)}
    (tmp_path / "home-b" / "state").write_text("no folder")  # as on a full disk, no file can be made
    with session(Session(HomeGrid(homes), QUICK, KeyList())):
        surveyed = scenarios.build("nodes", clients=["a", "b", "c"])
    assert "not surveyed, because they did not answer: b" in surveyed.notes
    assert "client 'b' did not answer the survey: its node cannot read or write its files" in caplog.text


def test_a_name_in_any_script_is_written_so_that_it_can_be_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("x,label\n1,a\n", encoding="utf-8")
    assert called(capfd, "node", "init", tmp_path / "home", "--data", tmp_path / "a.csv", "--name", "\U00020bb7").code == 0
    assert read_config(tmp_path / "home" / "node.toml").name == "\U00020bb7"


def test_an_answer_to_the_survey_that_is_lost_is_asked_for_again(tmp_path: Path) -> None:
    data = own(tmp_path, "tables")
    grid = HomeGrid({i: (name, home(tmp_path / f"home-{name}", data=str(data / f"{name}.csv"))) for i, name in enumerate("abc", start=1)})
    asked: list[str] = []

    def lose_the_first(message: Message, answer: Callable[[Message], Message]) -> Message | None:
        asked.append(message.metadata.message_type)
        reply = answer(message)
        return None if asked.count("query.survey") == 1 and asked[-1] == "query.survey" else reply  # that of measure

    grid.tamper[2] = lose_the_first
    with session(Session(grid, replace(QUICK, patience=0.05), KeyList())):
        assert [site.name for site in scenarios.build("nodes", clients=["a", "b", "c"]).sites] == ["a", "b", "c"]
    assert "query.ping" in asked  # several, where the machine is busy
    assert [kind for kind in asked if kind != "query.ping"] == ["query.hello", "query.survey", "query.survey"], "describe comes with hello"


def test_nodes_of_different_kinds_and_a_missing_folder_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images(tmp_path / "i", 0)
    table(tmp_path / "t.csv", 0.0)
    homes = {1: ("i", home(tmp_path / "h1", data=str(tmp_path / "i"))), 2: ("t", home(tmp_path / "h2", data=str(tmp_path / "t.csv")))}
    with session(Session(HomeGrid(homes), QUICK, KeyList())), pytest.raises(DataError, match="images: i; table: t"):
        scenarios.build("nodes")
    homes[2] = ("t", home(tmp_path / "h2", data="nowhere"))
    with session(Session(HomeGrid(homes), QUICK, KeyList())), pytest.raises(DataError, match="at least two nodes"):
        scenarios.build("nodes")
    assert "no such file or folder" in caplog.text


@pytest.mark.parametrize(
    "address", ["fl.example.org", "https://fl.example.org:8000", "fl.example.org:", "fl.example.org:8000/x", "fl.example.org:80000"]
)
def test_an_address_that_flower_cannot_use_is_told_before_anything_is_made(
    tmp_path: Path, address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "a.csv", 0.0)
    ended = called(capfd, "node", "init", tmp_path / "home", "--data", tmp_path / "a.csv", "--name", "a", "--superlink", address)
    assert ended.code == 2 and not (tmp_path / "home").exists()


def test_outside_a_federation_the_engine_says_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="emdcfl run --engine flower --federation"):
        connect(scenarios.build("rotated-digits"), ("rotated-digits", {}), run="r", threads=1, precision="fp32", seed=0)


def test_a_federated_run_vetoes_one_model_for_sites_that_do_not_agree_on_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MessageSettings", partial(MessageSettings, poll=0.01))
    rng = np.random.default_rng(0)
    grid = {}
    for i, name in enumerate("abcd", start=1):
        swapped, age = name in "cd", rng.normal(50, 10, (150, 2))
        label = np.where((age.sum(1) > 100) != swapped, "ill", "well")
        rows = [f"{a:.2f},{b:.2f},{word}" for (a, b), word in zip(age + (8 if name == "d" else 0), label, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,dose,label", *rows]), encoding="utf-8")
        grid[i] = name, home(tmp_path / f"home-{name}", data=str(tmp_path / f"{name}.csv"), trust="relay")
        with (tmp_path / f"home-{name}" / "node.toml").open("a", encoding="utf-8") as file:
            file.write("\n[policy]\n" + f"tasks = {[*TASKS, *([] if name == 'b' else ['profile'])]}\n")
    chosen = override(Config(), {"scenario": "nodes", "scenario.clients": list("abcd"), "run.rounds": 1, "run.what_differs": True})
    chosen = override(chosen, {"method.grouping": "neighbourhoods", "method.tolerance": 2.0, "personalize.mode": "off"})
    options = Options(config=dump(chosen), out=str(tmp_path / "run"), baselines=True, wait=0.0, job=str(tmp_path / "job"))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=options.as_dict())
    server.main(HomeGrid(grid), context)
    done = read_run(tmp_path / "run")
    others = {name: baseline.summary for name, baseline in done.baselines.items()}
    assert done.summary["clusters"] == [0, 0, 0, 0] and set(others) == {"fedavg", "fedavg+ft", "local"}
    found = advice(done.summary, others)
    assert found is not None and found.choice == "local" and "do not agree on labels" in found.headline
    assert not (tmp_path / "run/baselines/local/models").exists(), "a model of one site alone is not kept unasked"
    (differs,) = done.summary["what_differs"]
    assert differs["who"] == "d" and {one["feature"] for one in differs["found"]} == {"column 'age'", "column 'dose'"}
    assert [f["client"] for f in done.summary["failures"]] == ["b"] and "profile" in done.summary["failures"][0]["reason"]
