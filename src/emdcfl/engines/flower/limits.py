"""What a message may hold at most. Nothing that came over the wire is believed.

Imports errors only.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass

from emdcfl.core.errors import ClientError

MEGABYTE = 1 << 20
AXES = 32
NUMBERS = 1 << 40
"""Most axes of a tensor, and the most its sizes may multiply to with zeros left out: torch can address that."""


@dataclass(frozen=True)
class Limits:
    """Far above what any task needs, and low enough that junk exhausts neither memory nor stack.

    Attributes
    ----------
    size : int
        Bytes in all.
    skeleton : int
        Characters of the JSON text that holds the message's structure, names, numbers and words.
    entries : int
        Entries of dicts and lists, in all.
    parts : int
        Tensors, and byte strings.
    name : int
        Characters of a key.
    depth : int
        Levels of nesting.
    """

    size: int = 4096 * MEGABYTE
    skeleton: int = 16 * MEGABYTE
    entries: int = 1 << 20
    parts: int = 1 << 16
    name: int = 1024
    depth: int = 16

    def check_parts(self, tensors: Sized, blobs: Sized) -> None:
        """Refuse too many tensors or byte strings."""
        for what, held in (("tensors", tensors), ("byte strings", blobs)):
            if len(held) > self.parts:
                raise ClientError(f"expected at most {self.parts} {what} in a message, got {len(held)}")

    def check_text(self, text: str) -> None:
        """Refuse a skeleton that is too long; its length bounds what reading it can allocate."""
        if len(text) > self.skeleton:
            raise ClientError(f"expected at most {self.skeleton} characters of names, numbers and words in a message, got {len(text)}")


LIMITS = Limits()
