"""Divide a large request into several messages below a size limit, and join the replies.

A task that declares itself ``Divisible`` may be asked about some items now and about the others later. All clients' requests are divided
at the same items: Flower stores equal arrays once, so a tensor that several clients need is uploaded once per part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from emdcfl.core.client import Divisible, TaskInfo
from emdcfl.core.errors import ClientError
from emdcfl.core.federation import Inputs
from emdcfl.core.schema import Reply


def merge_inputs(info: TaskInfo, own: Inputs, common: Inputs) -> dict[str, Any]:
    """Return one client's inputs, without what belongs to items it is not asked about."""
    inputs = {**common, **own}
    rule = info.divisible
    return inputs if rule is None else _only(inputs, rule, inputs[rule.items])


def parts(info: TaskInfo, inputs: Mapping[str, Inputs], limit: int) -> Iterator[dict[str, Inputs]]:
    """Yield the requests of one part after the other, each client's below ``limit`` bytes where its items allow it."""
    rule = info.divisible
    if rule is None:
        yield dict(inputs)
        return
    weight: dict[str, int] = {}
    for own in inputs.values():
        for item in own[rule.items]:
            weight[item] = max(weight.get(item, 0), _weight(own, rule, item))
    groups: list[list[str]] = [[]]
    held = 0
    for item, size in weight.items():
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += size
    for number, chosen in enumerate(map(set, groups)):
        part: dict[str, Inputs] = {}
        for client, own in inputs.items():
            mine = [item for item in own[rule.items] if item in chosen]
            if mine or (number == 0 and not own[rule.items]):  # whoever is asked about nothing still answers once
                part[client] = _only(own, rule, mine)
        yield part


def _only(inputs: Inputs, rule: Divisible, items: list[str]) -> dict[str, Any]:
    chosen = {**inputs, rule.items: items}
    for name in rule.by_item:
        chosen[name] = {item: inputs[name][item] for item in items if item in inputs[name]}
    return chosen


def _weight(inputs: Inputs, rule: Divisible, item: str) -> int:
    values = [inputs[name][item] for name in rule.by_item if item in inputs[name]]
    return sum(v.numel() * v.element_size() if isinstance(v, Tensor) else len(v) for v in values)


def join(replies: list[Reply]) -> Reply:
    """Put the replies to the parts of one request together: dicts by item are united, the rest must agree."""
    joined: Reply = dict(replies[0])
    for reply in replies[1:]:
        if set(reply) != set(joined):
            raise ClientError(f"expected parts of one reply to have the fields {sorted(joined)}, got {sorted(map(str, reply))}")
        for name, value in reply.items():
            if isinstance(value, dict) and isinstance(joined[name], dict):
                joined[name] = {**joined[name], **value}
            elif not _equal(joined[name], value):
                raise ClientError(f"expected {name} to be the same in all parts of a reply, got different values")
    return joined


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return type(a) is type(b) and not isinstance(a, list) and bool(a == b)  # no reply holds a list, and one of tensors has no truth
