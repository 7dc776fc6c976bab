"""Pictures of a run. matplotlib without a window: nothing here touches pyplot's global state."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from emdcfl.clustering.pairs import SIGNS, over_tolerance
from emdcfl.core.optional import require
from emdcfl.core.units import plot_text, plural, reading_order
from emdcfl.methods.base import Distances

Array = np.ndarray[Any, Any]

ANNOTATED = 16
"""Up to this many clients every cell shows its number."""
LABELLED = 60


def new_figure(width: float, height: float) -> Any:
    """Return a figure without a window."""
    require("matplotlib", "plots", "to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    """Return a figure as PNG bytes, the same for the same picture."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def heatmap(distances: Distances, clients: Sequence[str], clusters: Sequence[int]) -> Any:
    """Draw W as a heat map, clients ordered and framed by cluster; return the figure.

    Colour is W over its tolerance, so that 1 is the border between accepted (blue) and refused (red) whatever the units. Entries that
    were only bounded carry a ``≥`` or ``≤``; a pair that was never compared is grey.
    """
    size = float(np.clip(0.55 * len(clients) + 2.2, 5.0, 14.0))
    figure = new_figure(size + 1.2, size)
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.patches import Rectangle

    order = sorted(reading_order(clients), key=clusters.__getitem__)
    w = distances.W[np.ix_(order, order)]
    ratio = np.maximum(over_tolerance(w, distances.epsilon[np.ix_(order, order)]), -6.0)
    kind = distances.kind[np.ix_(order, order)]
    axes = figure.add_subplot()
    axes.set_facecolor("0.85")
    top = float(np.nanmax(ratio)) if np.isfinite(ratio).any() else 2.0
    low = float(np.nanmin(ratio)) if np.isfinite(ratio).any() else 0.0
    norm = TwoSlopeNorm(vcenter=1.0, vmin=min(low, 0.0), vmax=max(min(top, 6.0), 1.5))
    image = axes.imshow(ratio, cmap="RdBu_r", norm=norm, interpolation="nearest")
    names = [plot_text(clients[i]) for i in order]
    if len(names) <= LABELLED:
        upright = {"rotation": 90, "ha": "center"} if len(names) > ANNOTATED else {"rotation": 45, "ha": "right"}
        axes.set_xticks(range(len(names)), names, **upright)
        axes.set_yticks(range(len(names)), names)
    if len(names) <= ANNOTATED:
        _annotate(axes, w, ratio, kind)
    start = 0
    for label in dict.fromkeys(clusters[i] for i in order):
        width = sum(clusters[i] == label for i in order)
        axes.add_patch(Rectangle((start - 0.5, start - 0.5), width, width, fill=False, edgecolor="black", linewidth=2))
        start += width
    axes.set_xlabel("column client: its sample")
    axes.set_ylabel("row client: its model and train sample")
    axes.set_title(f"Distance W between clients, {plural(len(set(clusters)), 'cluster')} framed")
    bar = figure.colorbar(image, ax=axes, shrink=0.85, extend="max" if top > 6.0 else "neither")
    bar.set_label("W / tolerance (below 1 in both directions: linked)")
    return figure


def margin_plot(distances: Distances, clients: Sequence[str], clusters: Sequence[int]) -> Any:
    """Draw how many pairs lie how far apart, inside clusters and between them, with the tolerance; return the figure.

    A pair counts with the direction that decides, max(W, Wᵀ), in multiples of its tolerance where clients have their own. Counts are
    logarithmic, so that one stray pair is seen. Pairs that were only bounded are drawn at their bound, hatched.
    """
    epsilon = distances.epsilon[np.isfinite(distances.epsilon)]
    calibrated = bool(epsilon.size and epsilon.max() > epsilon.min())
    values = over_tolerance(distances.W, distances.epsilon) if calibrated else distances.W
    tolerance = 1.0 if calibrated or not epsilon.size else float(epsilon[0])
    i, j = np.triu_indices(len(clients), 1)
    both = np.maximum(values[i, j], values[j, i])
    decides = np.where(values[i, j] >= values[j, i], distances.kind[i, j], distances.kind[j, i])
    same = np.asarray(clusters)[i] == np.asarray(clusters)[j]
    figure = new_figure(7.5, 4.2)
    axes = figure.add_subplot()
    known = both[np.isfinite(both)]
    quantity = "max(W, Wᵀ) / tolerance" if calibrated else "max(W, Wᵀ)"
    if known.size:
        # What is far beyond the tolerance is not interesting in detail; the last bin takes it.
        top = float(min(known.max(), 8 * tolerance) if tolerance > 0 else known.max())
        low = min(float(known.min()), 0.0)
        bins = np.linspace(low, max(top, 1.5 * tolerance) if max(top, tolerance) > low else 1.0, 50).tolist()
        for where, name, colour in ((same, "inside clusters", "tab:blue"), (~same, "between clusters", "tab:red")):
            for exact, hatch in ((True, None), (False, "////")):
                chosen = both[where & np.isfinite(both) & ((decides == 1) == exact)]
                if chosen.size:
                    label = name if exact else f"{name}, bound"
                    style = {"color": colour, "alpha": 0.75} if exact else {"edgecolor": colour, "facecolor": "none", "hatch": hatch}
                    axes.hist(np.minimum(chosen, bins[-1]), bins=bins, histtype="stepfilled", label=label, **style)
        if known.max() > bins[-1]:
            quantity += f"; the last bar holds everything from {bins[-2]:.3g} up"
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_ylim(0.5, None)
    axes.axvline(tolerance, color="black", linestyle="--", label="tolerance" if calibrated else f"tolerance {tolerance:g}")
    axes.set_xlabel(quantity)
    axes.set_ylabel("pairs of clients")
    axes.set_title("How clearly clusters are separated")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def _annotate(axes: Any, w: Array, ratio: Array, kind: Array) -> None:
    for i, j in np.ndindex(w.shape):
        if np.isfinite(w[i, j]):
            dark = ratio[i, j] > 3.5 or ratio[i, j] < 0
            text = f"{SIGNS.get(int(kind[i, j]), '').strip()}{w[i, j]:.3f}".replace("0.", ".", 1)
            axes.text(j, i, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
