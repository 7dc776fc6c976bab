"""Decisions from bytes: what the fuzzer sends is spent on numbers, choices and pieces, and never runs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

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


def one_line(error: Exception) -> None:
    """Raise unless an error message is what people can read: one line, not endless."""
    if "\n" in str(error) or len(str(error)) > 2000:
        raise AssertionError(f"not one line: {str(error)[:2000]!r}") from error
