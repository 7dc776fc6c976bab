"""Decisions from bytes: what the fuzzer sends is spent on numbers, choices and pieces, and never runs out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from emdcfl.core.codec import DTYPES

Item = TypeVar("Item")


class Feed:
    """Spend bytes from the front; once they are gone, every number is 0 and every piece empty."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def piece(self, size: int) -> bytes:
        """Return the next bytes, at most ``size``."""
        found = self.data[self.at : self.at + size]
        self.at += len(found)
        return found

    def number(self, below: int) -> int:
        """Return a number from 0 to ``below`` - 1."""
        width = max(1, (max(below - 1, 1).bit_length() + 7) // 8)
        return int.from_bytes(self.piece(width), "little") % max(below, 1)

    def choice(self, items: Sequence[Item]) -> Item:
        """Return one of the items."""
        return items[self.number(len(items))]

    def rest(self) -> bytes:
        """Return everything that is left."""
        return self.piece(len(self.data))

    def changed(self, original: bytes) -> bytes:
        """Return the original, damaged: replaced, cut off, or with bytes overwritten in up to eight places."""
        how = self.number(4)
        if how == 0:
            return self.rest()
        if how == 1:
            return original[: self.number(len(original) + 1)]
        content = bytearray(original)
        for _ in range(1 + self.number(8)):
            start = self.number(len(content) + 1)
            content[start : start + (1 if how == 2 else 0)] = self.piece(1 + self.number(8))
        return bytes(content)


def changed_value(feed: Feed, value: Any) -> Any:
    """Return a value of a message with one place of it replaced; which place and by what, the feed decides."""
    if isinstance(value, dict) and value and feed.number(4):
        key = feed.choice(list(value))
        how = feed.number(8)
        if how == 0:
            return {k: v for k, v in value.items() if k != key}
        if how == 1:
            return {**value, any_text(feed): value[key]}
        return {**value, key: changed_value(feed, value[key])}
    if isinstance(value, list) and value and feed.number(4):
        at, how = feed.number(len(value)), feed.number(6)
        if how == 0:
            return value[:at] + value[at + 1 :]
        if how == 1:
            return [*value, value[at]]
        return [*value[:at], changed_value(feed, value[at]), *value[at + 1 :]]
    if isinstance(value, Tensor) and feed.number(4):
        return _changed_tensor(feed, value)
    return any_value(feed)


def _changed_tensor(feed: Feed, value: Tensor) -> Tensor:
    how = feed.number(6)
    if how == 0:
        return value.to(DTYPES[feed.choice(list(DTYPES))])
    if how == 1:
        return value.reshape(-1)[: feed.number(value.numel() + 1)]
    if how == 2:
        return value[None] if feed.number(2) or not value.dim() else value.transpose(0, -1).contiguous()
    if not value.numel():
        return torch.zeros([feed.number(4) for _ in range(feed.number(5))])
    new = value.clone()
    if how == 3 and value.is_floating_point():
        return new * feed.choice(FLOATS)
    flat = new.reshape(-1)
    flat[feed.number(flat.numel())] = feed.choice(FLOATS) if value.is_floating_point() else feed.number(128)  # int8 holds no more
    return flat.view(value.shape)


FLOATS = (0.0, -1.0, 90.0, -1e4, 1e30, 1e-40, math.nan, math.inf, -math.inf, 0.5, 1.0000001)
WHOLE = (0, -1, 1, 2, 7, 64, 10**9, 2**31, 2**62, -(2**63))


def any_text(feed: Feed) -> str:
    """Return some text, often one with a meaning."""
    words = ("", "*", "$^$", "train", "none", "row", "os:system", "../../x", "\x1b[2J", "\u202e", "a" * 2000, "site-0", "label", "\x00")
    return feed.choice(words) if feed.number(3) else feed.piece(feed.number(24)).decode("utf-8", errors="replace")


def any_value(feed: Feed, depth: int = 3) -> Any:
    """Return any value that a message can hold."""
    kind = feed.number(10)
    if kind == 0:
        return feed.choice(WHOLE)
    if kind == 1:
        return feed.choice(FLOATS)
    if kind == 2:
        return any_text(feed)
    if kind == 3:
        return feed.piece(feed.number(70))
    if kind == 4:
        return feed.choice((None, True, False))
    if kind == 5 and depth:
        return [any_value(feed, depth - 1) for _ in range(feed.number(4))]
    if kind == 6 and depth:
        return {any_text(feed): any_value(feed, depth - 1) for _ in range(feed.number(4))}
    if kind == 7:
        return torch.zeros([feed.number(5) for _ in range(feed.number(4))], dtype=DTYPES[feed.choice(list(DTYPES))])
    return feed.number(256) - 1


def one_line(error: Exception) -> None:
    """Raise unless an error message is what people can read: one line, not endless."""
    if "\n" in str(error) or len(str(error)) > 2000:
        raise AssertionError(f"not one line: {str(error)[:2000]!r}") from error
