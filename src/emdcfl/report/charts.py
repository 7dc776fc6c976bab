"""The charts of one run: map of clients, distances around the tolerance, accuracy by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from emdcfl.clustering.pairs import LOWER, SIGNS, UPPER, Edge, PairRatios
from emdcfl.core.metric import Metric
from emdcfl.core.units import plural
from emdcfl.report.load_run import Run
from emdcfl.report.svg import WIDTH, Array, Axis, bent, chart, mark, number, shape_path, tag, ticks, visible
from emdcfl.runs.personal import FINE_TUNED
from emdcfl.runs.scoring import tested_scores
from emdcfl.runs.verdict.advice import BASELINES, LINEAR, LOGISTIC, rivals
from emdcfl.runs.verdict.what_differs import value_in_words

NAMED = 24
"""Up to this many clients each has its name on the map."""
LINKS = 300
"""Up to this many links are drawn on the map."""
HEAT = 500
"""Most clients of the heat map; beyond, clients are left out at equal steps."""
LOWEST_R2 = -1.0
"""Where lines of R² are cut off below: a model that has not learnt yet may be anywhere."""
TIGHTEST = 14
"""Most clients in the drawing of margins: those closest to the tolerance."""


def client_map(run: Run) -> tuple[Markup, float]:
    """Draw clients at distances that follow W; return the chart and the share of variance it shows."""
    pairs, labels = run.pairs, run.clusters
    assert pairs is not None and labels is not None
    points, share = classical_mds(symmetric(pairs.W))
    r = 6.0 if len(points) <= NAMED else 4.2 if len(points) <= 100 else 3.4
    x, y, unit, height = _fit(points, r)
    parts: list[Markup] = [tag("rect", x=0.5, y=0.5, width=WIDTH - 1, height=height - 1, rx=6, class_="frame")]
    linked = np.argwhere(np.triu(pairs.deciding < 1, 1))
    if len(linked) <= LINKS:
        parts += [tag("line", x1=x[a], y1=y[a], x2=x[b], y2=y[b], class_="link") for a, b in linked]
    names = _place_names(run.clients, x, y, r, height) if len(x) <= NAMED else _place_clusters(run, x, y)
    for i, client in enumerate(run.clients):
        lines = [visible(client), f"cluster {labels[i]}"]
        if run.groups is not None:
            lines.append(f"true group {visible(run.groups[i])}")
        if (score := run.score_at(client, run.variants[0])) is not None:
            lines.append(f"{run.metric.label} {run.metric.text(score)}")
        shape = run.shapes[run.groups[i]] if run.groups is not None else "circle"
        parts.append(mark("path", "\n".join(lines), d=shape_path(shape, x[i], y[i], r), class_=f"point {run.colours[labels[i]]}"))
    epsilon = pairs.tolerance
    if epsilon is not None and epsilon > 0 and unit * epsilon <= 200:
        x0, y0 = 14.0, height - 14
        parts.append(tag("path", d=f"M{x0:.1f} {y0 - 3:.1f}v6m0 -3h{unit * epsilon:.1f}m0 -3v6", class_="ruler"))
        parts.append(tag("text", f"tolerance {epsilon:.3g}", x=x0 + max(unit * epsilon, 0.0) + 7, y=y0 + 3.5, class_="small muted"))
    return chart(WIDTH, height, f"Map of {plural(len(x), 'client')}: the farther apart, the more their data differ", *parts, *names), share


def symmetric(w: Array) -> Array:
    """Symmetrise distances: the mean of the known directions; unknown pairs get the length of the shortest path."""
    from scipy.sparse.csgraph import shortest_path

    w = np.asarray(w, dtype=np.float64)
    known = ~np.isnan(w)
    total = np.where(known, w, 0.0) + np.where(known, w, 0.0).T
    times = known.astype(int) + known.T.astype(int)
    d = np.where(times > 0, np.maximum(total / np.maximum(times, 1), 0.0), np.nan)
    np.fill_diagonal(d, 0.0)
    if np.isnan(d).any():
        smallest = 1e-9  # zero means "no edge" to scipy
        ways = shortest_path(np.where(np.isnan(d), 0.0, np.maximum(d, smallest)), directed=False)
        ways[~np.isfinite(ways)] = np.max(ways[np.isfinite(ways)], initial=0.0) * 1.2 or 1.0
        d = np.where(np.isnan(d), ways, d)
    return d


def classical_mds(d: Array) -> tuple[Array, float]:
    r"""Return points in the plane for symmetric distances, and the share of their (positive) variance the plane shows.

    The coordinates are :math:`V_2\Lambda_2^{1/2}` with the two leading eigenpairs of :math:`-\tfrac12 J D^{(2)} J`,
    :math:`J = I - \tfrac1n 11^T`.

    Examples
    --------
    >>> points, share = classical_mds(np.array([[0, 3, 4], [3, 0, 5], [4, 5, 0.0]]))
    >>> bool(np.allclose(np.linalg.norm(points[1] - points[2]), 5)), round(share, 6)
    (True, 1.0)
    """
    n = len(d)
    j = np.eye(n) - 1.0 / n
    values, vectors = np.linalg.eigh(-0.5 * j @ (d**2) @ j)
    values, vectors = values[::-1], vectors[:, ::-1]
    points = np.zeros((n, 2))
    for axis in range(min(2, n)):
        v = vectors[:, axis]
        sign = np.sign(v[np.abs(v).argmax()]) or 1.0  # eigenvectors have no sign of their own
        points[:, axis] = sign * v * np.sqrt(max(values[axis], 0.0))
    positive = values[values > 0].sum()
    return points, float(values[:2].clip(min=0.0).sum() / positive) if positive > 0 else 1.0


def _fit(points: Array, r: float) -> tuple[list[float], list[float], float, float]:
    """Scale coordinates to the frame; return x, y, units per distance and the height of the frame."""
    across, down = (66.0 if len(points) <= NAMED else 34.0), 46.0  # names need room at the sides
    low, high = points.min(axis=0), points.max(axis=0)
    span = np.maximum(high - low, 1e-12)
    unit = 0.0 if float(span.max()) <= 1e-12 else float(min((WIDTH - 2 * across) / span[0], (340.0 - 2 * down) / span[1]))
    height = min(max(float(span[1]) * unit + 2 * down, 240.0), 340.0)
    placed = (points - (low + high) / 2) * unit * np.array([1.0, -1.0]) + np.array([WIDTH / 2, height / 2])
    placed = np.clip(_apart(placed, 1.9 * r), r + 3, np.array([WIDTH, height]) - r - 3)
    return placed[:, 0].tolist(), placed[:, 1].tolist(), unit, height


def _apart(points: Array, least: float) -> Array:
    """Move overlapping points apart, so that each can be seen."""
    angle = np.pi * (3 - np.sqrt(5)) * np.arange(len(points))  # separates points at the same position
    p = points + 1e-3 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    for _ in range(80):
        step = p[:, None] - p[None]
        far = np.linalg.norm(step, axis=2)
        np.fill_diagonal(far, np.inf)
        lack = np.clip(least - far, 0.0, None)
        if not lack.any():
            break
        p = p + 0.35 * (step / far[:, :, None] * lack[:, :, None]).sum(axis=1) / np.maximum((lack > 0).sum(axis=1), 1)[:, None] ** 0.5
    return np.asarray(p)


def _place_names(clients: Sequence[str], x: list[float], y: list[float], r: float, height: float) -> list[Markup]:
    """Place each name where it covers neither a point nor another name; omit names that do not fit."""
    taken = [(a - r, b - r, a + r, b + r) for a, b in zip(x, y, strict=True)]
    parts = []
    for i, client in enumerate(clients):
        text = visible(client, 18)
        wide, high, gap = 5.9 * len(text), 10.0, r + 4
        offsets = [(gap, -5), (-gap - wide, -5), (-wide / 2, -gap - high), (-wide / 2, gap)]
        offsets += [(s * 6 - (wide if s < 0 else 0), t) for t in (-gap - high - 3, gap + 3, -gap - 20, gap + 12) for s in (1, -1)]
        for dx, dy in offsets:
            box = (x[i] + dx, y[i] + dy, x[i] + dx + wide, y[i] + dy + high)
            inside = box[0] > 4 and box[2] < WIDTH - 4 and box[1] > 4 and box[3] < height - 24
            if inside and not any(box[0] < o[2] and o[0] < box[2] and box[1] < o[3] and o[1] < box[3] for o in taken):
                taken.append(box)
                parts.append(tag("text", text, x=box[0], y=box[3] - 1.5, class_="small name", aria_hidden="true"))
                break
    return parts


def _place_clusters(run: Run, x: list[float], y: list[float]) -> list[Markup]:
    """Write the number of each coloured cluster of two or more above it."""
    parts = []
    for k, at in run.members.items():
        if run.colours[k] != "kx" and len(at) > 1:
            a, b = float(np.median([x[i] for i in at])), min(y[i] for i in at)
            parts.append(tag("text", str(k), x=a, y=max(b - 8, 14.0), class_="badge", aria_hidden="true"))
    return parts


def _ratio_axis(pairs: PairRatios, start: float, y: float, top: float) -> tuple[Axis, list[Markup]]:
    """Axis in units of the tolerance, with the tolerance marked."""
    known = pairs.deciding[~np.isnan(pairs.deciding)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 2.0)
    scale = Axis(min(low * 1.05, 0.0), max(high * 1.05, 1.5), start, WIDTH - 10, bent)
    parts, last = [], -1e9
    at = scale(1.0)
    for value in (0, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500):
        place = scale(value)
        clear = place - last > 30 and abs(place - at) > 30
        if value <= scale.high and (clear or value == 1):
            last = place
            parts.append(tag("line", x1=place, x2=place, y1=top, y2=y, class_="tolerance" if value == 1 else "grid"))
            style = "small strong middle" if value == 1 else "small muted middle"
            parts.append(tag("text", f"{value:g}×", x=place, y=y + 13, class_=style))
    return scale, parts


def pair_histogram(run: Run) -> Markup:
    """Draw a histogram of pairs: those of one cluster above the axis, those of two clusters below."""
    pairs = run.pairs
    assert pairs is not None
    top, middle, bottom = 16.0, 74.0, 132.0
    scale, parts = _ratio_axis(pairs, 10.0, bottom, top)
    edges = np.linspace(bent(scale.low), bent(scale.high), 49)
    values = [float(np.copysign(v * v, v)) for v in edges]
    bars = []
    for same, what in ((True, "inside clusters"), (False, "between clusters")):
        found = np.clip(pairs.pairs(same=same), scale.low, scale.high)
        counts, _ = np.histogram([bent(v) for v in found], bins=edges)
        for i in np.flatnonzero(counts).tolist():
            tall = max(52.0 * float(counts[i]) / max(int(counts.max()), 1), 2.0)
            tip = f"{plural(int(counts[i]), 'pair')} {what}\n{number(values[i])} to {number(values[i + 1])} × tolerance"
            place, wide = scale(values[i]), max(scale(values[i + 1]) - scale(values[i]) - 1, 1.0)
            up = middle - 1 - tall if same else middle + 1
            bars.append(mark("rect", tip, x=place + 0.5, y=up, width=wide, height=tall, rx=1, class_="inside" if same else "outside"))
    parts.append(tag("line", x1=10, x2=WIDTH - 10, y1=middle, y2=middle, class_="axis"))
    parts.append(tag("text", "same cluster", x=WIDTH - 12, y=top + 6, class_="small end name ink-inside"))
    parts.append(tag("text", "different clusters", x=12, y=bottom - 4, class_="small name ink-outside"))
    return chart(WIDTH, 152, "Pairs of clients by distance, in units of the tolerance", *parts, *bars)


def margin_rows(run: Run) -> tuple[Markup, int]:
    """Draw the farthest partner inside and nearest client outside of the tightest clients; return the chart and their number."""
    pairs = run.pairs
    assert pairs is not None
    tight = sorted(range(len(run.clients)), key=lambda i: (pairs.tightness(i), i))[:TIGHTEST]
    tight = [i for i in tight if np.isfinite(pairs.tightness(i))]
    bottom = 8 + 18.0 * len(tight)
    scale, parts = _ratio_axis(pairs, 108.0, bottom, 4.0)
    for row, i in enumerate(tight):
        y = 8 + 18.0 * row + 9
        inside, outside = pairs.edge(i, same=True), pairs.edge(i, same=False)
        parts.append(tag("text", visible(run.clients[i], 16), x=97, y=y + 3.5, class_="small end"))
        if inside is not None and outside is not None:
            parts.append(tag("line", x1=scale(inside.ratio), x2=scale(outside.ratio), y1=y, y2=y, class_="span"))
        if inside is not None:
            parts.append(_edge_mark(run, inside, i, scale, y, "farthest in its own cluster", "inside"))
        if outside is not None:
            parts.append(_edge_mark(run, outside, i, scale, y, "nearest in another cluster", "outside"))
    return chart(WIDTH, bottom + 20, "Margins of the clients closest to the tolerance", *parts), len(tight)


def _edge_mark(run: Run, edge: Edge, client: int, scale: Axis, y: float, what: str, class_: str) -> Markup:
    """Draw a dot for a value, and for a bound a triangle that points to where the value lies."""
    x, r = scale(edge.ratio), 4.2
    side = {LOWER: 1, UPPER: -1}.get(edge.kind)
    outline = (
        shape_path("circle", x, y, r) if side is None else f"M{x + side * 1.5 * r:.2f} {y:.2f}l{-side * 2 * r:.2f} {-r:.2f}v{2 * r:.2f}Z"
    )
    value = f"{SIGNS.get(edge.kind, '')}{number(edge.ratio)} × tolerance"
    tip = f"{visible(run.clients[client])}\n{what}: {visible(run.clients[edge.other])}\n{value}"
    return mark("path", tip, d=outline, class_=class_)


def two_values(found: Mapping[str, Any]) -> Markup:
    """Draw a group's mean and the others', each with a standard deviation inside sites to both sides."""
    here, there, sd = (float(found[key]) for key in ("here", "there", "sd"))
    low, high = min(here, there) - sd, max(here, there) + sd
    scale = Axis(low, high, 8.0, 212.0)
    parts = []
    for y, value, who, style in ((8.0, here, "here", "inside"), (22.0, there, "the others", "other")):
        tip = f"{who}: {value_in_words(found, 'here' if style == 'inside' else 'there')}"
        parts.append(tag("line", x1=scale(value - sd), x2=scale(value + sd), y1=y, y2=y, class_="span"))
        parts.append(mark("path", tip, d=shape_path("circle", scale(value), y, 4.2), class_=style))
    return chart(220, 30, f"{found['feature']}: this group above, the others below", *parts)


def round_lines(run: Run, variant: str) -> Markup | None:
    """Draw accuracy (or R²) by round: mean, worst client, clusters if there are few, and baselines."""
    lines: list[tuple[str, str, dict[int, float]]] = []
    if run.clusters is not None and 1 < len(run.colours) <= 10:
        for k, at in run.members.items():
            members = [run.clients[i] for i in at]
            lines.append((f"cluster {k}", f"line {run.colours[k]}", _by_round(run, variant, members)[0]))
    for name, other in run.baselines.items():
        if name.endswith(FINE_TUNED) or name in (LOGISTIC, LINEAR):  # no rounds of their own
            continue
        lines.append((BASELINES.get(name, name), f"line baseline {name}", _by_round(other, variant)[0]))
    mean, worst = _by_round(run, variant)
    lines += [("worst client", "line worst", worst), ("mean", "line mean", mean)]
    lines = [(name, style, values) for name, style, values in lines if values]
    if not lines:
        return None
    return _draw_lines(lines, f"{run.metric.heading} by round, {visible(variant)}", run.metric)


def _by_round(run: Run, variant: str, clients: Sequence[str] | None = None) -> tuple[dict[int, float], dict[int, float]]:
    scored = run.summary.get("scored")
    wanted = set(clients if clients is not None else scored if scored is not None else run.clients)
    found = tested_scores([row for row in run.rows if row["client"] in wanted])
    scores = {t: by_variant[variant] for t, by_variant in found.items() if variant in by_variant}
    return {t: float(np.mean(v)) for t, v in scores.items()}, {t: min(v) for t, v in scores.items()}


def _draw_lines(lines: list[tuple[str, str, dict[int, float]]], label: str, metric: Metric) -> Markup:
    height, values = 230.0, [v for _, _, found in lines for v in found.values()]
    rounds = sorted({t for _, _, found in lines for t in found})
    least = LOWEST_R2 if metric is Metric.R2 else 0.0
    low = max(least, min(values) - max(0.02, 0.08 * (max(values) - min(values))))
    top = min(1.0, max(values) + 0.01) if max(values) > low else 0.0  # all values may lie below the drawing
    y = Axis(low, top, height - 24, 10.0)
    x = Axis(rounds[0], rounds[-1], 46.0, WIDTH - 14)
    parts: list[Markup] = []
    for value in ticks(low, y.high, 5):
        parts.append(tag("line", x1=40, x2=WIDTH - 8, y1=y(value), y2=y(value), class_="grid"))
        shown = f"{value:g}" if metric is Metric.R2 else f"{value:.0%}" if y.high - low > 0.06 else f"{value:.1%}"
        shown = f"≤{shown}" if value == low > min(values) else shown  # lines end here
        parts.append(tag("text", shown, x=35, y=y(value) + 3.5, class_="small muted end"))
    for t in ticks(rounds[0], rounds[-1], 8):
        if t == int(t):
            parts.append(tag("text", str(int(t)), x=x(t), y=height - 8, class_="small muted middle"))
    marks: list[Markup] = []
    for name, style, found in lines:
        path = "M" + "L".join(f"{x(t):.1f} {y(max(v, low)):.1f}" for t, v in sorted(found.items()))
        parts.append(tag("path", d=path, class_=style))
        for t, v in sorted(found.items()):
            tip, dot = f"{name}\nround {t}: {metric.text(v)}", style.replace("line", "dot", 1)
            marks.append(mark("circle", tip, cx=x(t), cy=y(max(v, low)), r=3.2, class_=dot))
    return chart(WIDTH, height, label, *parts, *marks)


def gain_rows(run: Run) -> Markup | None:
    """Draw what this run gains over each baseline, in points with its interval, around zero."""
    found = rivals(run.summary, run.others)
    if not found:
        return None
    bottom = 8 + 22.0 * len(found)
    scale, unit = run.metric.scale, run.metric.unit
    low, high = scale * min(g.low for g in found.values()), scale * max(g.high for g in found.values())
    room = 0.06 * max(high - low, 0.01 * scale)
    x = Axis(min(low, 0.0) - room, max(high, 0.0) + room, 132.0, WIDTH - 12)
    parts: list[Markup] = []
    for value in ticks(x.low, x.high, 5):
        parts.append(tag("line", x1=x(value), x2=x(value), y1=4, y2=bottom, class_="tolerance" if value == 0 else "grid"))
        parts.append(tag("text", f"{value:+g}" if value else "0", x=x(value), y=bottom + 14, class_="small muted middle"))
    for i, (name, gain) in enumerate(found.items()):
        y, what = 8 + 22.0 * i + 11, BASELINES.get(name, name)
        short = visible(what.replace(" for all, fine-tuned at home", ", fine-tuned").replace(" regression per site", " regression"), 24)
        parts.append(tag("text", short, x=122, y=y + 3.5, class_="small end"))
        parts.append(tag("line", x1=x(scale * gain.low), x2=x(scale * gain.high), y1=y, y2=y, class_="span"))
        tip = f"against {visible(what)}\n{gain.points()}"
        style = {1: "inside", -1: "outside"}.get(gain.sign, "weak-dot")
        parts.append(mark("path", tip, d=shape_path("circle", x(scale * gain.mean), y, 4.6), class_=style))
    label = f"Gain of this run over each other training, {'points of accuracy' if unit == 'points' else unit}"
    return chart(WIDTH, bottom + 22, label, *parts)


def heat_data(run: Run) -> dict[str, Any]:
    """Return the data of the heat map: clients by cluster, W to four digits, tolerances, kinds."""
    pairs = run.pairs
    assert pairs is not None and run.clusters is not None
    order = run.order
    if len(order) > HEAT:
        order = [order[i] for i in np.linspace(0, len(order) - 1, HEAT).round().astype(int).tolist()]
    w, e, kind = (a[np.ix_(order, order)] for a in (pairs.W, pairs.epsilon, pairs.kind))
    per_row = [next((v for v in row if v == v), None) for row in e.tolist()]
    shared = all(v != v or v == per_row[i] for i, row in enumerate(e.tolist()) for v in row)
    return {
        "names": [visible(run.clients[i]) for i in order],
        "clusters": [run.clusters[i] for i in order],
        "colours": [run.colours[run.clusters[i]] for i in order],
        "w": [None if v != v else float(f"{v:.4g}") for v in w.ravel().tolist()],
        "epsilon": [float(f"{v:.4g}") if v is not None and v == v else None for v in (per_row if shared else e.ravel().tolist())],
        "kind": "".join(str(int(k)) for k in kind.ravel()),
    }
