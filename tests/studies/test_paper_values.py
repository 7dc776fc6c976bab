"""The paper's numbers, cell by cell against its source; ``EMDCFL_PAPER`` names the .tex file, which is not part of the project."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from emdcfl.data import scenarios
from emdcfl.methods import METHODS
from emdcfl.studies.paper_values import Value, paper_value, tables

NAMES = {name.lower().replace("-", ""): name for name in METHODS}
SCENARIOS = {
    "Rotated MNIST": "rotated-mnist",
    "Rotated CIFAR10": "rotated-cifar10",
    "PACS": "pacs",
    "Backdoor MNIST": "backdoor-mnist",
    "Backdoor CIFAR10": "backdoor-cifar10",
}
NETWORKS = {
    "Simple CNN": "cnn",
    "ResNet18 on CIFAR10": "resnet18 on cifar10",
    "ResNet18 on PACS": "resnet18 on pacs",
    "ResNet50": "resnet50",
    "EfficientNetB3": "efficientnet_b3",
    "ViTB16": "vit_b_16",
    "ConvNeXt Base": "convnext_base",
}
METRICS = {"Avg Acc": "mean", "Worst Acc": "worst", "ARI": "ari", "Clean Acc": "clean", "Backdoor Acc": "backdoor", "Acc": "mean"}


@pytest.fixture(scope="module")
def source() -> str:
    named = os.environ.get("EMDCFL_PAPER")
    if not named:
        pytest.skip("EMDCFL_PAPER does not name the paper's source")
    return re.sub(r"(?<!\\)%.*", "", Path(named).read_text(encoding="utf-8"))


def parts(source: str, label: str) -> tuple[list[list[str]], list[list[str]]]:
    """Header and body rows of a table, as plain cells. The label of ``pacs`` stands after its tabular, all others before."""
    at = source.index(f"\\label{{tab:{label}}}")
    begin = source.rindex("\\begin{tabular}", 0, at) if label == "pacs" else source.index("\\begin{tabular}", at)
    text = source[begin : source.index("\\end{tabular}", begin)]
    text = re.sub(r"\\(toprule|bottomrule)|\\cmidrule\(lr\)\{[^}]*\}", "", text)
    head, _, body = text.partition("\\midrule")
    return rows(head.partition("\\toprule")[2] or head), rows(body.replace("\\midrule", ""))


def rows(text: str) -> list[list[str]]:
    found = []
    for line in text.split("\\\\"):
        cells = [re.sub(r"\\(textbf|multirow\{2\}\{\*\})\{([^{}]*)\}", r"\2", c).strip() for c in line.replace("\n", " ").split("&")]
        if len(cells) > 1:
            found.append(cells)
    return found


def number(cell: str) -> Value | None:
    if cell == "-":
        return None
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)(?:\$\\pm\$(\d+\.\d+))?", cell)
    assert found, f"not a number: {cell!r}"
    return Value(float(found[1]), None if found[2] is None else float(found[2]))


def key(label: str, name: str) -> str:
    if label == "model_details":
        return NETWORKS[name]
    return SCENARIOS[name] if label == "distance_comparison" else NAMES[name.lower().replace("-", "")]


@pytest.mark.parametrize("label", [label for label in tables() if label != "pp"])
def test_every_cell_of_a_table(source: str, label: str) -> None:
    _, body = parts(source, label)
    table = tables()[label]
    assert [key(label, row[0]) for row in body] == list(table.rows)
    for row in body:
        assert tuple(number(cell) for cell in row[1:]) == table.rows[key(label, row[0])], row[0]


def test_every_cell_of_partial_participation(source: str) -> None:
    _, body = parts(source, "pp")
    table, scenario, seen = tables()["pp"], "", 0
    for dataset, method, *cells in body:
        scenario = SCENARIOS[dataset] if dataset else scenario
        wanted = [(n, metric) for n in (10, 20, 30) for metric in ("mean", "ari")]
        for (participants, metric), cell in zip(wanted, cells, strict=True):
            assert paper_value(scenario, key("pp", method), metric, participants) == number(cell)
            seen += 1
    assert seen == len(table.columns) * len(table.rows)


@pytest.mark.parametrize("label", ["mnistmax_cifarmax", "backdoor_combined", "full_cmnist_cifar", "mnist_extended", "cifar_extended"])
def test_columns_are_in_the_papers_order(source: str, label: str) -> None:
    head, _ = parts(source, label)
    groups = re.findall(r"multicolumn\{3\}\{c\}\{([^}]*)\}", " ".join(head[0]))
    named = [SCENARIOS.get(g, {"Min": "min", "Two": "two", "Base": "base"}.get(g, "")) for g in groups]
    columns = tables()[label].columns
    for position, (name, metric) in enumerate(zip([n for n in named for _ in range(3)], head[1][1:], strict=True)):
        assert name and name in columns[position]["scenario"]
        assert columns[position]["metric"] == METRICS[metric]


def test_rows_and_columns_are_names_of_this_package() -> None:
    for label, table in tables().items():
        assert {c["scenario"] for c in table.columns if "scenario" in c} <= set(scenarios.names())
        if label not in ("model_details", "distance_comparison"):
            assert set(table.rows) <= set(METHODS)
        assert all(len(cells) == len(table.columns) for cells in table.rows.values())


def test_overlapping_tables_agree() -> None:
    for short, full in (("pacs", "full_pacs"), ("backdoor_combined", "full_cmnist_cifar")):
        assert all(tables()[full].rows[name] == cells for name, cells in tables()[short].rows.items())


def test_values_are_found_and_written_as_in_the_paper() -> None:
    found = paper_value("rotated-cifar10", "fedclust", "ari")
    assert found == Value(-0.01, 0.02)
    assert found.text() == "-0.01 ± 0.02"
    assert paper_value("rotated-mnist", "fedavg", "ari") is None
    assert paper_value("rotated-digits", "emdcfl", "mean") is None
    assert paper_value("rotated-mnist", "emdcfl", "mean", 10) == Value(93.70, 2.11)
