"""A picture of an image scenario: rows are groups, columns are samples of several clients, with their sizes."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from emdcfl.core.errors import DataError
from emdcfl.core.units import plot_text
from emdcfl.data.types import Scenario, Site

CLIENTS, SAMPLES = 3, 4
"""Clients per row, and images per client."""

THUMB = 64
"""Images are shown at most this many pixels wide, to keep the file small."""


def grid(scenario: Scenario, path: str | Path) -> Path:
    """Draw the first train images of different classes to a PNG file.

    A scenario with a backdoor test also shows that variant of its first scored client in a further row.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    if path.suffix.lower() != ".png":
        raise DataError(f"expected a picture called .png to write, got {path}; choose another name")
    if scenario.sites[0].train.x.dim() != 4:
        raise DataError(f"scenario {scenario.name!r} holds tables, so there is no picture of it")
    rows = _rows(scenario)
    clients = max(len(sites) for _, _, sites, _ in rows)
    width, height = 0.58 * clients * SAMPLES + 3.4, 0.62 * len(rows) + 0.5
    figure = Figure(figsize=(width, height), dpi=100)
    canvas: Any = FigureCanvasAgg(figure)
    axes: Any = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axis, (title, text, sites, variant) in zip(axes, rows, strict=True):
        strip = _strip(sites, clients, variant)
        axis.imshow(
            strip, interpolation="nearest", cmap="gray", vmin=0, vmax=255, aspect="equal", extent=(0, strip.shape[1], strip.shape[0], 0)
        )
        axis.set_axis_off()
        axis.text(-0.01, 0.5, plot_text(title), transform=axis.transAxes, ha="right", va="center", fontsize=8, fontweight="bold")
        axis.text(1.01, 0.5, plot_text(text), transform=axis.transAxes, ha="left", va="center", fontsize=7)
    figure.suptitle(f"{plot_text(scenario.name)}: {len(scenario.sites)} sites, {len(scenario.classes)} classes", fontsize=9)
    figure.subplots_adjust(left=1.3 / width, right=1 - 2.1 / width, top=1 - 0.32 / height, bottom=0.02, hspace=0.08)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
    picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)  # a palette keeps the file small
    return path


def _rows(scenario: Scenario) -> list[tuple[str, str, list[Site], str]]:
    """Per row: group, sizes as text, the sites shown, which samples (``train`` or a test variant).

    A group whose sites were built in different ways (several small rotations) is one row that shows sites from its whole range.
    """
    groups = scenario.groups or {site.name: site.name for site in scenario.sites}
    rows = []
    for group in dict.fromkeys(groups.values()):
        members = [site for site in scenario.sites if groups[site.name] == group]
        spread = sorted({int(i) for i in np.linspace(0, len(members) - 1, min(CLIENTS, len(members)))})
        title = "\n".join(textwrap.wrap(group.replace("+", " "), 14))
        rows.append((title, _sizes(members), [members[i] for i in spread], "train"))
    scored = [site for site in scenario.sites if scenario.scored is None or site.name in scenario.scored]
    for variant in list(scored[0].tests)[1:]:
        sizes = f"{len(scored)} sites scored\nsame labels, other cue"
        rows.append((f"{groups[scored[0].name]},\n{variant} test", sizes, scored[:CLIENTS], variant))
    return rows


def _sizes(members: list[Site]) -> str:
    def span(values: list[int]) -> str:
        return str(values[0]) if min(values) == max(values) else f"{min(values)}–{max(values)}"

    train, val = [len(s.train) for s in members], [len(s.val) for s in members]
    test = [len(next(iter(s.tests.values()))) for s in members]
    return f"{len(members)} site{'s' if len(members) > 1 else ''}\ntrain {span(train)}\nval {span(val)}, test {span(test)}"


def _strip(sites: list[Site], clients: int, variant: str) -> NDArray[np.uint8]:
    """One row of images: ``SAMPLES`` per site, white gaps between sites; blank where there are fewer sites than columns."""
    blocks = []
    for site in sites:
        split = site.train if variant == "train" else site.tests[variant]
        chosen = _of_different_classes(split.y.numpy(), SAMPLES)
        images = split.x[chosen].numpy().transpose(0, 2, 3, 1)
        step = max(1, -(-images.shape[1] // THUMB))
        images = images[:, ::step, ::step]
        gap = max(1, images.shape[2] // 16)
        spaced = np.pad(images, ((0, 0), (0, 0), (0, gap), (0, 0)), constant_values=255)
        blocks.append(np.pad(np.concatenate(list(spaced), axis=1), ((0, 0), (0, 2 * gap), (0, 0)), constant_values=255))
    blocks += [np.full_like(blocks[0], 255)] * (clients - len(blocks))
    widest = max(block.shape[1] for block in blocks)
    blocks = [np.pad(block, ((0, 0), (0, widest - block.shape[1]), (0, 0)), constant_values=255) for block in blocks]
    strip: NDArray[np.uint8] = np.concatenate(blocks, axis=1)
    return strip[..., 0] if strip.shape[2] == 1 else strip


def _of_different_classes(labels: NDArray[np.int64], count: int) -> list[int]:
    """The first sample of each class, in class order, then further samples if there are fewer classes than asked for."""
    _, first = np.unique(labels, return_index=True)
    chosen = [int(i) for i in first[:count]]
    rest = (i for i in range(len(labels)) if i not in chosen)
    return chosen + [i for i, _ in zip(rest, range(count - len(chosen)), strict=False)]
