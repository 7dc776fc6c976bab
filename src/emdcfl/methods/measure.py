"""The server side of EMD-CFL's comparison: ask for projected samples, solve the transport problems as they arrive.

Rows are asked first (their train samples are needed by every problem of the row); columns are folded, so that no more than the
row samples and one column's reply are held beside the problems still in the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from emdcfl.errors import ClientError, DataError
from emdcfl.federation import Federation
from emdcfl.methods.exchange import ROW, project, reference
from emdcfl.schema import Reply
from emdcfl.transport import EXACT, Decision, Pool, Screen, cost_matrix, projected_width, quantile, solve, tolerance

if TYPE_CHECKING:
    from emdcfl.methods.emdcfl import EMDCFL

log = logging.getLogger("emdcfl")


@dataclass(frozen=True)
class Entry:
    """One measured direction: W, the tolerance it is compared with, and how it was found (see ``Distances.kind``)."""

    W: float
    epsilon: float
    kind: int


@dataclass(frozen=True)
class Measured:
    """What was measured in one go."""

    tau: dict[str, float]
    entries: dict[tuple[str, str], Entry]
    exact_solves: int
    problems: int


def validation_sizes(m: Mapping[str, int], *, cap: int, at_least: int) -> dict[str, int]:
    """Say how many validation samples each client is compared with.

    Everybody uses the same number, ``min(cap, smallest m)``, because a smaller sample looks farther away; the minimum is taken over
    clients with ``at_least`` samples, so that one tiny site does not blind the others. A smaller client is compared at its own size.

    Examples
    --------
    >>> validation_sizes({"a": 600, "b": 90, "c": 20}, cap=512, at_least=64)
    {'a': 90, 'b': 90, 'c': 20}
    """
    empty = [c for c, size in m.items() if size < 1]
    if empty:
        raise DataError(f"client {empty[0]!r} has no validation data, and its reference distance needs some; give it a validation share")
    large = [size for size in m.values() if size >= at_least]
    common = min([cap, *large])
    return {c: common if size >= at_least else min(size, common) for c, size in m.items()}


def measure(method: EMDCFL, fed: Federation, pairs: Sequence[tuple[str, str]], local: Mapping[str, Tensor]) -> Measured:
    """Measure W for ordered pairs (row, column), each row under its client's latest local state."""
    known = [c for c in fed.clients if any(c in pair for pair in pairs)]
    about = fed.describe(known)
    sizes = validation_sizes({c: about[c]["m"] for c in about}, cap=method.max_samples, at_least=method.min_validation)
    small = [c for c in sizes if about[c]["m"] < method.min_validation]
    if small:
        log.warning(
            "%s: fewer than %d validation samples; compared at their own size, with little power", ", ".join(small), method.min_validation
        )
    pairs = [(c, d) for c, d in pairs if c in about and d in about]
    distinct = sorted(set(sizes.values()))
    settings = _settings(method)
    dims = {"p": projected_width(method.projection_ratio, fed.layout.embedding_width), "sizes": len(distinct)}
    omega = fed.layout.embedding
    keys = {c: about[c]["key"] for c in about}
    rows = {c: [d for r, d in pairs if r == c] for c in dict.fromkeys(r for r, _ in pairs)}
    asked = {c: {"omega": local[c][omega], "partners": {d: keys[d] for d in ds}} for c, ds in rows.items()}
    references = fed.run(reference, asked, dims=dims, verify=_row_verifier(rows, settings), sizes=distinct, settings=settings)

    columns: dict[str, list[str]] = {}
    for r, d in pairs:
        if r in references.valid:
            columns.setdefault(d, []).append(r)
    inputs = {
        d: {"rows": rs, "boxes": {r: references[r]["boxes"][d] for r in rs if method.projection == "row"}, "size": sizes[d]}
        for d, rs in columns.items()
    }
    omegas = {r: local[r][omega] for r in references.clients}
    problems = _Problems(references.valid, sizes, distinct, settings, method.tolerance, quantile(method.alpha, len(fed.clients)))
    entries: dict[tuple[str, str], Entry] = {}
    options = {name: settings[name] for name in ("cost", "solver", "reg", "label_weight")}
    with Pool() as pool:
        screen = Screen(pool, distances=method.distances, **options)
        for row in references.clients:
            problems.enter(screen, row)

        def fold(column: str, reply: Reply) -> None:
            with fed.clock("transport"):
                for row in columns[column]:
                    if row == column:
                        entries[row, row] = Entry(problems.own(row, reply), problems.epsilon(row, row), EXACT)
                    else:
                        problems.add(screen, row, column, reply)

        def verify(column: str, reply: Reply) -> None:
            _verify_samples(reply, columns[column], sizes[column], settings)

        fed.run(project, inputs, fold=fold, dims=dims, verify=verify, omegas=omegas, keys=keys, settings=settings)
        with fed.clock("transport"):
            found = screen.finish(fed.clients)
    entries |= _both_ways(found, problems)
    log.debug("%d of %d transport problems were solved exactly", found.exact_solves, found.pairs)
    return Measured({c: problems.tau(c, d) for c, d in entries}, entries, found.exact_solves, found.pairs)


def _row_verifier(rows: Mapping[str, list[str]], settings: Mapping[str, Any]) -> Callable[[str, Reply], None]:
    """Return a check that a row client's reply serves every partner it was asked for."""

    def verify(row: str, reply: Reply) -> None:
        partners = rows[row]
        _verify_samples(reply, [ROW] if settings["projection"] == "row" else partners, None, settings)
        for name in ("tau", "variance"):
            _verify_names(reply[name], partners if settings["projection"] == "pair" else [ROW], name)
        if settings["projection"] == "row":
            _verify_names(reply["boxes"], partners, "boxes")

    return verify


def _verify_names(values: Mapping[str, Any], wanted: Sequence[str], name: str) -> None:
    if set(values) != set(wanted):
        raise ClientError(f"expected {name} for {', '.join(map(repr, wanted))}, got {', '.join(map(repr, values)) or 'none'}")


def _verify_samples(reply: Reply, wanted: Sequence[str], size: int | None, settings: Mapping[str, Any]) -> None:
    """Refuse samples that leave a partner out, differ in number from what was asked (any but none for a row), or lack their labels."""
    _verify_names(reply["samples"], wanted, "samples")
    counts = {len(z) for z in reply["samples"].values()}
    if counts != ({size} if size is not None else counts & {max(counts)}) or 0 in counts:
        raise ClientError(f"expected {'the same number of' if size is None else size} samples for every partner, got {sorted(counts)}")
    labels = reply.get("labels")
    if settings["cost"] == "label-aware" and (labels is None or {len(labels)} != counts):
        raise ClientError(f"expected {max(counts)} labels beside the samples, got {'none' if labels is None else len(labels)}")


def _both_ways(found: Decision, problems: _Problems) -> dict[tuple[str, str], Entry]:
    """Entries of the pairs of which both directions were answered; the others stay unset and are tried again."""
    entries = {}
    for i, row in enumerate(map(str, found.clients)):
        for j, column in enumerate(map(str, found.clients)):
            if i != j and found.kind[i, j] and found.kind[j, i]:
                entries[row, column] = Entry(float(found.w[i, j]), problems.epsilon(row, column), int(found.kind[i, j]))
    return entries


def _settings(method: EMDCFL) -> dict[str, Any]:
    return {
        "projection": method.projection,
        "ratio": method.projection_ratio,
        "cap": method.max_samples,
        "cost": method.cost,
        "label_weight": method.label_weight,
        "solver": method.solver,
        "reg": method.sinkhorn_reg,
        "mode": method.embedding_mode,
    }


@dataclass(frozen=True)
class _Problems:
    """The transport problems of all pairs, as far as the server may know them."""

    references: Mapping[str, Reply]
    sizes: Mapping[str, int]
    distinct: list[int]
    settings: Mapping[str, Any]
    tolerance: float | str
    q: float

    def _size(self, row: str, column: str) -> int:
        return min(self.sizes[row], self.sizes[column])

    def _of(self, field: str, row: str, column: str) -> Any:
        """A field of the row's reference reply: for this partner if it depends on the pair, else for all."""
        values = self.references[row][field]
        return values[column] if column in values else values[ROW]

    def tau(self, row: str, column: str) -> float:
        return float(self._of("tau", row, column)[self.distinct.index(self._size(row, column))])

    def epsilon(self, row: str, column: str) -> float:
        if not isinstance(self.tolerance, str):
            return self.tolerance
        m = self._size(row, column)
        return tolerance(float(self._of("variance", row, column)[self.distinct.index(m)]), m, m, self.q)

    def enter(self, screen: Screen, row: str) -> None:
        reply = self.references[row]
        some = next(iter(reply["samples"]))
        screen.row(
            row, reply["samples"][some].numpy(), tau=self.tau(row, row if some == ROW else some), epsilon=0.0, labels=self._labels(row)
        )

    def add(self, screen: Screen, row: str, column: str, reply: Reply) -> None:
        m = self._size(row, column)
        sample = None if ROW in self.references[row]["samples"] else self._of("samples", row, column).numpy()
        labels = reply["labels"][:m].numpy() if "labels" in reply else None
        own = {"epsilon": self.epsilon(row, column), "tau": self.tau(row, column), "a": sample}
        screen.add(row, column, reply["samples"][row][:m].numpy(), labels=labels, **own)

    def own(self, row: str, reply: Reply) -> float:
        """W of a client with itself, which only counts where the diagonal is not forced."""
        m, s = self.sizes[row], self.settings
        labels = reply["labels"][:m].numpy() if "labels" in reply else None
        cost = cost_matrix(
            self._of("samples", row, row).numpy(),
            reply["samples"][row][:m].numpy(),
            cost=s["cost"],
            labels_a=self._labels(row),
            labels_b=labels,
            label_weight=s["label_weight"],
        )
        return solve(cost, solver=s["solver"], reg=s["reg"]).value - self.tau(row, row)

    def _labels(self, row: str) -> Any:
        labels = self.references[row].get("labels")
        return None if labels is None else labels.numpy()
