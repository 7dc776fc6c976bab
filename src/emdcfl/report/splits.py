"""The tree of groups, where validation losses decided: what each split gains, and what one more would.

A run weighs a set of clients again in later rounds. The tree shows the last word on each set, the table behind it every round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from emdcfl.core.errors import StoreError
from emdcfl.core.units import names
from emdcfl.report.load_run import Run
from emdcfl.report.svg import Axis, mark, shape_path, tag

BAR, HEIGHT = 150.0, 16.0
"""Size of the drawing of one interval."""

Node = frozenset[str] | int
"""A set that was divided, or the number of a cluster."""


@dataclass(frozen=True)
class ClusterSplit:
    """What dividing some clients does, as weighed in one round: ``loss`` and its standard error are per validation sample."""

    round: int
    members: frozenset[str]
    into: int
    loss: float
    error: float
    points: float
    points_error: float
    pays: bool
    by: list[str]
    evidence: float = 0.0

    @property
    def ends(self) -> tuple[float, float]:
        """Two standard errors around the change of loss."""
        return self.loss - 2 * self.error, self.loss + 2 * self.error

    @property
    def in_points(self) -> str:
        return f"{self.points:+.1f} ± {2 * self.points_error:.1f}"

    @property
    def in_words(self) -> str:
        return f"{self.loss:+.3f} ± {2 * self.error:.3f}"


def read_splits(run: Run) -> list[ClusterSplit]:
    """Return the splits that a run weighed, in its order; none where links decided."""
    try:
        return [_split(entry) for entry in (run.reading or {}).get("splits") or []]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{run.path / 'reading.json'}: expected splits with gains, got {error!r}; resume the run to write it again"
        ) from error


def _split(entry: Mapping[str, Any]) -> ClusterSplit:
    return ClusterSplit(
        int(entry["round"]),
        frozenset(str(c) for c in entry["members"]),
        len(entry["cells"]),
        -float(entry["gain"]),
        float(entry["error"]),
        float(entry["points"]),
        float(entry["points_error"]),
        bool(entry["pays"]),
        [str(c) for c in entry["decided_by"]],
        float(entry["evidence"]),
    )


def split_rows(splits: Sequence[ClusterSplit]) -> list[dict[str, Any]]:
    return [{"split": s, "who": names(sorted(s.members)), "by": ", ".join(s.by)} for s in splits]


def split_tree(run: Run, splits: Sequence[ClusterSplit]) -> list[dict[str, Any]]:
    """Return the tree from all clients down to the clusters, a row per node, each below its parent.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> run = SimpleNamespace(clients=["a", "b", "c"], members={0: [0, 1], 1: [2]}, colours={0: "k0", 1: "k1"})
    >>> whole = ClusterSplit(1, frozenset("abc"), 2, -0.3, 0.02, 9.0, 1.0, True, ["c"])
    >>> for row in split_tree(run, [whole, ClusterSplit(2, frozenset("ab"), 2, 0.1, 0.1, -1.0, 1.0, False, [])]):
    ...     print("  " * row["depth"] + row["who"], row["said"])
    a, b, c divided into 2
      a, b kept together
      c one client
    """
    divided = {s.members: s for s in splits if s.pays}
    kept = {s.members: s for s in splits if not s.pays}
    x = _scale([*divided.values(), *kept.values()])
    leaves = {k: frozenset(run.clients[i] for i in at) for k, at in run.members.items()}
    inner = sorted(divided, key=lambda m: (-len(m), sorted(m)))
    above: dict[Node, frozenset[str] | None] = {}
    for members in inner:
        above[members] = min((m for m in inner if members < m), key=len, default=None)
    for k, members in leaves.items():
        shared = max((len(members & m) for m in inner), default=0)
        above[k] = min((m for m in inner if shared and len(members & m) == shared), key=len, default=None)
    below: dict[Node | None, list[Node]] = {}
    for node, parent in above.items():
        below.setdefault(parent, []).append(node)
    place = {c: i for i, c in enumerate(run.clients)}
    rows: list[dict[str, Any]] = []
    waiting: list[tuple[Node, int]] = [(node, 0) for node in reversed(below[None])]
    while waiting:
        node, depth = waiting.pop()
        members = leaves[node] if isinstance(node, int) else node
        rows.append({"depth": depth, **_node(run, node, members, _last_word(kept, members) if isinstance(node, int) else divided[node], x)})
        first = {child: min(place[c] for c in (leaves[child] if isinstance(child, int) else child)) for child in below.get(node, [])}
        waiting += [(child, depth + 1) for child in sorted(first, key=first.__getitem__, reverse=True)]
    return rows


def _node(run: Run, node: Node, members: frozenset[str], split: ClusterSplit | None, x: Axis) -> dict[str, Any]:
    return {
        "cluster": node if isinstance(node, int) else None,
        "colour": run.colours[node] if isinstance(node, int) else None,
        "who": names([c for c in run.clients if c in members]),
        "said": f"divided into {split.into}" if split and split.pays else "one client" if len(members) == 1 else "kept together",
        "split": split,
        "bar": None if split is None else _bar(split, x),
        "by": "" if split is None else ", ".join(split.by),
    }


def _last_word(kept: Mapping[frozenset[str], ClusterSplit], members: frozenset[str]) -> ClusterSplit | None:
    """Return the last split weighed and refused that covers most of a cluster: some members may have been absent."""
    inside = [s for m, s in kept.items() if m <= members]
    return max(inside, key=lambda s: (len(s.members), s.round), default=None)


def _scale(splits: Sequence[ClusterSplit]) -> Axis:
    ends = [end for s in splits for end in s.ends] + [0.0]
    room = 0.06 * max(max(ends) - min(ends), 1e-6)
    return Axis(min(ends) - room, max(ends) + room, 2.0, BAR - 2)


def _bar(split: ClusterSplit, x: Axis) -> Markup:
    """Draw the change of loss with its interval; left of the dashed zero is better."""
    low, high = split.ends
    style = "inside" if split.pays else "weak-dot"
    parts = [
        tag("line", x1=x(0.0), x2=x(0.0), y1=0.0, y2=HEIGHT, class_="tolerance"),
        tag("line", x1=x(low), x2=x(high), y1=HEIGHT / 2, y2=HEIGHT / 2, class_="span"),
        mark("path", f"change of loss {split.in_words}", d=shape_path("circle", x(split.loss), HEIGHT / 2, 4.2), class_=style),
    ]
    return tag("svg", *parts, viewBox=f"0 0 {BAR:.0f} {HEIGHT:.0f}", class_="interval", role="img", aria_label=split.in_words)
