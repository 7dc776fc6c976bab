"""Tables: which runs share a cell, what is bold, what stands beside it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from emdcfl.cli.compare import rich_tables
from emdcfl.runs.scoring import site_scores
from emdcfl.studies.paper_values import Value, measured_value
from emdcfl.studies.table_files import latex, markdown, tidy, write_tables
from emdcfl.studies.tables import build


def row(
    method: str, seed: int = 0, mean: float = 0.9, *, scenario: str = "pacs", ari: float | None = 1.0, **settings: Any
) -> dict[str, Any]:
    options = {"name": method, **settings.pop("options", {})}
    run = {"seed": seed, "rounds": 10, "evaluate_every": 1, **settings.pop("run", {})}
    tables = {
        "run": run, "scenario": {"name": scenario, **settings.pop("scenario_options", {})}, "method": options,
        "model": {"name": "resnet18"}, "training": {"lr": 0.01}, "engine": {"device": "cpu", **settings.pop("engine", {})},
        **({"trust": settings["trust"]} if "trust" in settings else {}),
    }  # fmt: skip
    variants = settings.pop("variants", {"test": {"mean": mean, "worst": mean / 2}})
    return {
        "config": json.dumps(tables), "scenario": scenario, "method": method, "seed": seed, "ari": ari, "seconds": {"total": 3.0},
        "accuracy": {"mean": mean, "worst": mean / 2, "variants": variants}, "settings": tables,
    }  # fmt: skip


def test_mean_and_sample_standard_deviation_over_seeds() -> None:
    table = build([row("emdcfl", 0, 0.90), row("emdcfl", 1, 0.92), row("emdcfl", 2, 0.97)])
    cell = table.cells["EMD-CFL", table.columns[0].key, "mean"]
    assert cell.mean == pytest.approx(93.0)
    assert cell.std == pytest.approx(3.6055513)  # ddof = 1
    assert cell.n == 3
    assert cell.paper == Value(92.47, 0.32)
    assert "| EMD-CFL | **93.00 ± 3.61** | 92.47 ± 0.32 |" in markdown(table)


def test_runs_that_average_differently_do_not_share_a_cell() -> None:
    usual = {"aggregate": "mean", "max_share": 1.0, "min_validation": 0}  # the last is an option of another version
    rows = [row("fedavg", 0, 0.9, trust=usual), row("fedavg", 0, 0.8, trust={**usual, "aggregate": "median"}), row("fedavg", 1, 0.9)]
    assert build(rows).rows == ("FedAvg", "FedAvg (aggregate median)")


def test_a_number_as_tolerance_is_named_as_the_papers_rule() -> None:
    """Own data are grouped by benefit, but not with a number as tolerance: the run follows neighbourhoods."""
    options = [{"grouping": "benefit", "tolerance": "auto"}, {"grouping": "benefit", "tolerance": 0.025}]
    rows = build([row("emdcfl", options=own) for own in options]).rows
    assert rows == ("EMD-CFL (grouping benefit, tolerance auto)", "EMD-CFL (grouping neighbourhoods, tolerance 0.025)")


@pytest.mark.parametrize(
    ("method", "one", "other"),
    [
        ("emdcfl", {"grouping": "benefit", "tolerance": 0.025}, {"grouping": "neighbourhoods", "tolerance": 0.025}),
        ("pfedgraph", {"snap": None}, {}),
    ],
)
def test_runs_that_followed_the_same_settings_share_a_cell(method: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    table = build([row(method, 0, 0.9, options=one), row(method, 1, 0.8, options=other)])
    (cell,) = (cell for key, cell in table.cells.items() if key[2] == "mean")
    assert (cell.n, round(cell.mean, 6)) == (2, 85.0)


def test_one_seed_has_no_deviation() -> None:
    assert "**90.00** | 92.47 ± 0.32" in markdown(build([row("emdcfl")]))


def test_the_papers_numbers_are_marked_beside_runs_of_another_size() -> None:
    same = build([row("emdcfl")])
    assert same.paper_note(same.columns[0]) == "" and "†" not in markdown(same) + latex(same)
    small = build([row("emdcfl", scenario_options={"scale": "small"}, run={"rounds": 3})])
    assert "scale small, rounds 3" in small.paper_note(small.columns[0])
    assert "| paper † | ours † |" in markdown(small) and measured_value("pacs", "emdcfl", "mean").text() in markdown(small)
    assert small.paper_note(small.columns[0]) in markdown(small) and "dagger" in latex(small)
    fixed = build([row("emdcfl", options={"tolerance": 0.025}, scenario_options={"scale": "small"}, run={"rounds": 3})])
    assert all(cell.full is None for cell in fixed.cells.values())  # ours were measured with the calibrated tolerance
    elsewhere = build([row("emdcfl", scenario="rotated-digits", run={"rounds": 3})])  # nothing of the paper's beside it
    assert elsewhere.paper_note(elsewhere.columns[0]) == ""


def test_tables_fit_a_terminal_without_cutting_names() -> None:
    long = {"tolerance": "auto", "projection": "pair"}
    rows = [row("emdcfl", s, 0.9 + s / 100, options=o) for s in range(2) for o in (long, {**long, "tolerance": 0.025})]
    table = build([*rows, row("fedavg"), row("fedavg", 1, 0.7)])
    for width in (60, 80, 100):
        console = Console(width=width, file=io.StringIO(), legacy_windows=False)
        for one in rich_tables(table, table.columns[0], width):
            console.print(one)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width and "…" not in "".join(lines)
        assert all(any(label in line for line in lines) for label in table.rows)
        assert sum("91." in line or "90." in line for line in lines) >= 1
        assert width < 80 or all("paper" in line for line in lines if "Worst acc" in line)  # the paper's beside ours


def test_best_is_bold_and_oracle_does_not_compete() -> None:
    table = build([row("oracle", mean=0.99), row("fedavg", mean=0.90), row("ifca", mean=0.9000004), row("cfl", mean=0.89)])
    key = table.columns[0].key
    assert table.best(key, "mean") == {"FedAvg", "IFCA"}  # equal at the precision shown
    text = markdown(table)
    assert "| Oracle | 99.00 |" in text and "**90.00**" in text and "**89.00**" not in text


def test_rows_stand_in_the_papers_order() -> None:
    table = build([row(name) for name in ("local", "fedavg", "emdcfl", "oracle", "cfl")])
    assert table.rows == ("Oracle", "EMD-CFL", "CFL", "FedAvg", "Local")


def test_the_same_run_on_other_hardware_is_no_second_sample() -> None:
    table = build([row("fedavg", 0, 0.9), row("fedavg", 0, 0.8, engine={"device": "cuda"}), row("fedavg", 1, 0.9)])
    cell = table.cells["FedAvg", table.columns[0].key, "mean"]
    assert (cell.n, cell.mean) == (2, pytest.approx(90.0))


def test_settings_that_differ_are_named() -> None:
    found = build([row("emdcfl", options={"tolerance": 0.025}), row("emdcfl", options={"tolerance": "auto"}), row("fedavg")])
    assert found.rows == ("EMD-CFL (tolerance 0.025)", "EMD-CFL (tolerance auto)", "FedAvg")
    rounds = build([row("fedavg"), row("fedavg", run={"rounds": 2})])
    assert set(rounds.rows) == {"FedAvg (rounds 10)", "FedAvg (rounds 2)"}
    rounded = build([row("fedavg"), row("fedavg", engine={"precision": "bf16"})])
    assert set(rounded.rows) == {"FedAvg (precision fp32)", "FedAvg (precision bf16)"}


def test_an_option_that_is_not_the_default_is_named_and_ours_is_no_such_run() -> None:
    """One FedProx with μ = 1 shares no setting with what was measured with 0.01; thresholds are the scenario's."""
    small = {"scenario_options": {"scale": "small"}, "run": {"rounds": 3}}
    options = {"fedprox": {"mu": 1.0}, "cfl": {"thresholds": "absolute"}}
    table = build([row(name, options=own, **small) for name, own in options.items()])
    assert table.rows == ("CFL", "FedProx (mu 1.0)")
    key = table.columns[0].key
    assert table.cells["FedProx (mu 1.0)", key, "mean"].full is None and table.cells["CFL", key, "mean"].full is not None
    assert build([row("fedprox", options={"mu": 0.01}, **small)]).rows == ("FedProx",)
    assert build([row("pfedgraph", options={"snap": "none"}, **small)]).rows == ("pFedGraph (snap none)",)
    public = {"mu": 0.5, "prox": "layer_norm", "order": "cluster-first", "vector_scope": "state"}
    assert build([row("fesem", options=public)]).rows == ("FeSEM, reference (mu 0.5)",)


def test_a_preset_is_named_and_not_spelled_out() -> None:
    usual, public = {"prox": "squared"}, {"prox": "layer_norm", "order": "cluster-first", "vector_scope": "state"}
    own = {"mu": 0.0, "start": "random", "vector_scope": "H"}
    table = build([row("fesem", options={"mu": 0.1, **options}) for options in (usual, own, public)])
    assert table.rows == ("FeSEM", "FeSEM, original", "FeSEM, reference")


def test_columns_are_scenarios_scales_and_participants() -> None:
    table = build(
        [
            row("emdcfl", scenario="rotated-mnist", run={"participants": 10}),
            row("emdcfl", scenario="rotated-mnist", run={"participants": 20}),
            row("emdcfl", scenario="pacs", scenario_options={"scale": "small"}),
        ]
    )
    assert [c.title for c in table.columns] == ["rotated-mnist (participants 10)", "rotated-mnist (participants 20)", "pacs"]
    assert table.cells["EMD-CFL", table.columns[0].key, "mean"].paper == Value(93.70, 2.11)
    assert table.cells["EMD-CFL", table.columns[1].key, "mean"].paper == Value(98.52, 0.03)


def test_thresholds_of_a_scenario_do_not_split_a_method_over_columns() -> None:
    table = build(
        [row("pacfl", scenario="pacs", options={"threshold": 11.0}), row("pacfl", scenario="rotated-mnist", options={"threshold": 12.0})]
    )
    assert table.rows == ("PACFL",)
    assert len(table.columns) == 2


def test_backdoor_scenarios_show_clean_and_backdoor_accuracy() -> None:
    variants = {"clean": {"mean": 0.98, "worst": 0.9}, "backdoor": {"mean": 0.5, "worst": 0.4}}
    table = build([row("fedavg", scenario="backdoor-mnist", ari=None, variants=variants)])
    assert table.columns[0].metrics == ("clean", "backdoor", "seconds")
    assert table.cells["FedAvg", table.columns[0].key, "backdoor"].mean == pytest.approx(50.0)
    assert table.cells["FedAvg", table.columns[0].key, "backdoor"].paper == Value(88.49, 1.39)


def test_missing_agreement_is_a_dash() -> None:
    assert "| FedAvg | 80.00 | 86.20 ± 0.66 | 40.00 | 79.23 ± 1.39 | – | – |" in markdown(
        build([row("emdcfl"), row("fedavg", mean=0.8, ari=None)])
    )


def test_latex_and_csv_hold_the_same_numbers(tmp_path: Path) -> None:
    results = [row("emdcfl", 0, 0.90), row("emdcfl", 1, 0.92), row("my_method", ari=None)]
    table = write_tables(results, tmp_path)
    tex = latex(table)
    assert "EMD-CFL & \\textbf{91.00$\\pm$1.41} (92.47$\\pm$0.32)" in tex
    assert "my\\_method & 90.00" in tex
    assert tex.count("&") == 1 + 3 + 2 * 3  # every line has all columns
    lines = list(csv.DictReader(io.StringIO(tidy(table))))
    found = next(line for line in lines if (line["method"], line["metric"]) == ("EMD-CFL", "mean"))
    assert (found["mean"], found["std"], found["seeds"], found["paper_mean"]) == ("91.0", "1.414214", "2", "92.47")
    assert (tmp_path / "table.csv").read_text() == tidy(table)


def sites(method: str, seed: int, shares: list[float], n: int = 100) -> dict[str, Any]:
    rows = [{"client": str(i), "accuracy": {"test": p}, "test_samples": {"test": n}} for i, p in enumerate(shares)]
    score = site_scores(rows, "test")
    return row(method, seed, score["mean"], variants={"test": score})


def test_differences_from_the_best_are_paired_by_site_and_seed() -> None:
    """Sites differ by 40 points, methods by 4: only differences at the same sites show it."""
    shares = [0.5, 0.6, 0.7, 0.8, 0.85, 0.9]
    results = [sites("fedavg", s, [p + 0.001 * s for p in shares]) for s in range(3)]
    results += [sites("ifca", s, [p + 0.04 + 0.001 * s for p in shares]) for s in range(3)]
    results += [sites("cfl", s, [p + 0.04 * (i % 2) for i, p in enumerate(shares)], n=10) for s in range(3)]
    table = build(results)
    (column,) = table.columns
    worse, unsure = table.against["FedAvg", column.key], table.against["CFL", column.key]
    assert table.leader(column) == "IFCA" and ("IFCA", column.key) not in table.against
    assert worse.mean == pytest.approx(-0.04) and worse.high < 0 and unsure.mean < 0 < unsure.high
    cell = table.cells["FedAvg", column.key, "mean"]
    assert cell.interval.low < 0.726 < cell.interval.high
    text = markdown(table)
    assert "| 95% interval | against the best |" in text and "| best |" in text and "-4.0 (" in text
    lines = list(csv.DictReader(io.StringIO(tidy(table))))
    found = next(line for line in lines if (line["method"], line["metric"]) == ("FedAvg", "against_best"))
    assert float(found["low"]) < float(found["mean"]) < float(found["high"]) < 0


def test_rows_without_scores_of_sites_have_no_interval() -> None:
    table = build([row("emdcfl"), sites("fedavg", 0, [0.8, 0.9])])
    assert table.cells["EMD-CFL", table.columns[0].key, "mean"].interval is None and not table.against
    assert "| EMD-CFL | " in markdown(table)
