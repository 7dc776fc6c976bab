"""Notes for the user about their data: what was left out, what looks doubtful."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from emdcfl.core.units import NAMED_IN_FULL, names, some


@dataclass(frozen=True)
class Note:
    """Something the user should know about one client, or, without one, about a file.

    ``{n}`` in the text stands for ``count``, ``{words}`` for ``words``.
    """

    client: str
    origin: str
    text: str
    count: int = 0
    words: tuple[str, ...] = ()
    doubt: bool = False
    """Whether a flag would repair it."""
    left_out: bool = False
    """Whether it says what is not used."""


class LeftOut(str):
    """The sentence of a note that says what is not used."""


def write_notes(notes: Iterable[Note]) -> list[str]:
    """Write every text once, with all clients it applies to.

    Examples
    --------
    >>> write_notes([Note("a", "a.csv", "rows left out: {n}", 1), Note("b", "b.csv", "rows left out: {n}", 3), Note("b", "b.csv", "small")])
    ['clients a, b: rows left out: 1 to 3', "client 'b' (b.csv): small"]
    >>> write_notes([Note(client, client, "files left out: {n} ({words})", 1, (f"{client}.txt",)) for client in ("a", "b")])
    ['clients a, b: files left out: 1 each (a.txt, b.txt)']
    >>> write_notes([Note("b", "b", "small")])
    ["client 'b': small"]
    """
    grouped: dict[str, list[Note]] = {}
    for note in notes:
        grouped.setdefault(note.text, []).append(note)
    written = []
    for text, same in grouped.items():
        clients = list(dict.fromkeys(note.client for note in same))
        origin = "" if same[0].origin == clients[0] else f" ({same[0].origin})"
        who = names(clients) if len(clients) > 1 else f"client {clients[0]!r}{origin}" if clients[0] else same[0].origin
        counts = [note.count for note in same]
        words = list(dict.fromkeys(word for note in same for word in note.words))
        shown = some(words)
        count = str(counts[0]) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        if len(clients) > 1 and "{n} ({words})" in text:  # the words are of all clients
            count += " each"
        listed = "clients " if 1 < len(clients) <= NAMED_IN_FULL else ""
        sentence = f"{listed}{who}: {text.replace('{n}', count).replace('{words}', shown)}"
        written.append(LeftOut(sentence) if same[0].left_out else sentence)
    return written
