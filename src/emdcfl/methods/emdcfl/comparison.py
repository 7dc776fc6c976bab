"""The server side of EMD-CFL's comparison: ask for projected samples, solve the transport problems as they arrive.

Rows are asked first (their train samples are needed by every problem of the row); columns are folded, so that no more than the
row samples and one column's reply are held beside the problems still in the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.errors import EmdcflError
from emdcfl.core.federation import Federation
from emdcfl.core.params import Network
from emdcfl.core.schema import Reply, not_finite
from emdcfl.core.units import names
from emdcfl.methods.emdcfl.client.sampling import Matching
from emdcfl.methods.emdcfl.client.tasks import deposit, project, recalibrate, reference
from emdcfl.methods.emdcfl.problems import ManyBounds, PairProblems, validation_sizes
from emdcfl.methods.emdcfl.representatives import Pair
from emdcfl.methods.emdcfl.settings import CompareSettings, Options
from emdcfl.methods.emdcfl.tolerance import Level, least_validation
from emdcfl.methods.emdcfl.verify import (
    Complaints,
    columns_verifier,
    deposits_verifier,
    matched_verifier,
    recalibrated_verifier,
    rows_verifier,
)
from emdcfl.transport import EXACT, Screen, SolverPool
from emdcfl.trust.guard import SANITY_FACTOR

log = logging.getLogger("emdcfl")

EMBEDDED_AT_ONCE = 256


@dataclass(frozen=True)
class PairDistance:
    """One measured direction: W, the tolerance it is compared with, and how it was found (see ``Distances.kind``)."""

    W: float
    epsilon: float
    kind: int


@dataclass(frozen=True)
class Measured:
    """What one call measured; ``undecided`` are pairs that share too few samples of common classes to be compared."""

    tau: dict[str, float]
    entries: dict[Pair, PairDistance]
    exact_solves: int
    problems: int
    undecided: frozenset[Pair] = frozenset()


@dataclass(frozen=True)
class MeasuredRows:
    """Lower bounds of W, one row per representative, and τ; columns in client order, NaN where somebody did not answer."""

    W: np.ndarray[Any, Any]
    tau: Tensor


def measure(options: Options, fed: Federation, pairs: Sequence[Pair], local: Mapping[str, Tensor]) -> Measured:
    """Measure W for ordered pairs (row, column), each row under its client's latest local state."""
    return Comparison(options, fed, local).measure(pairs)


class Comparison:
    """Comparisons of one round. Pairs may be asked for in several calls; what a row client sent once is not asked for again.

    Parameters
    ----------
    options : Options
        Of the method.
    fed : Federation
    local : mapping
        Client → latest local state, for all clients that may be compared.
    about : mapping, optional
        What ``comparable`` returned for them, if it was called already.
    """

    def __init__(self, options: Options, fed: Federation, local: Mapping[str, Tensor], about: Mapping[str, Reply] | None = None) -> None:
        self.options, self.fed, self.local = options, fed, local
        self.about = comparable(options, fed, [c for c in fed.clients if c in local]) if about is None else about
        m = {c: reply["m"] for c, reply in self.about.items()}
        self.sizes = validation_sizes(m, cap=options.max_samples, at_least=options.min_validation, calibrated=options.calibrated)
        self.settings = CompareSettings.of(options)
        distinct = sorted(set(self.sizes.values()))
        self.dims = {"p": self.settings.width(fed.layout.embedding_width), "sizes": len(distinct)}
        self.references: dict[str, Reply] = {}
        self.complaints = Complaints(fed)
        level = Level(options.alpha, len(fed.clients))
        self.problems = PairProblems(self.references, self.sizes, distinct, self.settings, options.threshold, level, options.several_blocks)

    def measure(self, pairs: Sequence[Pair]) -> Measured:
        """Measure W for ordered pairs; those with a client that does not answer are left out."""
        answered, columns = self._answering(pairs)
        entries: dict[Pair, PairDistance] = {}
        epsilon: dict[Pair, float] = {}
        offers: dict[Pair, bytes] = {}
        problems, use = self.problems, self.settings
        with SolverPool() as pool:
            problem: dict[str, Any] = {"cost": use.cost, "solver": use.solver, "reg": use.sinkhorn_reg, "label_weight": use.label_weight}
            wanted = "precise" if self.options.by_benefit and self.options.distances == "needed" else self.options.distances
            screen = Screen(pool, distances=wanted, queue=self.fed.transport_queue(), **problem)

            def fold(column: str, reply: Reply) -> None:
                usable = self._usable(column, columns[column], reply)
                offers.update({(row, column): box for row, box in reply.get("offers", {}).items()})
                with self.fed.clock("transport"):
                    for row in usable:
                        if row == column:
                            entries[row, row] = PairDistance(problems.self_distance(row, reply), problems.epsilon(row, row), EXACT)
                        else:
                            epsilon[row, column] = problems.add(screen, row, column, reply)

            self._columns(columns, answered, fold)
            undecided = self._recalibrate(offers)
            taken = [pair for pair in offers if pair in problems.common]
            if taken:
                again = {d: [r for r, e in taken if e == d] for d in dict.fromkeys(d for _, d in taken)}
                self._columns(again, {r: answered[r] for r, _ in taken}, fold)
            with self.fed.clock("transport"):
                found = screen.finish(self.fed.clients)
        problems.sources.clear()
        self.complaints.settle()
        where = {c: i for i, c in enumerate(self.fed.clients)}
        for (row, column), tolerance in epsilon.items():
            i, j = where[row], where[column]
            if self.fed.exclusion_reason(row) or self.fed.exclusion_reason(column):
                continue
            if found.kind[i, j] and found.kind[j, i]:  # a pair with one direction stays unset and is tried again
                entries[row, column] = PairDistance(float(found.w[i, j]), tolerance, int(found.kind[i, j]))
        log.debug("%d exact solves for %d transport problems", found.exact_solves, found.pairs)
        shown = list(entries)
        if self.options.calibrated:  # where sizes differ, τ at the largest
            shown.sort(key=lambda pair: (pair not in problems.common, problems.size(*pair)))
        tau = {c: problems.tau(c, d) for c, d in shown}
        return Measured(tau, entries, found.exact_solves, found.pairs, undecided)

    def measure_rows(self, rows: Sequence[str], columns: Sequence[str]) -> MeasuredRows:
        """Bound W from each of a few row clients to every column client, from below: one direction, and no exact solve."""
        at = {c: i for i, c in enumerate(self.fed.clients)}
        found = MeasuredRows(np.full((len(rows), len(at)), np.nan), torch.full((len(at),), torch.nan, dtype=torch.float64))
        answered, partners = self._answering([(r, d) for r in rows for d in columns if d != r])
        with SolverPool() as pool:
            bounds = ManyBounds(pool, self.problems)

            def fold(column: str, reply: Reply) -> None:
                usable = self._usable(column, partners[column], reply)
                with self.fed.clock("transport"):
                    for row in usable:
                        bounds.add(row, column, reply)

            self._columns(partners, answered, fold)
            with self.fed.clock("transport"):
                values = bounds.finish()
        self.complaints.settle()
        excluded = [at[c] for c in partners if self.fed.exclusion_reason(c)]
        for k, row in enumerate(rows):
            if row not in answered or self.fed.exclusion_reason(row):
                continue
            found.W[k, at[row]], found.tau[at[row]] = 0.0, self.problems.own_tau(row)
            for column, T in values.get(row, {}).items():
                found.W[k, at[column]] = T - self.problems.tau(row, column)
            found.W[k, excluded] = np.nan
        return found

    def _answering(self, pairs: Sequence[Pair]) -> tuple[dict[str, Reply], dict[str, list[str]]]:
        """Ask the row clients of the pairs that can be compared; returns their answers, and for each column the rows to compare it with."""
        pairs = [(r, d) for r, d in pairs if r in self.about and d in self.about]
        answered = self._rows(pairs)
        columns: dict[str, list[str]] = {}
        for r, d in pairs:
            if r in answered and d not in answered[r]["refused"]:
                columns.setdefault(d, []).append(r)
        return answered, columns

    def _usable(self, column: str, rows: Sequence[str], reply: Reply) -> list[str]:
        """Return the rows for which a column client sent a finite sample, and note its complaints about others."""
        lost = not_finite(reply["samples"])
        self.complaints.diverged(column, lost)
        served = reply["matched"] if "matched" in reply else reply["samples"]
        self.complaints.record(column, "project", set(served) - set(lost), reply.get("refused", {}))
        return [r for r in rows if r in reply["samples"] and r not in lost]

    def _recalibrate(self, offers: Mapping[Pair, bytes]) -> frozenset[Pair]:
        """Ask row clients for τ at the class counts that partners offer; returns the pairs that have too few samples in common."""
        problems, asked = self.problems, dict[str, dict[str, Any]]()
        for r, d in (pair for pair, box in offers.items() if box):
            own = asked.setdefault(r, {"omega": self.local[r][self.fed.layout.embedding], "offers": {}, "m": {}, "keys": {}})
            own["offers"][d], own["m"][d], own["keys"][d] = offers[r, d], problems.size(r, d), self.about[d]["key"]
        common: dict[str, Any] = {"sizes": problems.distinct, "settings": self.settings.as_dict()}
        verify = recalibrated_verifier(asked, self.settings)
        replies = self.fed.run(recalibrate, asked, verify=verify, **common) if asked else None
        least, few = least_validation(self.options, len(self.fed.clients)), {pair for pair, box in offers.items() if not box}
        for r, reply in replies.valid.items() if replies else ():
            self.complaints.record(r, "recalibrate", reply["size"], reply["refused"])
            for d, size in reply["size"].items():
                if size < least:
                    few.add((r, d))
                else:
                    problems.common[r, d] = {name: float(reply[name][d]) for name in ("size", "tau", "variance", "within", "freedom")}
        return frozenset(pair for pair in few if not any(self.fed.exclusion_reason(c) for c in pair))

    def _rows(self, pairs: Sequence[Pair]) -> dict[str, Reply]:
        """Ask the row clients; returns the boxes they sealed for their partners, and the partners they refused."""
        per_pair = self.settings.projection_scope in ("pair", "paper", "fresh")
        rows: dict[str, list[str]] = {}
        for r, d in pairs:
            rows.setdefault(r, []).append(d)
        asked = {
            c: {
                "omega": self.local[c][self.fed.layout.embedding],
                "partners": {d: self.about[d]["key"] for d in partners},
                "again": c in self.references and not per_pair,
            }
            for c, partners in rows.items()
        }
        verify = rows_verifier(asked, self.settings)
        common: dict[str, Any] = {"sizes": self.problems.distinct, "settings": self.settings.as_dict()}
        replies = self.fed.run(reference, asked, dims=self.dims, verify=verify, **common)
        for c, reply in replies.valid.items():
            if not asked[c]["again"]:
                self.references[c] = reply
            self.complaints.record(c, "reference", [d for d in rows[c] if d not in reply["refused"]], reply["refused"])
        self._sanity()
        useful = [c for c in replies.valid if self.references[c]["samples"]]
        return {c: {name: replies[c][name] for name in ("boxes", "refused")} for c in useful}

    def _sanity(self) -> None:
        """Cut back reference distances and variances far above the others': they would link their row with all partners, on its side."""
        for field, what, factor in (("tau", "reference distance", SANITY_FACTOR), ("variance", "variance", SANITY_FACTOR**2)):
            for s, size in enumerate(self.problems.distinct):
                rows = {c: reply for c, reply in self.references.items() if self.sizes[c] >= size and reply[field]}
                largest = {c: max(float(values[s]) for values in reply[field].values()) for c, reply in rows.items()}
                for c, limit in self.fed.guard.cap_outliers(largest, what, factor=factor).items():
                    cut = {name: torch.cat([v[:s], v[s : s + 1].clamp(max=limit), v[s + 1 :]]) for name, v in rows[c][field].items()}
                    self.references[c] = {**self.references[c], field: cut}

    def _columns(self, columns: Mapping[str, list[str]], answered: Mapping[str, Any], fold: Callable[[str, Reply], None]) -> None:
        """Ask the column clients, or embed what they deposit."""
        omegas = {r: self.local[r][self.fed.layout.embedding] for r in answered}
        sizes = {d: self._wanted(d) for d in columns}
        inputs: dict[str, dict[str, Any]] = {d: {"size": size, "held_out": size <= self.sizes[d]} for d, size in sizes.items()}
        common: dict[str, Any] = {"dims": self.dims, "settings": self.settings.as_dict()}
        if self.settings.projection_scope == "none":

            def embed(column: str, reply: Reply) -> None:
                try:
                    embedded = self._embedded(columns[column], omegas, reply)
                except (EmdcflError, RuntimeError, ValueError) as error:  # inputs that this network does not take
                    self.fed.accuse(column, "deposit", f"its samples of shape {tuple(reply['shape'].tolist())} cannot be embedded: {error}")
                    return
                fold(column, embedded)

            self.fed.run(deposit, inputs, fold=embed, verify=deposits_verifier(sizes, self.settings), **common)
            return
        verify = columns_verifier(columns, sizes, self.settings)
        for d, rs in columns.items():
            boxes = {r: answered[r]["boxes"][d] for r in rs if self.settings.projection_scope == "row"}
            inputs[d] |= {"rows": rs, "boxes": boxes}
        if self.settings.match_classes:
            matching = {d: self._matching(d, rs) for d, rs in columns.items()}
            inputs = {d: {**own, "matching": matching[d]} for d, own in inputs.items()}
            verify = matched_verifier(columns, matching)
        keys = {r: self.about[r]["key"] for r in answered}
        self.fed.run(project, inputs, fold=fold, verify=verify, omegas=omegas, keys=keys, **common)

    def _wanted(self, column: str) -> int:
        """Samples asked of a column client: its validation size, times the blocks its data and the cap allow."""
        m, about = self.sizes[column], self.about[column]
        blocks = max(1, min(self.options.max_samples, about["n"] + about["m"]) // m) if self.problems.blocks else 1
        return m * blocks

    def _matching(self, column: str, rows: Sequence[str]) -> Matching:
        """What a column client needs to draw samples with the rows' class counts."""
        sizes = {r: self.problems.size(r, column) for r in rows}
        blocks = {r: max(1, self.options.max_samples // m) if self.problems.blocks else 1 for r, m in sizes.items()}
        common = {r: self.problems.block(r, column) for r in rows if (r, column) in self.problems.common}
        return {"sizes": self.problems.distinct, "m": sizes, "blocks": blocks, "common": common}

    @cached_property
    def _network(self) -> Network:
        network = self.fed.network()
        network.module.eval()
        return network

    @torch.no_grad()
    def _embedded(self, rows: Sequence[str], omegas: Mapping[str, Tensor], reply: Reply) -> Reply:
        """Embed a deposited sample under every row's model, here on the server."""
        x, samples = reply["inputs"].view(-1, *reply["shape"].tolist()), {}
        for row in rows:
            self._network.load(omegas[row])
            samples[row] = torch.cat([self._network.embed(part) for part in x.split(EMBEDDED_AT_ONCE)]).float()
        return {"samples": samples, **({"labels": reply["labels"]} if "labels" in reply else {})}


def comparable(options: Options, fed: Federation, clients: Sequence[str], *, warn: bool = False) -> dict[str, Reply]:
    """Describe the clients that can be compared; the others stay clusters of their own. ``warn`` names new clients that are too small.

    Left out are the quarantined, those with fewer validation samples than ``require_validation`` and, where tolerances are calibrated,
    those with so few that anybody would be linked with them (``tolerance.least_validation``). A client without any
    ends the run (``validation_sizes`` says so), unless the run goes on without those that fail.
    """
    new = [c for c in clients if not fed.described(c)]
    about = fed.describe([c for c in clients if fed.exclusion_reason(c) is None])
    required = max(options.require_validation, 0 if fed.on_failure == "stop" else 1)
    least = least_validation(options, len(fed.clients))
    few = {c for c, reply in about.items() if reply["m"] < required or 0 < reply["m"] < least}
    if warn:
        _warn_small(options, [c for c in new if c in few], max(required, least), calibration=required < least)
        small = [c for c in new if c in about and c not in few and 0 < about[c]["m"] < options.min_validation]
        if small and not options.calibrated and not options.by_benefit:  # elsewhere standard errors account for the size
            text = "%s: fewer than %d validation samples; compared at their own size, with little power"
            log.warning(text, names(small), options.min_validation)
    return {c: reply for c, reply in about.items() if c not in few}


def _warn_small(options: Options, few: Sequence[str], least: int, *, calibration: bool) -> None:
    if not few:
        return
    fixed = ", or choose method.tolerance = 0.025, which compares at any size" if options.papers_distances else ""
    advice = f"; give them more{fixed}" if calibration else ""
    then = "served by the model that fits best" if calibration and options.joining != "keep" else "kept as a cluster of its own"
    log.warning("%s: fewer than %d validation samples; not compared, %s%s", names(few), least, then, advice)
