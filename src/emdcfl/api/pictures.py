"""Pictures for notebooks: distances as a heat map, a tree or a map, and methods side by side. pyplot's global state is left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emdcfl.core.units import plot_text
from emdcfl.methods.base import Distances
from emdcfl.runs.figures import heatmap, new_figure, png

NAMED = 40
"""Up to this many clients each has its name on the map."""


@dataclass(frozen=True, repr=False)
class Picture:
    """A matplotlib figure that a notebook shows."""

    figure: Any

    def save(self, path: str | Path) -> Path:
        """Write the figure; the suffix says the format."""
        self.figure.savefig(path)
        return Path(path)

    def _repr_png_(self) -> bytes:
        return png(self.figure)

    def __repr__(self) -> str:
        width, height = self.figure.get_size_inches()
        return f"Picture({width:.0f} × {height:.0f} inches; save(path) writes it)"


def heat(distances: Distances, clients: Sequence[str], clusters: Sequence[int]) -> Picture:
    """Draw the distances of all pairs as a heat map, each cluster framed."""
    return Picture(heatmap(distances, clients, clusters))


def tree(distances: Distances, clients: Sequence[str], clusters: Sequence[int]) -> Picture:
    """Draw which clients merge at which distance (average linkage of the mean of both directions), names coloured by cluster."""
    from scipy.cluster.hierarchy import dendrogram, linkage
    from scipy.spatial.distance import squareform

    from emdcfl.report.charts import symmetric

    figure = new_figure(7.0, float(np.clip(0.28 * len(clients) + 1.2, 2.5, 16.0)))
    axes = figure.add_subplot()
    drawn = dendrogram(linkage(squareform(symmetric(distances.W), checks=False), "average"), no_plot=True)
    for heights, places in zip(drawn["dcoord"], drawn["icoord"], strict=True):
        axes.plot(heights, places, color="0.45", linewidth=1.2)
    axes.set_yticks([5 + 10 * i for i in range(len(clients))], [plot_text(clients[i]) for i in drawn["leaves"]])
    for text, i in zip(axes.get_yticklabels(), drawn["leaves"], strict=True):
        text.set_color(_colour(clusters[i]))
    axes.set_xlim(left=-0.02 * max(map(max, drawn["dcoord"])))
    axes.set_xlabel("distance W at which they merge")
    _plain(axes)
    return Picture(figure)


def map_(distances: Distances, clients: Sequence[str], clusters: Sequence[int]) -> Picture:
    """Draw clients as points whose distances follow W, coloured by cluster."""
    from emdcfl.report.charts import classical_mds, symmetric

    points, share = classical_mds(symmetric(distances.W))
    figure = new_figure(6.0, 4.5)
    axes = figure.add_subplot()
    for k in sorted(set(clusters)):
        own = points[np.asarray(clusters) == k]
        axes.scatter(own[:, 0], own[:, 1], color=_colour(k), label=f"cluster {k}", s=46, zorder=2)
    if len(clients) <= NAMED:
        for name, point in zip(clients, points, strict=True):
            axes.annotate(plot_text(name), point, xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.15)
    axes.set_title(f"Clients by distance ({share:.0%} of the variance shown)", fontsize=10)
    if len(set(clusters)) <= 10:
        axes.legend(fontsize=8, frameon=False)
    _plain(axes)
    return Picture(figure)


def bars(names: Sequence[str], means: Sequence[float], ends: Sequence[tuple[float, float] | None], what: str) -> Picture:
    """Draw a point and its interval for every method, the first on top."""
    figure = new_figure(6.5, 0.38 * len(names) + 1.1)
    axes = figure.add_subplot()
    places = np.arange(len(names))[::-1]
    for place, interval in zip(places, ends, strict=True):
        if interval is not None:
            axes.plot(interval, (place, place), color="0.55", linewidth=2.2, solid_capstyle="round", zorder=1)
    axes.scatter(means, places, color="tab:blue", zorder=2)
    axes.set_yticks(places, [plot_text(name) for name in names])
    axes.set_xlabel(what)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    _plain(axes)
    return Picture(figure)


def _colour(cluster: int) -> str:
    return f"C{cluster % 10}"


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


KINDS: dict[str, Callable[[Distances, Sequence[str], Sequence[int]], Picture]] = {"heatmap": heat, "tree": tree, "map": map_}
