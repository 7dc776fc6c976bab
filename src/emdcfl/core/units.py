"""Durations and sizes as people write them, in reports and on terminals. Imports nothing."""

from __future__ import annotations


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
    >>> byte_count(512), byte_count(3_400_000)
    ('512 B', '3.4 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
