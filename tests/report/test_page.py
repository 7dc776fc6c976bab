"""The page of a run or comparison: what it says, that it holds everything it needs, and that names cannot break out of it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report.fabricate import change_distances, make_baselines, make_comparison, make_run, result

from emdcfl.core.errors import StoreError
from emdcfl.core.metric import Metric
from emdcfl.report import render, write_report
from emdcfl.report.charts import _draw_lines, classical_mds, symmetric
from emdcfl.report.load_run import read_run
from emdcfl.report.page import run_context
from emdcfl.runs.store.files import json_text, read_arrays, sealed, write_arrays

EVIL = [
    '<script>alert("x")</script>',
    '"><img src=x onerror=alert(1)>',
    "</script><b>",
    "{{ 7 * 7 }}",
    "a&amp;b",
    "'onmouseover='x",
    "\u202egnp.exe",
    "\ud800x",
]


class Page(HTMLParser):
    """Elements and attributes of a page, and its visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style":
            self.text += data


def said(folder: Path) -> dict[str, str]:
    return dict(run_context(read_run(folder))["sentences"])


def headline(folder: Path) -> str:
    return str(run_context(read_run(folder))["headline"])


def test_the_page_shows_the_runs_own_sentences(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    told = {**json.loads((run / "reading.json").read_text()), "doubts": ["low power: <b>x</b> sees little", "links overlap"]}
    del told["sha256"]
    (run / "reading.json").write_text(json.dumps(sealed(told, "here")))
    assert "uncertain" in headline(run)
    assert said(run)["Doubt"] == "Low power: <b>x</b> sees little. Links overlap."
    assert told["sentences"][0][1:] in said(run)["Distances"]
    page = render(run)
    assert "Low power: &lt;b&gt;x&lt;/b&gt; sees little." in page and "<b>x</b>" not in page
    assert all(about in Page(page).text for about in told["clusters"].values())


def test_the_verdict_names_the_first_of_many_groups(tmp_path: Path) -> None:
    """What the others differ in stands below, and whose updates their models hold in summary.json."""
    make_run(tmp_path / "run")
    run = read_run(tmp_path / "run")
    found = [{"feature": "x", "said": "column 'x' is higher", "kind": "number", "here": 2.0, "there": 1.0, "effect": 3.0}]
    run.summary["what_differs"] = [{"who": f"cluster {k}", "members": [f"m{k}"], "found": found} for k in range(7)]
    run.summary["trained_with"] = [{"model": f"cluster-{k}", "serves": [f"m{k}"], "sites": [f"m{k}", "m9"]} for k in range(7)]
    told = dict(run_context(run)["sentences"])
    assert told["What differs"].endswith("4 more below.") and told["What differs"].count("column 'x'") == 3
    assert told["Trained with"].endswith("4 more in summary.json.") and told["Trained with"].count("The model of") == 3


def test_a_site_that_never_trained_has_no_cluster_to_sort_by(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", clients=3, groups=3, names="abc")
    summary = json.loads((run / "summary.json").read_text())
    summary["trained_with"] = [{"model": f"cluster-{c}", "serves": [c], "sites": [c] if c != "b" else []} for c in "abc"]
    (run / "summary.json").write_text(json.dumps(sealed(summary, "here")))
    cells = [dict(found).get("data-v") for tag, found in Page(render(run)).elements if tag == "td"]
    assert "–" not in cells and "" in cells


def test_groups_that_are_split_are_named_in_the_order_of_sites(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    run = read_run(tmp_path / "run")
    run.summary.update(ari=0.0, groups=list("hhgffeeg"), clusters=[0, 1] * 4)
    assert dict(run_context(run)["sentences"])["Truth"].endswith("(h, g, f, e).")


def test_clients_that_were_not_compared_are_not_called_separated(tmp_path: Path) -> None:
    nobody = make_run(tmp_path / "nobody", clients=4, groups=4, unset=1.0)
    assert headline(nobody).startswith("Undecided: none of the 4 clients could be compared")
    assert "Heat map" not in Page(render(nobody)).text
    one = make_run(tmp_path / "one", clients=5, groups=5, names="abcde")
    w = read_arrays(one / "distances.npz")["W"]
    w[0], w[:, 0] = np.nan, np.nan
    change_distances(one, W=w)
    assert (
        headline(one).startswith("Undecided: no two of the 4 clients look alike, clearly separated; 1 client not compared")
        and "ot compared: a;" in said(one)["Distances"]
    )
    assert "b, c, d, e" in said(one)["Alone"]


def test_a_clear_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    make_baselines(run)
    page = Page(render(run))
    assert headline(run).startswith("Train in these 4 groups: worth ") and headline(run) in page.text
    told = said(run)
    assert told["Groups"] == "4 groups among 8 clients, clearly separated." and "1440 test samples at 8 sites" in page.text
    assert "exactly the true ones" in told["Truth"] and "0.025" in told["Distances"]
    assert told["Worth it"].startswith("+") and "against one model for all, +" in told["Worth it"]
    for name in read_run(run).clients:
        assert name in page.text


def personalized(names: list[str], kept: int, value: float, **of_sites: Any) -> dict[str, Any]:
    score = {"mean": value, "worst": value, **of_sites}
    clients = {name: {"test": value} for name in names}
    return {"mode": "on", "kept": names[:kept], "accuracy": {**score, "variants": {"test": score}}, "gain": 0.0321, "clients": clients}


def test_accuracies_after_fine_tuning_stand_beside_the_plain_ones(tmp_path: Path) -> None:
    names = [f"site-{i}" for i in range(8)]
    run = make_run(tmp_path / "run", names=names, personalized=personalized(names, 5, 0.987))
    make_baselines(run, names=names)
    make_run(
        run / "baselines" / "fedavg", method="fedavg", clusters=None, ari=None, names=names, personalized=personalized(names, 8, 0.871)
    )
    context = run_context(read_run(run))
    assert [row["fine_tuned"] for row in context["table"]].count(0.987) == 5
    assert list(context["table"][0]["baselines"]) == ["fedavg", "fedavg+ft", "local"]
    assert {row["baselines"]["fedavg+ft"] for row in context["table"]} == {0.871}
    of_sites = {"sites": [0.987] * 8, "tested": [180] * 8}
    worse = make_run(tmp_path / "worse", names=names, accuracy=0.5, personalized=personalized(names, 8, 0.987, **of_sites))
    make_baselines(worse, names=names)
    assert "8 clients gained and 0 lost" in said(worse)["Worth it"]  # with the models that they should use
    assert "kept by 5 of 8 clients" in said(run)["Fine-tuning"] and "+3.2 points" in said(run)["Fine-tuning"]
    assert "one model for all, fine-tuned at home" in Page(render(run)).text
    assert "before fine-tuning" in Page(render(run)).text  # the head counts fine-tuned models, the clusters' numbers do not
    assert "before fine-tuning" not in Page(render(make_run(tmp_path / "plain"))).text


def test_clients_with_tolerances_of_their_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    epsilon = read_arrays(run / "distances.npz")["epsilon"] * np.linspace(0.9, 1.1, 8)[:, None]
    change_distances(run, epsilon=epsilon)
    assert "alibrated tolerances" in said(run)["Distances"] and "tolerance 0.0" not in render(run)


def test_needs_nothing_from_outside(tmp_path: Path) -> None:
    text = render(make_run(tmp_path / "run", bounded=True))
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "srcset", "action", "onclick", "onload", "onerror"} & attributes.keys()
        assert attributes.get("href") is None or str(attributes["href"]).startswith("#")
    assert not re.search(r"url\(|@import|https?://", text)
    policy = next(a["content"] for t, a in page.elements if t == "meta" and a.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy


def test_names_are_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", names=EVIL, groups=4, scenario="<i>s</i>", method="<u>m</u>", notes=["<b>n</b>"])
    summary = json.loads((run / "summary.json").read_text())
    summary["groups"] = [f"<em>{g}</em>" for g in summary["groups"]]
    summary["failures"] = [{"round": 1, "client": EVIL[0], "task": "train", "reason": "<img src=x onerror=alert(1)>"}]
    summary["versions"] = {"<s>": "<s>"}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "config.toml").write_text('[method]\nname = "<script>alert(1)</script>"\n')
    place = write_report(run)
    page = Page(place.read_text(encoding="utf-8"))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2 and not {"img", "i2", "u", "em", "s"} & set(tags)
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert EVIL[0] in page.text and "{{ 7 * 7 }}" in page.text and "49" not in re.findall(r"\{\{.*?\}\}|\b49\b", page.text)
    assert "\u202e" not in page.text
    assert json.loads(next(s for s in page.scripts if s.startswith("{")))["names"][0] == EVIL[0]


def test_borderline_overlap_and_bounds_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", clients=4, groups=2)
    w = np.array([[np.nan, 0.024, 0.5, 0.5], [0.02, np.nan, 0.5, 0.5], [0.5, 0.5, np.nan, 0.001], [0.5, 0.5, 0.001, np.nan]])
    unset = np.isnan(w)
    change_distances(run, W=w, epsilon=np.where(unset, np.nan, 0.025), kind=np.where(unset, 0, 1).astype(np.int8))
    assert "with 2 borderline clients" in headline(run) and "group0-site0, group0-site1" in said(run)["Distances"]
    change_distances(run, kind=np.where(unset, 0, 3).astype(np.int8))
    assert headline(run) == "2 groups among 4 clients" and "bounds only" in said(run)["Distances"]
    w[0, 1] = w[1, 2] = w[2, 1] = 0.01
    change_distances(run, W=w, kind=np.where(unset, 0, 1).astype(np.int8))
    assert "Doubt" in said(run) and "not transitive" in said(run)["Doubt"]


def test_wrong_groups_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ari=0.5, clusters=[0, 0, 0, 0, 1, 1, 2, 3])
    assert all(fact in said(run)["Truth"] for fact in ("ARI 0.50", "1 cluster mixes true groups", "1 true group is split (g3)"))
    assert "group3-site6, group3-site7" in said(run)["Alone"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"method": "fedavg", "clusters": None, "ari": None, "k": 1}, "One model for all 8 clients"),
        ({"method": "local", "clusters": None, "ari": None, "k": 8}, "8 clients, each trained alone"),
        ({"method": "fedem", "clusters": None, "ari": None, "k": 3}, "3 models, mixed for each of 8 clients"),
        ({"groups": None, "ari": None}, "4 groups among 8 clients, clearly separated"),
    ],
)
def test_runs_of_all_kinds_have_a_page(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    run = make_run(tmp_path / "run", **{k: v for k, v in changes.items() if k == "method"})
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, **changes}))
    if changes.get("clusters", 0) is None:
        (run / "distances.npz").unlink()
    assert expected in Page(render(run)).text


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 2, 3, 30, 520])
def test_any_number_of_clients(tmp_path: Path, clients: int) -> None:
    run = make_run(tmp_path / "run", clients=clients, groups=min(clients, 14), rounds=1, unset=0.2 if clients > 3 else 0)
    page = Page(render(run))
    assert sum(tag == "tr" for tag, _ in page.elements) == clients + 1
    numbers = " ".join(str(v) for _, a in page.elements for k, v in a.items() if k in ("d", "x", "y", "x1", "cx", "width"))
    assert "nan" not in numbers and "inf" not in numbers


def test_columns_of_scores_sort_the_best_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    make_baselines(run)
    order = {head: way for way, head in re.findall(r'data-first="(\w+)"[^>]*><button type="button">([^<]*)', render(run))}
    assert {order[head] for head in ("accuracy", "one model for all", "every site alone")} == {"descending"}
    assert order["train loss"] == "ascending"


def test_numbered_sites_are_listed_by_number(tmp_path: Path) -> None:
    numbers = sorted(map(str, range(1, 13)))
    run = read_run(make_run(tmp_path / "run", clients=12, groups=2, names=numbers))
    assert run.clients == numbers and [run.clients[i] for i in run.members[0]] == ["1", "2", "3", "10", "11", "12"]
    assert run_context(run)["clusters"][1]["members"] == ["4", "5", "6", "7", "8", "9"]


def test_of_many_clients_each_cluster_shows_its_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = {"client": "a", "what": "n", "value": 9.0, "typical": 1.0, "first": 1, "times": 1}
    folder = make_run(tmp_path / "run", clients=40, rounds=1, flags=[flag] * 9)
    run = read_run(folder)
    worst = {
        k: min((run.score_at(c, "test") or 0, c) for c, own in zip(run.clients, run.clusters, strict=True) if own == k)[1] for k in range(4)
    }
    monkeypatch.setattr("emdcfl.report.page.LISTED", 8)
    table = run_context(run)["table"]
    assert len(table) == 8 and [row["cluster"] for row in table] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert set(worst.values()) <= {row["client"] for row in table}
    text = Page(render(folder)).text
    assert "8 of 40 clients are listed" in text and "5 more are in" in text
    monkeypatch.setattr("emdcfl.report.page.LISTED", 3)
    assert len(run_context(run)["table"]) == 3


def test_untested_clients_and_an_unfinished_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", finished=False)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    none = dict.fromkeys(("accuracy", "test_loss", "test_samples", "train_loss"))
    kept = [r if r["client"] != "group0-site0" else {**r, **none} for r in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept) + '{"round": 6, "cli')
    assert "This run is not finished" in Page(render(run)).text
    (run / "metrics.jsonl").unlink()
    (run / "config.toml").unlink()
    (run / "distances.npz").unlink()
    (run / "reading.json").unlink()
    assert "4 groups among 8 clients" in Page(render(run)).text


def test_bytes_where_known(tmp_path: Path) -> None:
    counted = {"train": {"to_clients": 3_400_000, "to_server": 1_700_000}, "embed": {"to_clients": 0, "to_server": 0}}
    text = Page(render(make_run(tmp_path / "a", bytes=counted))).text
    assert "Sent: 5.1 MB" in text and "3.4 MB" in text and "1.7 MB" in text and "total" in text
    for unknown in ({}, None, 12, {"train": "many"}):
        assert "Sent" not in Page(render(make_run(tmp_path / "b", bytes=unknown))).text


def test_phases_have_names_and_colours_of_their_own(tmp_path: Path) -> None:
    spent = {"train": 3.0, "embed": 2.0, "transport": 1.0, "evaluate": 1.0, "decide": 1.0, "personalize": 1.0, "total": 10.0}
    run = make_run(tmp_path / "run", seconds=spent)
    make_baselines(run)
    page = Page(render(run))
    drawn = [
        a["class"] for tag, a in page.elements if tag == "i" and "width" in (a.get("style") or "") and (a.get("class") or "")[:1] == "k"
    ]
    assert len(drawn) == 7 and len(set(drawn)) == 7
    assert "fine-tuning 1.0 s" in page.text and "Other trainings, for comparison" in page.text


def test_a_comparison(tmp_path: Path) -> None:
    forged = {**result("pacfl", 0, 0.9, None), "seed": "0"}
    folder = make_comparison(tmp_path / "cmp", ["{cut off", "[]", json.dumps(forged)])
    text = Page(render(folder)).text
    assert "EMD-CFL leads on" in text and "98.10 ± 0.20" in text and "PACFL" not in text
    assert "3 lines of results.jsonl could not be read" in text


def test_a_comparison_over_scenarios_and_an_empty_one(tmp_path: Path) -> None:
    more = [json.dumps(result(m, 0, mean, 0.5, scenario="pacs")) for m, mean in (("emdcfl", 0.9), ("fedavg", 0.95))]
    assert "of 2 scenarios" in Page(render(make_comparison(tmp_path / "cmp", more))).text
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "results.jsonl").write_text("")
    assert "No finished run yet" in Page(render(tmp_path / "none")).text


def test_a_comparison_of_numbers_too_few_for_intervals_names_no_percent(tmp_path: Path) -> None:
    row = result("emdcfl", 0, 0.62, None)
    score = {**row.pop("accuracy")["variants"]["test"], "rmse": {"mean": 3.0, "worst": 4.0, "sites": [3.0]}}
    rows = [{**row, "r2": {**score, "samples": 2, "variants": {"test": score}}}]
    rows.append({**rows[0], "method": "fedavg", "config": "1" * 64, "r2": {**rows[0]["r2"], "mean": 0.4}})
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    page = render(tmp_path)
    (headline,) = re.findall(r"<h1>(.*)</h1>", page)
    assert "R² 0.62" in headline and "%" not in headline
    first = {head: order for order, head in re.findall(r'data-first="(\w+)"><button type="button">([^<]+)', page)}
    assert (first["Avg R²"], first["RMSE"]) == ("descending", "ascending")  # the best on top


def test_same_run_same_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert render(run) == render(run)


def test_errors_name_the_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such folder"):
        render(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="not a run directory"):
        render(tmp_path)
    run = make_run(tmp_path / "run")
    with pytest.raises(StoreError, match="does not exist"):
        write_report(run, tmp_path / "missing" / "report.html")
    write_arrays(run / "distances.npz", {"W": np.zeros((2, 2))})
    with pytest.raises(StoreError, match="expected W of shape"):
        render(run)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from emdcfl.cli import main

    run = make_run(tmp_path / "run")
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(run), "--out", str(tmp_path / "page.html")])
    assert stopped.value.code == 0 and (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")


def put(run: Path, reading: dict[str, Any]) -> None:
    (run / "reading.json").write_text(json_text(sealed(reading, "reading.json"), "reading.json"), encoding="utf-8")


def test_the_tree_of_splits_leads_from_everybody_to_the_clusters(tmp_path: Path) -> None:
    names = [f"<i>{c}" for c in "abcdef"]
    run = make_run(tmp_path / "run", names=names, clients=6, groups=3)
    reading = {k: v for k, v in json.loads((run / "reading.json").read_text()).items() if k != "sha256"}
    weighed = {"evidence": 3.5, "error": 0.01, "decided_by": names[:1], "proposal": "transport"}

    def split(round: int, members: list[str], cells: list[list[str]], gain: float) -> dict[str, Any]:
        gains = {"gain": gain, "points": 100 * gain, "points_error": 1.0, "pays": gain > 0.1}
        return {**weighed, "round": round, "members": members, "cells": cells, **gains}

    splits = [
        split(1, names, [names[:4], names[4:]], 0.3),
        split(1, names[4:], [names[4:5], names[5:]], -0.02),
        split(2, names[:4], [names[:2], names[2:4]], 0.2),
        split(4, names[4:], [names[4:5], names[5:]], 0.05),
    ]
    put(run, {**reading, "splits": splits})
    context = run_context(read_run(run))
    assert [(row["depth"], row["cluster"], row["said"]) for row in context["tree"]] == [
        (0, None, "divided into 2"),
        (1, None, "divided into 2"),
        (2, 0, "kept together"),
        (2, 1, "kept together"),
        (1, 2, "kept together"),
    ]
    assert context["tree"][-1]["split"].points == pytest.approx(5.0), "the last word on a cluster"
    assert len(context["splits"]) == 4
    page = render(run)
    assert "<i>a" not in page and "What dividing gains" in Page(page).text
    assert "Margins" in render(make_run(tmp_path / "linked"))
    put(run, {**reading, "splits": []})
    assert "Margins" not in render(run), "losses decide, though none was asked for yet"
    put(run, {**reading, "splits": [{"round": 1}]})
    with pytest.raises(StoreError, match="splits"):
        render(run)


def test_missing_distances_are_bridged() -> None:
    d = symmetric(np.array([[math.nan, 0.1, math.nan], [0.3, math.nan, 0.2], [math.nan, 0.2, math.nan]]))
    assert d[0, 1] == pytest.approx(0.2) and d[0, 2] == pytest.approx(0.4)
    assert np.array_equal(d, d.T) and not np.diag(d).any()
    assert np.isfinite(symmetric(np.full((2, 2), math.nan))).all()


def test_map_keeps_planar_distances() -> None:
    points = np.random.Generator(np.random.Philox(1)).normal(size=(20, 2))
    d = np.linalg.norm(points[:, None] - points[None], axis=2)
    found, share = classical_mds(d)
    assert np.allclose(np.linalg.norm(found[:, None] - found[None], axis=2), d)
    assert share == pytest.approx(1)
    assert classical_mds(np.zeros((1, 1)))[0].tolist() == [[0, 0]]


def test_lines_below_the_drawing_lie_at_its_lower_edge() -> None:
    drawn = str(_draw_lines([("mean", "line mean", {1: -3.0, 2: -2.0})], "R² by round", Metric.R2))
    heights = {float(y) for y in re.findall(r'cy="([^"]+)"', drawn)}
    labels = {name: float(y) for y, name in re.findall(r'<text x="35" y="([^"]+)"[^>]*>([^<]+)', drawn)}
    assert len(heights) == 1 and heights.pop() > labels["0"] and labels["≤-1"] > labels["0"]
    assert ">-1<" in str(_draw_lines([("mean", "line mean", {1: -1.0, 2: 0.0})], "R² by round", Metric.R2))  # nothing is cut off
