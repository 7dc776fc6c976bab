"""The model card says what the report says, names cannot break out of it, and exported models predict the same without emdcfl."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import zipfile
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from tests import tiny
from tests.data.own.test_tables import rows, write
from tests.e2e.shell import called
from tests.report.fabricate import make_run

import emdcfl
from emdcfl.core.errors import DataError
from emdcfl.data.own import load_folder, read_inputs
from emdcfl.data.own.cleaning import Cleaning
from emdcfl.report import write_report
from emdcfl.report.card import card
from emdcfl.report.load_run import read_run
from emdcfl.report.page import run_context
from emdcfl.runs.runner import run

ALONE = """
import sys
sys.modules["emdcfl"] = None  # any import of it fails
import numpy as np, torch
model = torch.export.load(sys.argv[1]).module()
np.save(sys.argv[3], model(torch.from_numpy(np.load(sys.argv[2]))).detach().numpy())
"""


def front_matter(card: Path) -> tuple[dict[str, Any], str]:
    found = re.match(r"---\n(.*?)\n---\n(.*)", card.read_text(encoding="utf-8"), flags=re.S)
    return yaml.safe_load(found[1]), found[2]


def test_the_card_has_the_words_and_numbers_of_the_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    write_report(folder)
    about, text = front_matter(folder / "README.md")
    context, summary = run_context(read_run(folder)), json.loads((folder / "summary.json").read_text())
    assert about["model-index"][0]["results"][0]["metrics"][0]["value"] == summary["accuracy"]["mean"]
    assert context["headline"] in text
    for _, sentence in context["sentences"]:
        assert sentence in text.replace("\\", "")
    for cluster in context["clusters"]:
        assert f"| {', '.join(cluster['members'])} | {cluster['mean']:.1%} | {cluster['worst']:.1%} |" in text


def test_a_card_names_no_folders_above_the_data(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    context = run_context(read_run(folder))
    context["config"]["scenario"] = {"name": "folder", "path": str(Path("/srv/anna/study"))}
    context["notes"] = [f"{Path('/srv/anna/study')}: sites that take no part: b", f"client 'c' ({Path('/srv/anna/study/c.csv')}): empty"]
    text = card(folder, context)
    assert "anna" not in text and "study: sites that take no part" in text and "study/c.csv" in text


def test_names_stay_text(tmp_path: Path) -> None:
    names = ["a | b", "<script>x</script>", "[x](http://y)", "line\nbreak", 'quo"te: {', "`code`"]
    folder = make_run(tmp_path / "run", clients=6, groups=2, names=names, scenario='x"\n---\nlicense: mit')
    write_report(folder)
    about, text = front_matter(folder / "README.md")
    assert "license" not in about
    plain = re.sub(r"\\.", "", text)  # what is escaped is text
    assert not re.search(r"<script|\]\(http|^break|`code`", plain, flags=re.M)
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 6 for line in text.splitlines() if re.match(r"\| \d", line))


def alone(folder: Path, x: np.ndarray[Any, Any], place: Path) -> np.ndarray[Any, Any]:
    """Return what the model of a folder predicts in a process that has no emdcfl."""
    np.save(place / "x.npy", x)
    command = [sys.executable, "-c", ALONE, folder / "model.pt2", place / "x.npy", place / "p.npy"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return np.load(place / "p.npy")


@pytest.mark.slow
def test_an_exported_group_predicts_the_same_without_emdcfl(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = run(tiny.config(rounds=1), tmp_path / "run")
    done = called(capfd, "export", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    folders = {json.loads((Path(f) / "config.json").read_text())["clients"][0]: Path(f) for f in json.loads(done.out)}
    assert len(folders) == len(set(result.clusters.values()))
    client, folder = next(iter(folders.items()))
    x = result.scenario.sites[result.clients.index(client)].tests["test"].x.numpy()
    assert np.allclose(alone(folder, x, tmp_path), result.predict_proba(client, x), atol=1e-6)
    assert {name: v.shape for name, v in load_file(folder / "model.safetensors").items()} == {
        name: v.shape for name, v in result.models[client].state_dict().items()
    }
    inside = zipfile.ZipFile(folder / "model.pt2")
    assert not [entry for entry in inside.namelist() if b"cdtorch" in inside.read(entry) or inside.read(entry)[:1] == b"\x80"]
    about, _ = front_matter(folder / "README.md")
    scores = [result.accuracy.clients[c] for c, k in result.clusters.items() if k == result.clusters[client]]
    assert about["model-index"][0]["results"][0]["metrics"][0]["value"] == pytest.approx(np.mean(scores))
    again = called(capfd, "export", tmp_path / "run")
    assert again.code == 2 and "--out" in again.err


@pytest.mark.slow
def test_the_script_of_an_export_reads_tables_as_emdcfl_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for i in range(2):
        table = rows(seed=i)
        table[0]["age"], table[1]["ward"] = "n/a", ""
        write(tmp_path / "sites" / f"site{i}.csv", table)
    emdcfl.fit(tmp_path / "sites", rounds=1, local_epochs=1, out=tmp_path / "run")
    asked = tmp_path / "sites" / "site1.csv"
    ours = json.loads(called(capfd, "predict", tmp_path / "run", asked, "--client", "site1", "--plain", "--json").out)
    out = tmp_path / os.fsdecode(b"out\xff")  # no UTF-8: torch cannot open a path like that
    folders = json.loads(called(capfd, "export", tmp_path / "run", "--out", out, "--json").out)
    folder = next(Path(f) for f in folders if "site1" in json.loads((Path(f) / "config.json").read_text())["clients"])
    script = f"runpy.run_path({str(folder / 'predict.py')!r}, run_name='__main__')"
    missing, empty = str(tmp_path / "none.csv"), tmp_path / "empty.csv"
    empty.write_text(asked.read_text(encoding="utf-8").splitlines()[0], encoding="utf-8")
    arguments = ["predict.py", missing, str(empty), str(asked)]
    code = f"import sys, runpy; sys.modules['emdcfl'] = None; sys.argv = {arguments!r}; {script}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1 and done.stderr.startswith(f"no such file: {missing}\n{empty} must hold at least one sample"), done.stderr
    theirs = [line.split("\t") for line in done.stdout.splitlines()]
    assert [row[0] for row in theirs] == [f"{asked}:{i + 1}" for i in range(len(ours))]
    assert [row[1:] for row in theirs] == [[str(row["class"]), f"{max(row['probabilities'].values()):.1%}"] for row in ours]


@pytest.mark.slow
def test_the_script_names_images_by_file_and_stops_with_what_reads_it(tmp_path: Path) -> None:
    class Mean(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            light = x.float().mean((1, 2, 3)) / 255
            return torch.stack([light, 1 - light], 1)

    sample = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    program = torch.export.export(Mean(), (sample,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
    torch.export.save(program, tmp_path / "model.pt2")
    config = {"classes": ["light", "dark"], "encoding": {"kind": "images", "shape": [1, 8, 8]}, "input": {"shape": [1, 8, 8]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = resources("emdcfl.report") / "templates" / "predict.py"
    (tmp_path / "predict.py").write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.png")
    command = [sys.executable, str(tmp_path / "predict.py"), "a.png", "none.png", "a.png"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1 and done.stdout == "a.png\tdark\t100.0%\n" * 2 and done.stderr == "no such file: none.png\n"
    reader, writer = os.pipe()
    os.close(reader)
    stopped = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=300)
    os.close(writer)
    assert stopped.returncode == 141 and stopped.stderr == b""


def test_the_script_of_an_export_knows_marks_of_missing_values_and_turned_photos(tmp_path: Path) -> None:
    script = runpy.run_path(str(resources("emdcfl.report") / "templates" / "predict.py"))
    for i in range(2):
        table = rows(seed=i)
        table[0]["age"], table[1]["ward"], table[2]["age"] = "-999", "refused", "-999.0"
        file = write(tmp_path / "sites" / f"site{i}.csv", table)
    encoding = load_folder(tmp_path / "sites", cleaning=Cleaning.of(missing="-999,refused")).encoding
    assert np.allclose(script["table"](file, encoding), read_inputs([file], encoding=encoding)[0])
    turned, photo = Image.Exif(), tmp_path / "photo.png"
    turned[0x0112] = 6
    Image.fromarray(np.arange(96, dtype=np.uint8).reshape(12, 8)).save(photo, exif=turned)
    assert np.array_equal(script["image"](photo, [1, 8, 8]), read_inputs([photo], encoding={"kind": "images", "shape": [1, 8, 8]})[0])
    Image.fromarray(np.zeros((8, 8), np.float32)).save(tmp_path / "range.tif")
    with pytest.raises(SystemExit, match="unknown range"):
        script["image"](tmp_path / "range.tif", [1, 8, 8])
    (tmp_path / "torn.png").write_bytes(photo.read_bytes()[:60])
    with pytest.raises(SystemExit, match="torn.png is not a readable image"):
        script["read"](tmp_path / "torn.png", {"encoding": {"kind": "images", "shape": [1, 8, 8]}})
    with pytest.raises(SystemExit, match="is a folder; name its files"):
        script["read"](tmp_path, {"encoding": {}})
    with pytest.raises(DataError, match=r"is a folder; name the files in it"):
        read_inputs([tmp_path], encoding={"kind": "images", "shape": [1, 8, 8]})


def test_the_script_reads_dates_times_truth_values_and_infinities(tmp_path: Path) -> None:
    for i in range(2):
        table = [
            {**row, "seen": f"2024-03-{k % 28 + 1:02d}", "born": f"{k % 28 + 1}.3.1950", "met": f"{k % 28 + 1}/3/2024"}
            for k, row in enumerate(rows(seed=i))
        ]
        for k, row in enumerate(table):
            row |= {
                "ill": str(k % 3 == 0),
                "at": f"{k % 24:02d}:30",
                "when": f"2024-03-01T{k % 24:02d}:00:00+02:00",
                "dose": "inf" if k == 3 else k,
            }
        file = write(tmp_path / "sites" / f"site{i}.csv", table)
    options = {"label": "label", "date": ["born:%d.%m.%Y", "met"]}
    encoding = emdcfl.scenarios.build("folder", path=str(tmp_path / "sites"), **options).encoding
    script = runpy.run_path(str(Path(emdcfl.__file__).parent / "report" / "templates" / "predict.py"))
    assert {"ill", "at", "when", "dose"} <= {column["name"] for column in encoding["columns"] if "mean" in column}
    assert np.array_equal(script["read"](file, {"encoding": encoding}), read_inputs([file], encoding=encoding)[0])
    text = file.read_text()
    for name, wrong, said in [
        ("dates.csv", text.replace(".3.1950", "/3/1950"), r"'born' must hold dates written as %d\.%m\.%Y, got '1/3/1950'"),
        ("semicolons.csv", text.replace(",", ";"), "with commas between columns"),
        ("workbook.xlsx", "PK\udc80\udcff", "expected a CSV file"),
    ]:
        (tmp_path / name).write_bytes(wrong.encode(errors="surrogateescape"))
        with pytest.raises(SystemExit, match=said):
            script["read"](tmp_path / name, {"encoding": encoding})
    with pytest.raises(SystemExit, match="no such file"):
        script["read"](tmp_path / "none.csv", {"encoding": encoding})


@pytest.mark.slow
def test_pictures_are_prepared_inside_the_exported_program() -> None:
    from emdcfl.data.types import Preprocess
    from emdcfl.models.networks import small_cnn
    from emdcfl.report.export import Standalone

    network, prepare = small_cnn(channels=3).eval(), Preprocess((0.4, 0.5, 0.6), (0.2, 0.3, 0.4), 1 / 255, 8)
    x = torch.randint(0, 256, (3, 3, 20, 14), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    standalone = Standalone(network, prepare, None).eval()
    program = torch.export.export(standalone, (x[:2],), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
    assert torch.allclose(program.module()(x), network(prepare(x)).softmax(1), atol=1e-6)
