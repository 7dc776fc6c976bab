"""Random lies: one client replaces a random field of its replies to a random task by a random value, in some rounds or in all.

A case is drawn from a number, so that a failing one can be played again by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tests.tiny import tiny
from tests.trust.liars import LyingFederation
from torch import Tensor

from emdcfl.core.federation import Inputs
from emdcfl.core.schema import Reply
from emdcfl.methods import METHODS, make
from emdcfl.runs.loop import play
from emdcfl.trust.bounds import MAX_GROWTH

LIAR = "site-1"
ROUNDS = 4
Lie = Callable[[Any, np.random.Generator], Any]


def _noise(x: Tensor, rng: np.random.Generator, scale: float) -> Tensor:
    drawn = torch.from_numpy(scale * rng.standard_normal(tuple(x.shape)))
    return drawn.to(x.dtype) if x.is_floating_point() else drawn.clamp(-9e18, 9e18).long().to(x.dtype)


TENSOR: dict[str, Lie] = {
    "NaN": lambda x, _: x * math.nan if x.is_floating_point() else x - 1,
    "infinite": lambda x, _: x * math.inf if x.is_floating_point() else torch.full_like(x, 2**62),
    "one NaN": lambda x, _: x.clone().index_fill_(0, torch.tensor([0]), math.nan) if x.is_floating_point() and len(x) else x,
    "zero": lambda x, _: torch.zeros_like(x),
    "reversed": lambda x, _: -x,
    "×9": lambda x, _: x * 9,
    "×90": lambda x, _: x * 90,
    "×1e4": lambda x, _: x * 10**4,
    "×1e30": lambda x, _: x * 1e30 if x.is_floating_point() else x * 10**6,
    "noise": lambda x, rng: _noise(x, rng, 1.0),
    "large noise": lambda x, rng: _noise(x, rng, 50.0),
    "largest": lambda x, _: torch.full_like(x, torch.finfo(x.dtype).max if x.is_floating_point() else 2**62),
    "denormal": lambda x, _: torch.full_like(x, 1e-40) if x.is_floating_point() else x,
    "half": lambda x, _: x.half(),
    "float64": lambda x, _: x.double(),
    "complex": lambda x, _: x.to(torch.complex64),
    "truth values": lambda x, _: x > 0,
    "no axis": lambda x, _: x.reshape(-1)[0].clone() if x.numel() else torch.tensor(0.0),
    "one axis more": lambda x, _: x[None],
    "empty": lambda x, _: x[:0],
    "one row less": lambda x, _: x[:-1],
    "twice": lambda x, _: torch.cat([x, x]) if x.dim() else x,
    "one column less": lambda x, _: x[..., :-1],
    "list": lambda x, _: x.tolist(),
    "array": lambda x, _: x.numpy(),
    "sparse": lambda x, _: x.to_sparse() if x.dim() else x,
    "permuted": lambda x, rng: x.flatten()[torch.from_numpy(rng.permutation(x.numel()))].view(x.shape),
}
NUMBER: dict[str, Lie] = {
    "zero": lambda x, _: type(x)(0),
    "negative": lambda x, _: -abs(x) - 1,
    "×1000": lambda x, _: x * 1000,
    "+1": lambda x, _: x + 1,
    "1e9": lambda x, _: type(x)(10**9),
    "2^62": lambda x, _: type(x)(2**62),
    "400 digits": lambda x, _: 10**400,
    "NaN": lambda x, _: math.nan,
    "infinite": lambda x, _: math.inf,
    "1e308": lambda x, _: 1e308,
    "tiny": lambda x, _: 1e-320,
    "true": lambda x, _: True,
    "text": lambda x, _: str(x),
    "tensor": lambda x, _: torch.tensor(x),
    "none": lambda x, _: None,
    "complex": lambda x, _: complex(x),
}
BYTES: dict[str, Lie] = {
    "empty": lambda x, _: b"",
    "zeros": lambda x, _: bytes(len(x)),
    "random": lambda x, rng: rng.bytes(len(x)),
    "long": lambda x, _: x * 1000,
    "one less": lambda x, _: x[:-1],
    "text": lambda x, _: x.hex(),
    "none": lambda x, _: None,
}
TEXT: dict[str, Lie] = {"control": lambda x, _: "\x1b[2J\n\u202e", "long": lambda x, _: "x" * 10**5, "number": lambda x, _: 3}
OTHER: dict[str, Lie] = {"none": lambda x, _: None, "text": lambda x, _: "x", "empty": lambda x, _: {}, "list": lambda x, _: [x]}


def _just_allowed(theta: Tensor, start: Tensor, rng: np.random.Generator) -> Tensor:
    """A state of nearly the largest norm that validation takes without looking at others."""
    random = _noise(theta, rng, 1.0)
    return 0.99 * MAX_GROWTH * max(1.0, float(start.norm())) * random / random.norm()


FROM_START: dict[str, Callable[[Tensor, Tensor, np.random.Generator], Tensor]] = {
    "just allowed": _just_allowed,
    **{f"update ×{f}": lambda theta, start, _, f=f: start + f * (theta - start) for f in (-10, -1, 5, 15, 19, 30, 100, 1000)},  # type: ignore[misc]
    "±1e5": lambda theta, start, _: 1e5 * (1 - 2 * (torch.arange(theta.numel()).view(theta.shape) % 2).float()),
    "unchanged": lambda theta, start, _: start.expand(theta.shape).clone(),
}
"""Lies about a trained state that need the state it began from."""


def lie_about(value: Any, rng: np.random.Generator) -> Any:
    """Return something else than the value."""
    if isinstance(value, dict):
        return _lie_in(value, rng)
    lies: dict[str, Lie] = OTHER
    for kind, found in ((Tensor, TENSOR), ((int, float), NUMBER), (bytes, BYTES), (str, TEXT)):
        if isinstance(value, kind):  # type: ignore[arg-type]
            lies = found
    return lies[str(rng.choice(list(lies)))](value, rng)


def _lie_in(value: dict[str, Any], rng: np.random.Generator) -> Any:
    how, keys = int(rng.integers(8)), list(value)
    if not keys or how == 0:
        return [{}, None, [value], {"site-0": "x"}, {"*": torch.zeros(1)}, {3: 3}, {"\x1b$^$": 0.5}][int(rng.integers(7))]
    some = keys[int(rng.integers(len(keys)))]
    if how == 1:
        return {k: v for k, v in value.items() if k != some}
    if how == 2:
        return {**value, "$^$": value[some]}
    if how == 3:
        return {**{k: v for k, v in value.items() if k != some}, some + "\x00": value[some]}
    if how == 4:
        return {**value, some: lie_about(value[some], rng)}
    seed = int(rng.integers(2**31))
    return {k: lie_about(v, np.random.default_rng(seed)) for k, v in value.items()}


@dataclass
class Case:
    """One liar, drawn from a number."""

    number: int
    method: str = ""
    rounds: tuple[int, ...] = ()
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.number)
        self.method = sorted(METHODS)[self.number % len(METHODS)]
        self.rounds = ((1,), (2,), tuple(range(ROUNDS + 1)))[int(rng.integers(3))]
        self.task, self.field, self.seed, self.whole = rng.random(), rng.random(), int(rng.integers(2**31)), rng.random() < 0.04
        self.model = ("mlp", "tiny_bn")[int(rng.integers(2))]

    def __str__(self) -> str:
        return f"case {self.number}: {self.method} ({self.model}), rounds {self.rounds}: {'; '.join(dict.fromkeys(self.told))}"

    def reply(self, task: str, asked: Inputs, honest: Reply) -> Any:
        """Return what the liar says instead."""
        rng = np.random.default_rng(self.seed)
        if self.whole:
            self.told.append(f"{task} as a whole")
            return [None, [], {}, "x", {**honest, "more": 1}, dict(list(honest.items())[1:])][int(rng.integers(6))]
        name = sorted(honest)[int(self.field * len(honest))]
        start = next((asked[key] for key in ("theta", "own", "models") if asked.get(key) is not None), None)
        state = "theta" if "theta" in honest else "models"
        if state in honest and start is not None and rng.random() < 0.5:
            name, lie = state, str(rng.choice(list(FROM_START)))
            value = FROM_START[lie](honest[name], start if start.dim() == honest[name].dim() else start[0], rng)
        else:
            value = lie_about(honest[name], rng)
        self.told.append(f"{task}.{name} = {value!r:.100}")
        return {**honest, name: value}


TASKS_OF: dict[str, tuple[str, ...]] = {
    "emdcfl": ("describe", "train", "reference", "project", "test"),
    "fedce": ("evaluate", "train", "test"),
    "fedem": ("em_step", "test"),
    "fedrc": ("em_step", "test"),
    "fedsac": ("train_and_basis", "test"),
    "fedsoft": ("soft_train", "test"),
    "ifca": ("evaluate", "train", "test"),
    "pacfl": ("data_subspace", "train", "test"),
}
"""Tasks that a method asks for; the others ask for ``train`` and ``test``."""


def with_liar(case: Case) -> LyingFederation:
    """Everybody is honest but one client, in the replies its case is about."""
    names = TASKS_OF.get(case.method, ("train", "test"))
    target = names[int(case.task * len(names))]

    def lie(fed: LyingFederation, task: str, asked: Any, reply: Reply) -> Reply:
        return case.reply(task, asked, reply) if task == target and fed.index in case.rounds and isinstance(reply, dict) else reply

    return LyingFederation(tiny(clients_per_group=3, n=(32,), val=(32,), test=8, model=case.model), liar=LIAR, lie=lie)


def check_case(number: int) -> Case:
    """Play a case; whatever the liar says, the run ends well and no honest client is blamed or left without a model."""
    case = Case(number)
    fed = with_liar(case)
    options = {"k": 2} if hasattr(make(case.method), "k") else {"threshold": 40.0} if case.method == "pacfl" else {}
    *_, last = play(fed, make(case.method, **options), rounds=ROUNDS)
    blamed = {c: faults[0].reason for c, faults in fed.guard.ledger.faults.items() if c != LIAR}
    assert not blamed, f"{case}: blamed {blamed}"
    untested = {row["client"] for row in last.rows if row["client"] != LIAR and not row["accuracy"]}
    assert not untested, f"{case}: not tested {untested}: {[str(f) for f in fed.failures][-3:]}"
    return case
