"""SVG elements with every attribute and text escaped, scales, and ticks.

Charts are ``WIDTH`` units wide, readable on a phone and in half of a desktop page. Colours are classes of the page's style sheet, so that
dark and light pages share a chart.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

Array = np.ndarray[Any, Any]
WIDTH = 380.0
"""Of a chart."""
COLOURS = 10
"""Clusters with a colour of their own; the others are grey."""


def visible(text: object, most: int | None = None) -> str:
    r"""Return text for a page: control and direction characters replaced, shortened if asked.

    Examples
    --------
    >>> visible("a\u202eb"), visible("a very long name", 8)
    ('a�b', 'a very …')
    """
    shown = "".join("�" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co") else c for c in str(text))
    return shown if most is None or len(shown) <= most else shown[: most - 1] + "…"


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """Return an element. ``class_`` stands for ``class``, an underscore for a hyphen; numbers are rounded, ``None`` is left out.

    Examples
    --------
    >>> tag("text", "<b>", x=1.234567, class_="a")
    Markup('<text x="1.23" class="a">&lt;b&gt;</text>')
    """
    parts = []
    for key, value in attributes.items():
        if value is None:
            continue
        shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float | np.floating) else value
        parts.append(Markup(' {}="{}"').format(Markup(key.rstrip("_").replace("_", "-")), shown))
    inside = Markup("").join(children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup("").join(parts), inside)


def chart(width: float, height: float, label: str, *children: str) -> Markup:
    """Return a chart that is one tab stop; the arrow keys move from mark to mark."""
    box = f"0 0 {width:.0f} {height:.0f}"
    return tag("svg", *children, viewBox=box, role="group", aria_label=label, class_="chart", data_roving="")


def mark(name: str, tip: str, **attributes: object) -> Markup:
    return tag(name, data_tip=tip, aria_label=tip.replace("\n", ", "), role="img", tabindex="-1", **attributes)


SHAPES = ("circle", "square", "diamond", "triangle", "plus", "wedge", "star", "cross", "hexagon", "bar")


def shape_path(shape: str, x: float, y: float, r: float) -> str:
    """Return the outline of a shape of about the area of a circle of radius ``r``."""

    def polygon(points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{x + r * a:.2f} {y + r * b:.2f}" for a, b in points) + "Z"

    def ring(n: int, start: float, radii: Sequence[float]) -> list[tuple[float, float]]:
        angles = [start + 2 * math.pi * i / n for i in range(n)]
        return [(radii[i % len(radii)] * math.cos(a), radii[i % len(radii)] * math.sin(a)) for i, a in enumerate(angles)]

    if shape == "circle":
        return f"M{x - r:.2f} {y:.2f}a{r:.2f} {r:.2f} 0 1 0 {2 * r:.2f} 0a{r:.2f} {r:.2f} 0 1 0 {-2 * r:.2f} 0Z"
    if shape in ("plus", "cross"):
        t = 0.38
        plus = [(-t, -1.1), (t, -1.1), (t, -t), (1.1, -t), (1.1, t), (t, t), (t, 1.1), (-t, 1.1), (-t, t), (-1.1, t), (-1.1, -t), (-t, -t)]
        c = math.sqrt(0.5)
        return polygon(plus if shape == "plus" else [(c * (a - b), c * (a + b)) for a, b in plus])
    corners = {
        "square": ring(4, math.pi / 4, [1.25]),
        "diamond": ring(4, 0.0, [1.3]),
        "triangle": ring(3, -math.pi / 2, [1.4]),
        "wedge": ring(3, math.pi / 2, [1.4]),
        "star": ring(10, -math.pi / 2, [1.5, 0.65]),
        "hexagon": ring(6, 0.0, [1.15]),
        "bar": [(-1.5, -0.55), (1.5, -0.55), (1.5, 0.55), (-1.5, 0.55)],
    }
    return polygon(corners[shape])


@dataclass(frozen=True)
class Axis:
    """Map values to units of a chart along one axis."""

    low: float
    high: float
    start: float
    end: float
    bend: Callable[[float], float] = float

    def __call__(self, value: float) -> float:
        a, b = self.bend(self.low), self.bend(self.high)
        share = 0.5 if a == b else (self.bend(min(max(value, self.low), self.high)) - a) / (b - a)
        return self.start + share * (self.end - self.start)


def bent(value: float) -> float:
    """Signed square root: it widens the range around 1 and keeps large distances on the page."""
    return math.copysign(math.sqrt(abs(value)), value)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most ``most`` + 1 round numbers between two values.

    Examples
    --------
    >>> ticks(0.62, 1.0, 4)
    [0.7, 0.8, 0.9, 1.0]
    """
    raw = (high - low) / max(most, 1)
    if not raw > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float | None) -> str:
    """Write a distance or a ratio with three digits that matter, a dash for none.

    Examples
    --------
    >>> number(0.012345), number(12.345), number(None)
    ('0.0123', '12.3', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    digits = next((digits for digits, below in ((4, 0.1), (3, 1), (2, 10), (1, 100)) if abs(value) < below), 0)
    return f"{value:.{digits}f}"
