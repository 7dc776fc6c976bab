r"""Many clients trained at once on the CPU: states stacked to :math:`\Theta \in R^{F\times P}`, one SGD step for all rows.

Each training takes its own batches in its own order (``schedule``), so results equal those of the sequential engine up to the rounding
of float sums, and are bit-identical from run to run. The forward pass is ``torch.func.vmap`` of the network, or ``stack.Chain`` for
perceptrons. The gradient of the summed losses is the stack of all gradients, because row f's loss depends on row f's state alone.

Networks with dropout (whose draws belong to one client), and networks that ``vmap`` rejects, train one client after the other, with one
warning. BatchNorm takes its statistics from a batch, so batches of different sizes are computed separately instead of padded.

Embeddings are grouped by model, and losses of many small models are one batched product. Both equal what ``Embed`` and ``Score`` compute
for one client, up to the rounding of float sums; what they do not cover (training mode, bf16, networks that are no perceptrons) is left
to those.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from emdcfl.core.client import Client, Work
from emdcfl.core.errors import ClientError
from emdcfl.core.learning import objective
from emdcfl.core.tasks import Embed, Fit, Score, Training, trained
from emdcfl.data.types import Preprocess
from emdcfl.engines.local.schedule import Schedule, schedule
from emdcfl.engines.local.stack import Buffers, Chain, Stack, find_chain
from emdcfl.engines.local.staged import Outcome, StagedFederation, attempt
from emdcfl.engines.local.update import kind, make_terms

log = logging.getLogger("emdcfl")

STACKED = 1 << 20
"""Most numbers of one stacked Θ: a larger one does not fit into the processor's cache and is no faster."""

PREPARED = 1 << 25
"""Most numbers of network input that are prepared once; larger data are preprocessed batch by batch."""

FORWARD = 1 << 21
"""Most numbers of network input, or of stacked states, in one pass: more does not fit into the processor's cache."""

SAMPLES = 1 << 12
"""Most samples embedded in one pass, for the same reason: layers may be wider than the input."""


@dataclass
class TrainData:
    """The train splits of all clients in one tensor, so that one gather takes the batches of many clients."""

    x: Tensor
    y: Tensor
    first: dict[str, int]
    preprocess: Preprocess | None
    _plans: dict[object, Schedule] = field(default_factory=dict)

    @classmethod
    def of(cls, clients: Sequence[Client]) -> TrainData:
        first, total = {}, 0
        for client in clients:
            first[client.name] = total
            total += len(client.site.train)
        device = clients[0].network.device
        x = torch.cat([c.site.train.x for c in clients]).to(device)
        y = torch.cat([c.site.train.y for c in clients]).to(device)
        preprocess = clients[0].preprocess
        if len(x) and preprocess(x[:1]).numel() * len(x) <= PREPARED:
            return cls(preprocess(x), y, first, None)
        return cls(x, y, first, preprocess)

    def plan(self, fits: Sequence[tuple[Client, Fit]], *, needs_two: bool) -> Schedule:
        """Return the batches as rows of ``x``: the known ones if the same clients train and nothing is shuffled or weighted."""
        weighted = any(fit.sample_weights is not None for _, fit in fits)
        asked = None if weighted else (fits[0][1].training, tuple(client.name for client, _ in fits))
        if asked in self._plans:
            return self._plans[asked]
        plan = schedule(fits, needs_two=needs_two)
        plan.index.add_(torch.tensor([self.first[fits[row][0].name] for row in plan.rows])[:, None])
        if asked is not None and len(plan.active) == fits[0][1].training.local_epochs:  # one batch per epoch
            while sum(len(known.rows) for known in self._plans.values()) + len(plan.rows) > len(self.first) and self._plans:
                self._plans.pop(next(iter(self._plans)))  # no more are kept than the stacks of one round
            self._plans[asked] = plan
        return plan

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return network inputs ``(A, b, …)`` and labels ``(A, b)``."""
        flat = index.reshape(-1)
        x = self.x.index_select(0, flat)
        if self.preprocess is not None:
            x = self.preprocess(x)
        return x.view(*index.shape, *x.shape[1:]), self.y.index_select(0, flat).view(index.shape)


class BatchedFederation(StagedFederation):
    """Every client in this process; trainings with the same settings and loss terms are stacked.

    The caller gets the replies of one stack before the next is trained, which then reuses its memory.
    """

    held = checked = STACKED

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stackable = True
        self._data: TrainData | None = None
        self._chain: Chain | None = None
        self._buffers = Buffers()

    def _compute(self, works: Sequence[tuple[Client, Work]]) -> list[Outcome]:
        results: list[Outcome | None] = [None] * len(works)
        groups: dict[object, list[int]] = {}
        embeds: list[tuple[int, Client, Embed]] = []
        scores: list[tuple[int, Client, Score]] = []
        for i, (client, work) in enumerate(works):
            if isinstance(work, Fit) and self._stackable:
                groups.setdefault((work.training, kind(work)), []).append(i)
            elif isinstance(work, Embed) and embeds_together(client, work):
                embeds.append((i, client, work))
            elif isinstance(work, Score):
                scores.append((i, client, work))
        together = max(1, STACKED // self.layout.size)
        for members in groups.values():
            for begin in range(0, len(members), together):
                part = members[begin : begin + together]
                for i, outcome in zip(part, self._stack([works[i] for i in part]), strict=True):
                    results[i] = outcome
        if len(embeds) > 1:
            self._fill(results, embeds, embed_together)
        if len(scores) > 1 and (chain := self._perceptron()) is not None:
            self._fill(results, scores, lambda works: score_together(works, chain, self._buffers))
        return [attempt(*works[i]) if outcome is None else outcome for i, outcome in enumerate(results)]

    def _fill(
        self,
        results: list[Outcome | None],
        works: Sequence[tuple[int, Client, Any]],
        compute: Callable[[list[tuple[Client, Any]]], list[Outcome]],
    ) -> None:
        """Compute works together; if that fails, they stay open for one client after the other, which also shows whose work failed."""
        with contextlib.suppress(Exception):  # one bad client must not stop the others
            for (i, _, _), outcome in zip(works, compute([(client, work) for _, client, work in works]), strict=True):
                results[i] = outcome

    def _perceptron(self) -> Chain | None:
        """Return the network as a chain of linear layers, if it is one."""
        with contextlib.suppress(Exception):  # sites whose samples differ in size make no stack
            self._prepare()
        return self._chain

    def _prepare(self) -> TrainData:
        if self._data is None:
            clients = list(self._clients.values())
            self._data = TrainData.of(clients)
            if clients[0].precision == "fp32":
                some = torch.arange(min(8, len(self._data.y)), device=clients[0].network.device)
                self._chain = find_chain(clients[0].network, self._data.batch(some[None])[0][0])
        return self._data

    def _stack(self, works: Sequence[tuple[Client, Work]]) -> list[Outcome]:
        """Train a stack; if that fails, train one client after the other, which also shows whose training failed."""
        if len(works) > 1 and self._stackable:
            try:
                data = self._prepare()
                return fit_stacked(cast(Sequence[tuple[Client, Fit]], works), data, self._buffers, self._chain)
            except Exception as error:  # vmap fails in many ways, and one bad client must not stop the others
                outcomes = [attempt(*work) for work in works]
                if not any(isinstance(outcome, Exception) for outcome in outcomes):
                    self._stackable = False
                    log.warning("clients are trained one after the other: %s", _reason(error))
                return outcomes
        return [attempt(*work) for work in works]


def _reason(error: Exception) -> str:
    """Say why a network cannot train for several clients at once."""
    said = str(error).partition("\n")[0]
    if "randomness" in said:  # of vmap, which names its own flags
        return "the network has dropout, whose draws belong to one client"
    return f"torch cannot compute this network for several at once ({said or type(error).__name__})"


def fit_stacked(fits: Sequence[tuple[Client, Fit]], data: TrainData, buffers: Buffers, chain: Chain | None = None) -> list[Outcome]:
    """Train several clients together; all share the training settings and the kind of terms."""
    network, training, low = fits[0][0].network, fits[0][1].training, fits[0][0].precision == "bf16"
    batch_norm = network.layout.batch_statistics
    plan = data.plan(fits, needs_two=batch_norm)
    ordered = [fits[row] for row in plan.rows]
    stack = Stack.load(network, [fit.theta for _, fit in ordered], buffers)
    terms = make_terms([fit for _, fit in ordered], stack.trained, network.layout)
    index, scale, last = (t.to(network.device) for t in (plan.index, plan.scale, plan.last))
    totals = torch.zeros(len(ordered), device=network.device)
    settings = training if len(plan.active) > 1 else replace(training, momentum=0.0)  # a single step needs no velocity
    if chain is None:  # a chain never calls the module
        network.module.train(True)
    for t, active in enumerate(plan.active):
        for rows, width in _parts(plan, t, active, apart=batch_norm):
            x, y = data.batch(index[t, rows, :width])
            part = stack.rows(rows)
            if chain is not None:
                losses, gradients = chain.gradients(part.trained, x, y, scale[t, rows, :width], buffers)
            else:
                losses, gradients = part.gradients(x, y, scale[t, rows, :width], low=low)
            if objective.is_regression(y):
                gradients = objective.bounded(gradients)
            part.step(gradients, terms, rows, settings, first=t == 0)
            stack.put(rows, part)
            totals[rows] += (losses * last[t, rows, :width]).sum(1)
    return _outcomes([fits[row][0] for row in plan.rows], stack.flat(), totals.cpu(), plan, training)


def _parts(plan: Schedule, t: int, active: int, *, apart: bool) -> list[tuple[slice | Tensor, int]]:
    """Return the active rows and their batch size: all together, or by size where sizes must not be mixed."""
    sizes = plan.sizes[t, :active]
    distinct = sorted(set(sizes.tolist()))
    if not apart or len(distinct) == 1:
        return [(slice(0, active), distinct[-1])]
    return [(torch.from_numpy((sizes == size).nonzero()[0]), size) for size in distinct]


def _outcomes(clients: Sequence[Client], states: Tensor, totals: Tensor, plan: Schedule, training: Training) -> list[Outcome]:
    """Return the replies in the order of the request; ``trained`` raises if a training diverged."""
    outcomes: list[Outcome] = [{}] * len(clients)
    sums = states.sum(1).add_(totals).tolist()
    rows = zip(plan.rows, clients, states, totals.tolist(), plan.steps, sums, strict=True)
    for row, client, theta, total, steps, checksum in rows:
        n = len(client.site.train)
        try:
            outcomes[row] = trained(theta, n, total / n, steps, training, known_finite=math.isfinite(checksum), own=True)
        except ClientError as error:  # of this client alone
            outcomes[row] = error
    return outcomes


def embeds_together(client: Client, work: Embed) -> bool:
    """Whether samples of several clients may pass the network together: one does not change another's embedding."""
    mixes = client.network.layout.batch_statistics  # a BatchNorm without running statistics normalises by what passes with it
    return work.mode == "eval" and client.precision == "fp32" and not client.checks_models and not mixes


@torch.no_grad()
def embed_together(works: Sequence[tuple[Client, Embed]]) -> list[Outcome]:
    """Embed the samples of many clients: one pass for all samples under one model and projection."""
    outcomes: list[Outcome] = [{}] * len(works)
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (_, work) in enumerate(works):
        groups.setdefault((work.state.data_ptr(), id(work.matrix)), []).append(i)
    network, preprocess = works[0][0].network, works[0][0].preprocess  # the same for all clients of a scenario
    network.module.train(False)
    shown: list[tuple[str, str, int]] = []
    for members in groups.values():
        work = works[members[0]][1]
        network.load(work.state)
        wanted = [(client.name, own.split, id(own.indices)) for client, own in (works[i] for i in members)]
        if wanted != shown:  # the same samples under many models are gathered once
            parts = [client.rows(own.split, own.indices) for client, own in (works[i] for i in members)]
            x, sizes, shown = preprocess(torch.cat(parts)), [len(part) for part in parts], wanted
            at_once = min(SAMPLES, max(1, FORWARD // max(1, x[0].numel())))
        z = torch.empty(len(x), network.layout.embedding_width if work.matrix is None else work.matrix.shape[1])
        for part, out in zip(x.split(at_once), z.split(at_once), strict=True):
            embedded = network.embed(part)
            out.copy_(embedded) if work.matrix is None else torch.mm(embedded, work.matrix, out=out)
        for i, own_z in zip(members, z.split(sizes), strict=True):
            outcomes[i] = {"z": own_z}
    return outcomes


@torch.no_grad()
def score_together(works: Sequence[tuple[Client, Score]], chain: Chain, buffers: Buffers) -> list[Outcome]:
    """Score every client's models on its own samples: one batched product for the samples of all clients with the same models."""
    outcomes: list[Outcome] = [{}] * len(works)
    groups: dict[int, list[int]] = {}
    for i, (_, work) in enumerate(works):
        groups.setdefault(id(work.models), []).append(i)
    entries = [e for e in works[0][0].network.layout.entries if e.trainable]
    for alike in groups.values():
        models = torch.stack(list(works[alike[0]][1].models))
        weights = [models[:, e.slice].reshape(-1, *e.shape) for e in entries]
        splits = {i: client.split(work.split) for i, (client, work) in ((i, works[i]) for i in alike)}
        most = FORWARD // (len(models) * max(w.shape[1] for w in weights))
        for members in _portions({i: len(split) for i, split in splits.items()}, most):
            x = torch.cat([works[i][0].preprocess(splits[i].x) for i in members]).expand(len(models), *[-1] * splits[members[0]].x.dim())
            y = torch.cat([splits[i].y for i in members]).expand(len(models), -1)
            logits = chain.logits(weights, x, buffers)
            losses, correct = objective.losses(logits, y), logits.argmax(1) == y
            sizes = [len(splits[i]) for i in members]
            for i, own, right in zip(members, losses.split(sizes, 1), correct.split(sizes, 1), strict=True):
                outcomes[i] = {"losses": own.clone(), "correct": right.clone()}
    return outcomes


def _portions(sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """Divide clients, in their order, so that a portion holds at most so many samples, or one client."""
    portions: list[list[int]] = []
    held = most
    for i, size in sizes.items():
        if held + size > most:
            portions.append([])
            held = 0
        portions[-1].append(i)
        held += size
    return portions
