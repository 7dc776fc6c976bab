"""Durations, sizes and lists of names as people write them, in logs, reports and on terminals."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence
from itertools import pairwise


def seconds(value: float | None) -> str:
    """Write a duration for people.

    Examples
    --------
    >>> seconds(0.328), seconds(74.2), seconds(7300)
    ('0.33 s', '74 s', '2 h 2 min')
    """
    if value is None:
        return "–"
    if value < 120:
        return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def byte_count(value: float) -> str:
    """Write a number of bytes for people.

    Examples
    --------
    >>> byte_count(512), byte_count(3_400_000), byte_count(999_700)
    ('512 B', '3.4 MB', '1 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def percent(value: float | None) -> str:
    """Write a share as a percentage with one digit, a dash for none.

    Examples
    --------
    >>> percent(0.9512), percent(None)
    ('95.1%', '–')
    """
    return "–" if value is None else f"{value:.1%}"


def percent_range(low: float | None, high: float | None) -> str:
    """Write an interval of shares as percentages with one digit, a dash for none.

    Examples
    --------
    >>> percent_range(0.9312, 0.964), percent_range(None, None)
    ('93.1–96.4%', '–')
    """
    return "–" if low is None or high is None else f"{100 * low:.1f}–{high:.1%}"


def quantity(value: float | None) -> str:
    """Write a number in the units of the data with three significant digits, a dash for none.

    Examples
    --------
    >>> quantity(54.321), quantity(12345.6), quantity(999.7), quantity(None)
    ('54.3', '12346', '1000', '–')
    """
    return "–" if value is None else f"{value:.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}"


def plural(n: int, what: str) -> str:
    """Write a number and its noun.

    Examples
    --------
    >>> plural(1, "group"), plural(3, "group")
    ('1 group', '3 groups')
    """
    return f"{n} {what}{'' if n == 1 else 's'}"


HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories of characters that a terminal or a page obeys instead of showing them."""


def escaped(text: str, keep: str = "") -> str:
    r"""Write control, direction and other hidden characters as escapes, so that a name cannot move the cursor or forge a line.

    Examples
    --------
    >>> print(escaped("a\x1b[2Jb\u202ec"))
    a\x1b[2Jb\u202ec
    """
    if text.isprintable():
        return text
    hidden = (unicodedata.category(c) in HIDDEN and c not in keep for c in text)
    return "".join(ascii(c)[1:-1] if hide else c for c, hide in zip(text, hidden, strict=True))


def plot_text(text: str) -> str:
    r"""Write a name for matplotlib, which would read text between dollar signs as a formula.

    Examples
    --------
    >>> print(plot_text("$^$"))
    \$^\$
    """
    shown = escaped(text, keep="\n")
    return (shown if len(shown) <= MAX_LABEL_LENGTH else f"{shown[: MAX_LABEL_LENGTH - 1]}…").replace("$", r"\$")


def spreadsheet_text(text: str) -> str:
    """Return text that a spreadsheet shows and does not compute: hidden characters escaped, a formula's first character quoted.

    Examples
    --------
    >>> spreadsheet_text("=1+1"), spreadsheet_text("-1"), spreadsheet_text("-a")
    ("'=1+1", '-1', "'-a")
    """
    shown = escaped(text)
    return f"'{shown}" if shown.startswith(("=", "@")) or (shown.startswith(("+", "-")) and not _is_number(shown)) else shown


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


MAX_LABEL_LENGTH = 80
"""Characters of a name in a plot."""


def reading_order(clients: Sequence[str]) -> list[int]:
    """Return the positions of clients in the order in which people look for them: alphabetical names by the numbers in them.

    Only for what is shown: results depend on the order of clients. An order that is not alphabetical was somebody's choice.

    Examples
    --------
    >>> reading_order(["1", "10", "2"]), reading_order(["b2", "b10", "a1"])
    ([0, 2, 1], [0, 1, 2])
    """
    positions = range(len(clients))
    if any(a > b for a, b in pairwise(clients)):
        return list(positions)
    return sorted(positions, key=lambda i: _by_numbers(clients[i]))


def _by_numbers(name: str) -> list[str | tuple[int, str]]:
    parts = re.split("([0-9]+)", name)  # every second part is a number, of which int() takes no thousands of digits
    return [(len(own := part.lstrip("0")), own) if i % 2 else part for i, part in enumerate(parts)]


NAMED_IN_FULL = 6
"""Longest list of names that is written out."""


def names(clients: Collection[str]) -> str:
    """Write a list of clients for people: up to six names in full, else their number with the first and the last.

    Examples
    --------
    >>> names(["a", "b"]), names([f"s{i:03d}" for i in range(100)])
    ('a, b', '100 clients (s000 … s099)')
    """
    given = list(clients)
    listed = [escaped(given[i]) for i in reading_order(given)]
    return ", ".join(listed) if len(listed) <= NAMED_IN_FULL else f"{len(listed)} clients ({listed[0]} … {listed[-1]})"


def some(words: Sequence[str], between: str = ", ", *, most: int = 5) -> str:
    """Write the first few words, and how many more there are.

    Examples
    --------
    >>> some(["a", "b"]), some(["a", "b", "c"], " and ", most=2)
    ('a, b', 'a and b and 1 more')
    """
    return between.join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
