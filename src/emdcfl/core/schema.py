"""Validation of replies. Nothing from a client is trusted: ``check`` validates every reply before a method sees it.

A task declares its reply as a mapping from field name to ``Field``. Shapes may name dimensions of the federation
(``"P"`` the length of θ, ``"d"`` the embedding width) or leave a size open (``None``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.errors import ClientError
from emdcfl.core.params import stacked

Reply = dict[str, Any]
"""Field name → tensor, number, text, bytes, or a dict of them."""

SHARED_OUT = 1 << 15
"""Numbers from which torch distributes a sum over threads."""


@dataclass(frozen=True)
class Field:
    """One field of a reply."""

    kind: torch.dtype | type
    """A dtype for tensors; ``int``, ``float``, ``str`` or ``bytes`` otherwise."""
    shape: tuple[int | str | None, ...] = ()
    """Sizes, names of dimensions, or ``None`` for any size (tensors only)."""
    low: float | None = None
    """Smallest value allowed; of text and bytes, the smallest length."""
    high: float | str | None = None
    """Largest value, or length, allowed; a name refers to a dimension, as in shapes."""
    each: bool = False
    """The field is a dict from name to such a value."""
    optional: bool = False
    """The field may be missing."""
    blamed: bool = True
    """Whether a value that is too large or not finite is the sender's fault. A loss is not: the model it was served may have diverged."""
    finite: bool = True
    """Whether all numbers of a tensor must be finite; otherwise whoever reads them says which it can use (``not_finite``)."""


STATE = ("P",)
"""Shape of a model state."""


class DivergedError(ClientError):
    """A reply that cannot be used, though its sender may have followed the rules: the model it was served may have diverged."""


def check(reply: Any, fields: Mapping[str, Field], dims: Mapping[str, int], squares: dict[str, float] | None = None) -> None:
    """Raise ``ClientError`` with the reason if the reply is not what the task declares.

    ``squares`` receives the sum of squares of every model state on the host, which shows at the same cost that it is finite.
    """
    if not isinstance(reply, dict):
        raise ClientError(f"expected a reply with fields {sorted(fields)}, got {type(reply).__name__}")
    if reply.keys() != fields.keys():
        required = {name for name, field in fields.items() if not field.optional}
        if not required <= set(reply) <= set(fields):
            raise ClientError(f"expected a reply with fields {sorted(fields)}, got {sorted(map(str, reply))}")
    for name, value in reply.items():
        field = fields[name]
        if field.each:
            if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
                raise ClientError(f"expected {name} to map names to values, got {type(value).__name__}")
            known = not field.finite or _all_finite(value.values())
            for key, item in value.items():
                _check_value(f"{name}[{key}]", item, field, dims, known_finite=known)
        else:
            _check_value(name, value, field, dims, squares=squares)


def all_pass(replies: Sequence[Any], fields: Mapping[str, Field], dims: Mapping[str, int], *, norm: float) -> bool:
    """Whether all replies pass ``check`` and no state is longer than ``norm``: one look per field, not per reply, is several times faster.

    It says no if one is at fault, and where fields are neither numbers nor states on the host: then ``check`` each.
    """
    if set(map(type, replies)) != {dict} or set(map(len, replies)) != {len(fields)}:
        return False
    try:
        columns = {name: list(map(itemgetter(name), replies)) for name in fields}
    except KeyError:
        return False
    return all(_column_passes(columns[name], field, dims, norm) for name, field in fields.items())


def _column_passes(values: Sequence[Any], field: Field, dims: Mapping[str, int], norm: float) -> bool:
    if field.kind is torch.float32 and field.shape == STATE and not field.each:
        state = (field.kind, torch.strided, torch.device("cpu"), (dims["P"],))
        alike = set(map(type, values)) == {Tensor} and all((v.dtype, v.layout, v.device, v.shape) == state for v in values)
        return alike and torch.linalg.vector_norm(stacked(values), dim=1).max().item() <= norm  # not so if one is not a number
    if field.kind not in (int, float) or field.each or set(map(type, values)) != {field.kind}:
        return False
    try:
        _check_range("", min(values), max(values), field, dims)
    except ClientError:
        return False
    return field.kind is int or math.isfinite(sum(values))


def _check_value(
    name: str, value: Any, field: Field, dims: Mapping[str, int], *, known_finite: bool = False, squares: dict[str, float] | None = None
) -> None:
    kind = field.kind
    if isinstance(kind, torch.dtype):
        _check_tensor(name, value, field, dims, known_finite, squares)
        return
    if type(value) is not kind:
        if kind is not float or not isinstance(value, int) or isinstance(value, bool):
            raise ClientError(f"expected {name} to be {kind.__name__}, got {type(value).__name__}")
        value = float(value) if abs(value) < 10**300 else math.inf
    if kind is float and not math.isfinite(value):
        raise (ClientError if field.blamed else DivergedError)(f"{name} is not finite ({value})")
    if isinstance(value, (int, float)):
        _check_range(name, value, value, field, dims)
    elif field.low is not None or field.high is not None:
        _check_range(f"the length of {name}", len(value), len(value), field, dims)


def _check_tensor(
    name: str, value: Any, field: Field, dims: Mapping[str, int], known_finite: bool, squares: dict[str, float] | None
) -> None:
    if not isinstance(value, Tensor) or value.dtype != field.kind or value.layout is not torch.strided:
        got = type(value).__name__
        if isinstance(value, Tensor):
            got = str(value.dtype if value.layout is torch.strided else value.layout)
        raise ClientError(f"expected {name} as {field.kind}, got {got}")
    wanted = [dims[size] if isinstance(size, str) else size for size in field.shape]
    if len(value.shape) != len(wanted) or any(want not in (None, have) for want, have in zip(wanted, value.shape, strict=True)):
        sizes = tuple("any" if want is None else want for want in wanted)
        raise ClientError(f"expected {name} of shape {sizes}, got {tuple(value.shape)}")
    if squares is not None and field.shape == STATE and value.device.type == "cpu":
        squares[name] = _sum_of_squares(value)
        known_finite = math.isfinite(squares[name])
    if value.is_floating_point() and not known_finite and not finite(value):
        raise (ClientError if field.blamed else DivergedError)(f"{name} holds values that are not finite")
    if (field.low is not None or field.high is not None) and value.numel():
        _check_range(name, value.min().item(), value.max().item(), field, dims)


def _sum_of_squares(value: Tensor) -> float:
    if value.numel() < SHARED_OUT:
        return torch.dot(value, value).item()
    flat = value.detach().numpy()  # see finite
    with np.errstate(over="ignore", invalid="ignore"):
        return float(flat @ flat)


def _check_range(name: str, smallest: float, largest: float, field: Field, dims: Mapping[str, int]) -> None:
    if field.low is not None and smallest < field.low:
        raise ClientError(f"expected {name} >= {field.low:g}, got {_shown(smallest)}")
    high = dims[field.high] if isinstance(field.high, str) else field.high
    if high is not None and largest > high:
        raise (ClientError if field.blamed else DivergedError)(f"expected {name} <= {high:g}, got {_shown(largest)}")


def _shown(value: float) -> str:
    # an integer beyond the range of floats cannot be formatted as one, and its digits could fill a page
    return f"{value:g}" if isinstance(value, float) else str(value) if abs(value) < 10**15 else "a huge integer"


def _all_finite(values: Collection[Any]) -> bool:
    """Whether all values are finite tensors of one device: one sum, or one synchronisation of a GPU, for all instead of one each."""
    if not values or not all(isinstance(value, Tensor) and value.is_floating_point() for value in values):
        return False
    if all(value.device.type == "cpu" and value.dtype in (torch.float32, torch.float64) for value in values):
        with np.errstate(over="ignore", invalid="ignore"):  # NumPy: see finite
            return math.isfinite(np.concatenate([value.detach().numpy().ravel() for value in values]).sum())
    return all(value.is_cuda for value in values) and bool(torch.stack([value.sum() for value in values]).isfinite().all())


def not_finite(values: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that hold numbers which are not finite."""
    return [] if _all_finite(values.values()) else [name for name, value in values.items() if not finite(value)]


def finite(value: Tensor) -> bool:
    """Whether all numbers are finite.

    A finite sum has finite terms and costs a tenth of testing each of them, which only a sum that overflows needs. NumPy sums large
    tensors on the host: torch would wait for its own threads while transport problems occupy the cores.
    """
    if value.numel() >= SHARED_OUT and value.device.type == "cpu" and value.dtype in (torch.float32, torch.float64):
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(value.detach().numpy().sum())
    else:
        total = value.sum().item()
    return math.isfinite(total) or bool(torch.isfinite(value).all())
