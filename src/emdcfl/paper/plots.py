"""Figures of comparisons and sweeps: panels of matrices between clients, maps of ARI over tolerance and projection. No pyplot state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from emdcfl.core.units import plot_text
from emdcfl.runs.figures import new_figure, png

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Panel:
    """A matrix between clients and their groups, in which they are laid out."""

    title: str
    matrix: Array
    groups: Sequence[str] | None = None


def _grid(panels: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """Return a figure with axes for some panels in at most so many columns; axes left over are empty."""
    columns = min(columns, panels)
    rows = -(-panels // columns)
    figure = new_figure(width * columns, height * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[panels:]:
        axis.set_axis_off()
    return figure, axes


def matrices(panels: Sequence[Panel], *, label: str, title: str) -> bytes:
    """Draw matrices side by side, each with a colour scale of its own and lines between groups; return PNG bytes."""
    figure, axes = _grid(len(panels), 5, 3.0, 2.9)
    for axis, panel in zip(axes.flat, panels, strict=False):
        shown = np.array(panel.matrix, dtype=float)
        np.fill_diagonal(shown, np.nan)  # a client's distance from itself would only stretch the scale
        axis.set_facecolor("0.85")
        image = axis.imshow(shown, cmap="RdBu_r", interpolation="nearest")
        axis.set_title(plot_text(panel.title), fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
        for i, (one, other) in enumerate(pairwise(panel.groups or ())):
            if one != other:
                axis.axhline(i + 0.5, color="black", linewidth=0.8)
                axis.axvline(i + 0.5, color="black", linewidth=0.8)
        bar = figure.colorbar(image, ax=axis, shrink=0.75)
        bar.ax.tick_params(labelsize=6)
    figure.suptitle(f"{title}\n{label}", fontsize=10)
    return png(figure)


def ari_maps(maps: Sequence[tuple[str, Sequence[dict[str, Any]]]], *, title: str, columns: int = 2) -> bytes:
    """Draw ARI over tolerance (across) and projection ratio (up), one map per title; the last column is the automatic tolerance."""
    figure, axes = _grid(len(maps), columns, 5.6, 2.6)
    image: Any = None
    for axis, (name, records) in zip(axes.flat, maps, strict=False):
        ordered = sorted(records, key=lambda r: r["ratio"])
        values = np.array([[*r["ari"], r["auto"]] for r in ordered])
        image = axis.imshow(values, cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto", origin="lower", interpolation="nearest")
        ticks = [f"{e:g}" for e in ordered[0]["epsilons"]]
        axis.set_xticks(range(len(ticks) + 1), [*ticks, "auto"], rotation=90, fontsize=6)
        axis.set_yticks(range(len(ordered)), [f"{r['ratio']:g}" for r in ordered], fontsize=7)
        axis.axvline(len(ticks) - 0.5, color="white", linewidth=2)
        axis.set_xlabel("tolerance ε", fontsize=8)
        axis.set_ylabel("dim(R) / dim(Z)", fontsize=8)
        axis.set_title(plot_text(name), fontsize=9)
    figure.colorbar(image, ax=axes, label="ARI", shrink=0.8)
    figure.suptitle(title, fontsize=10)
    return png(figure)


def overview(points: Sequence[tuple[str, Array]], panel: Panel, linked: Array, clusters: Sequence[int], names: Sequence[str]) -> bytes:
    """Draw the algorithm on a small federation: samples in one client's embedding, distances, mutual links, clusters."""
    figure, axes = _grid(4, 4, 3.4, 3.6)
    names = [plot_text(name) for name in names]
    first, second, third, fourth = axes.flat
    for name, xy in points:
        first.scatter(xy[:, 0], xy[:, 1], s=6, alpha=0.6, label=plot_text(name))
    first.legend(fontsize=6, loc="best")
    first.set_title("1. embed under one client's model", fontsize=9)
    first.set_xticks([])
    first.set_yticks([])
    shown = np.array(panel.matrix, dtype=float)
    np.fill_diagonal(shown, np.nan)
    second.imshow(shown, cmap="RdBu_r", interpolation="nearest")
    second.set_title("2. distances W, each row its own model", fontsize=9)
    third.imshow(linked, cmap="Greys", vmin=0, vmax=1.4, interpolation="nearest")
    third.set_title("3. link where both accept", fontsize=9)
    for axis in (second, third):
        axis.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
        axis.set_yticks(range(len(names)), names, fontsize=6)
    angles = 2 * np.pi * np.arange(len(names)) / len(names)
    xy = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for i, j in zip(*np.nonzero(np.triu(linked, 1)), strict=True):
        fourth.plot(xy[[i, j], 0], xy[[i, j], 1], color="0.4", linewidth=1)
    fourth.scatter(xy[:, 0], xy[:, 1], c=list(clusters), cmap="tab10", vmin=0, vmax=9, s=120, zorder=2)
    for (x, y), name in zip(xy, names, strict=True):
        fourth.annotate(name, (1.25 * x, 1.25 * y), ha="center", va="center", fontsize=6)
    fourth.set_xlim(-1.6, 1.6)
    fourth.set_ylim(-1.6, 1.6)
    fourth.set_aspect("equal")
    fourth.set_axis_off()
    fourth.set_title("4. equal neighbourhoods: one model each", fontsize=9)
    return png(figure)
