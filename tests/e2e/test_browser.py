"""The report in a real browser: it renders, answers to mouse and keyboard, sorts, fits a phone, and complains about nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.e2e.chromium import Chromium, find
from tests.report.fabricate import make_baselines, make_comparison, make_run

from emdcfl.report import write_report

PROGRAM = find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs a Chromium (or Chrome) on the PATH")
TIP = "document.getElementById('tip')"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    small = make_run(folder / "small", bounded=True)
    make_baselines(small)
    evil = ["<script>document.title='broken'</script>", "<img src=x onerror=\"document.title='broken'\">", *[f"c{i}" for i in range(6)]]
    return {
        "8": write_report(small),
        "200": write_report(make_run(folder / "large", clients=200, groups=7, variants=("clean", "backdoor"))),
        "evil": write_report(make_run(folder / "evil", names=evil)),
        "comparison": write_report(make_comparison(folder / "comparison")),
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    assert PROGRAM is not None
    with Chromium(PROGRAM, tmp_path_factory.mktemp("profile")) as one:
        yield one


def column(browser: Chromium, head: str, table: str = "#clients") -> list[Any]:
    """Values of a column, top to bottom."""
    script = """(() => { const t = document.querySelector(%s);
        const c = [...t.tHead.rows[0].cells].findIndex((h) => h.textContent.trim() === %s);
        return [...t.tBodies[0].rows].map((r) => r.cells[c].dataset.v ?? r.cells[c].textContent.trim()); })()"""
    found: list[Any] = browser.eval(script % (json.dumps(table), json.dumps(head)))
    return found


@pytest.mark.parametrize("name", ["8", "200", "evil", "comparison"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (375, False)])
def test_renders_without_a_complaint(browser: Chromium, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    browser.open(pages[name], width=width, dark=dark)
    assert browser.eval("document.querySelectorAll('svg.chart').length") >= 2
    assert browser.eval("document.documentElement.scrollWidth") <= width  # nothing makes the page scroll sideways
    pixels = Image.open(io.BytesIO(browser.picture())).convert("L")
    corner = pixels.getpixel((2, 2))
    assert isinstance(corner, int) and (corner < 60 if dark else corner > 200)
    assert browser.complaints == []
    assert browser.requests == [pages[name].as_uri()]


def test_names_do_not_run(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["evil"])
    assert browser.eval("document.title").endswith("· emdcfl")
    assert browser.eval("document.images.length") == 0
    assert browser.eval("document.querySelector('#clients bdi').textContent").startswith("<script>")


@pytest.mark.parametrize("name", ["8", "200"])
def test_hovering_the_map_tells_the_client(browser: Chromium, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    assert browser.eval(f"{TIP}.hidden")
    browser.hover("path.point")
    browser.until(f"!{TIP}.hidden")
    text = browser.eval(f"{TIP}.textContent")
    assert text == browser.eval("document.querySelector('path.point').dataset.tip") and text.startswith("group0-site0\ncluster 0")
    browser.point(3, 3)
    browser.until(f"{TIP}.hidden")


def test_hovering_the_heat_map_tells_the_value(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["8"])
    data = browser.eval("JSON.parse(document.getElementById('heat-data').textContent)")
    browser.centre("#heat")
    right, top, bottom = browser.eval("(b => [b.right, b.top, b.bottom])(document.querySelector('#heat canvas').getBoundingClientRect())")
    told: dict[str, str] = {}
    for step in range(1, 33):  # up along the last column, from cell to cell
        y = bottom - step * (bottom - top) / 33
        browser.point(right - 6, y)
        if not browser.eval(f"{TIP}.hidden"):
            head, *rest = browser.eval(f"{TIP}.textContent").split("\n")
            told[head] = " ".join(rest)
    names, w = data["names"], [data["w"][8 * i + 7] for i in range(8)]
    assert list(told) == [names[7], *[f"{names[i]} → {names[7]}" for i in reversed(range(7))]]
    for i in range(7):
        line = told[f"{names[i]} → {names[7]}"]
        sign, verdict = ("≤", "linked") if i == 6 else ("≥", "refused")
        assert line.startswith(f"W {sign} {w[i]} = {sign} ") and line.endswith(f"× tolerance {verdict}")
    browser.point(right + 20, top - 20)
    browser.until(f"{TIP}.hidden")


def test_heat_map_by_keyboard(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["200"])
    browser.eval("document.getElementById('heat').focus({focusVisible: true})")
    names = browser.eval("JSON.parse(document.getElementById('heat-data').textContent).names")
    browser.press("ArrowRight")
    browser.press("ArrowDown")
    said = browser.eval("document.getElementById('heat-say').textContent")
    assert said.startswith(f"{names[1]} → {names[2]} · W ")
    browser.press("Escape")
    browser.until(f"{TIP}.hidden")


def test_marks_by_keyboard(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["8"])
    assert browser.eval("document.querySelectorAll('svg.chart [tabindex=\"0\"]').length") == browser.eval(
        "document.querySelectorAll('svg.chart').length"
    )
    browser.eval("document.querySelector('path.point').focus()")
    browser.press("ArrowRight")
    text = browser.eval(f"{TIP}.textContent")
    assert text.startswith("group0-site1") and text.replace("\n", ", ") == browser.eval("document.activeElement.getAttribute('aria-label')")


def test_every_control_can_be_reached(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["200"])
    seen = set()
    for _ in range(80):
        browser.press("Tab")
        seen.add(browser.eval("(e => e.id || e.getAttribute('aria-label') || e.textContent.trim())(document.activeElement)"))
    heads = browser.eval("[...document.querySelectorAll('#clients button')].map((b) => b.textContent.trim())")
    assert {"Skip to the verdict", "heat", "Find a client", "Accuracy by client", *heads} <= seen


def test_sorting(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["8"])
    before = column(browser, "client")
    at = browser.eval("[...document.querySelectorAll('#clients th')].findIndex((h) => h.textContent.trim() === 'accuracy') + 1")
    browser.click(f"#clients th:nth-child({at}) button")
    down = [float(v) for v in column(browser, "accuracy")]
    assert down == sorted(down, reverse=True) and len(set(down)) > 1
    assert browser.eval(f"document.querySelector('#clients th:nth-child({at})').getAttribute('aria-sort')") == "descending"
    browser.press("Enter")  # the button has the focus
    assert [float(v) for v in column(browser, "accuracy")] == down[::-1]
    browser.click("#clients th:first-child button")
    assert column(browser, "client") == sorted(before)
    assert browser.eval("document.querySelectorAll('#clients [aria-sort]').length") == 1


def test_numbers_in_names_sort_as_numbers(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["200"])
    browser.click("#clients th:first-child button")
    browser.click("#clients th:first-child button")
    assert column(browser, "client")[0] == "group6-site199"
    browser.click("#clients th:first-child button")
    assert column(browser, "client")[9:11] == ["group0-site9", "group0-site10"]


def test_finding_a_client(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["200"])
    browser.click("input[type=search]")
    browser.call("Input.insertText", text="site19")
    shown = browser.eval("[...document.querySelectorAll('#clients tbody tr')].filter((r) => !r.hidden).length")
    assert shown == 11 and browser.eval("document.getElementById('clients-count').textContent") == "11 shown"


def test_sorting_a_comparison(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["comparison"])
    browser.click("table th:nth-child(4) button")  # ARI, the best first, none last
    assert column(browser, "method", "table")[-2:] == ["IFCA", "FedAvg"]


def test_heat_map_follows_the_width(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["8"])
    browser.call("Emulation.setDeviceMetricsOverride", width=375, height=800, deviceScaleFactor=2, mobile=True)
    browser.until("(c => c.clientWidth < 340 && c.width === Math.round(2 * c.clientWidth))(document.querySelector('#heat canvas'))")
    assert browser.complaints == []


def test_a_printed_heat_map_keeps_its_shape(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["8"])  # paper is narrower than the window, and nothing draws the canvas again for it
    browser.eval("document.querySelector('#heat canvas').style.width = '200px'")
    shown, drawn = browser.eval("(c => [c.clientHeight / c.clientWidth, c.height / c.width])(document.querySelector('#heat canvas'))")
    assert shown == pytest.approx(drawn, rel=0.02)


def test_the_heat_map_is_drawn_again_for_paper(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["8"], dark=True)  # whose light names could not be seen on paper
    size = "((c) => [c.width, Math.round(c.clientWidth * devicePixelRatio)])(document.querySelector('#heat canvas'))"
    browser.eval(f"matchMedia('print').addEventListener('change', (e) => {{ if (e.matches) window.printed = {size}; }})")
    before = browser.eval(size)
    browser.call("Page.printToPDF")
    drawn, shown = browser.eval("window.printed")
    assert drawn == shown < before[0] and browser.eval(size) == before
