"""``emdcfl data check --fix``: repairs for what the check found, as a config that ``emdcfl run`` takes. Nobody's files are changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import tomli_w

from emdcfl.core.units import names
from emdcfl.data.own.checking.check import FolderReport
from emdcfl.data.own.checking.columns import ID_NAME, REPEATS, ColumnProfile, Doubt
from emdcfl.data.own.cleaning import folded, label_variants
from emdcfl.data.own.formats.dates import readings
from emdcfl.data.own.parts import MIN_SAMPLES
from emdcfl.data.own.tables import read_list

PASSES = 3
"""Checks in a row: a repair may bring the next doubt to light."""
MAX_MARKS = 5
"""Different words among numbers up to which they are taken for marks of missing values."""
MIN_VALUES = 3
"""Values of an identifier that a site needs to be split by them."""

Options = dict[str, Any]


def propose(check: Callable[[Options], FolderReport], given: Mapping[str, Any]) -> tuple[Options, dict[str, str], FolderReport]:
    """Repair until a check (options of a scenario of own files → report) finds nothing more to repair.

    Returns the options given with the repairs added; why, by option (``drop``) or its entry (``drop.visit``); and the report with them.
    """
    options: Options = {name: value for name, value in given.items() if value is not None}
    reasons: dict[str, str] = {}
    report = check(options)
    for _ in range(PASSES):
        more = _repairs(report, options, reasons)
        if more == options:
            break
        options, report = more, check(more)
    return options, reasons, report


def _repairs(report: FolderReport, options: Options, reasons: dict[str, str]) -> Options:
    """Return the options with one repair for every doubt that has one."""
    found = dict(options)
    spelled = {client.name: [report.renamed.get(word, word) for word in client.spelled] for client in report.clients}
    for repair, sentence in label_variants(spelled):
        if repair == "label_map":
            reasons["label_map"] = f"{sentence}: which is which?"
        elif len({folded(word) for words in spelled.values() for word in words}) > 1:
            found["merge_labels"], reasons["merge_labels"] = True, sentence
    lists = {name: list(read_list(options.get(name), f"--{name}")) for name in ("drop", "date", "missing", "leave_out")}
    small, apart = _small_sites(report), []
    lists["leave_out"] += small
    reasons |= {f"leave_out.{site}": f"{n} rows, at least {MIN_SAMPLES} are needed; it can join later" for site, n in small.items()}
    for column in report.columns:
        if column.name in report.left_out:
            continue
        empty = [site for site, one in column.sites.items() if one.missing == one.rows and site not in small]
        if column.doubt is None and 0 < len(empty) < len(column.sites) - len(small) and "only" not in found:
            lists["drop"].append(column.name)
            reasons[f"drop.{column.name}"] = f"no value at {names(empty)}, and so tells which site it is"
        if column.doubt is None:
            continue
        if column.doubt == Doubt.UNITS:
            apart.append(f"{column.name} at {names(column.odd)}")
            reasons["units"] = (
                f"numbers apart from those of the other sites: convert them in the files, or drop the column: {'; '.join(apart)}"
            )
            continue
        key, entries, why = _repair(column, found)
        if key == "group":
            found["group"], reasons["group"] = column.name, why
        elif "only" in found and key == "drop":
            reasons["only"] = f"{column.name}: {why}"
        else:
            lists[key] += [entry for entry in entries if entry not in lists[key]]
            reasons |= {f"{key}.{entry}": why for entry in entries}
    return found | {name: entries for name, entries in lists.items() if entries}


def _small_sites(report: FolderReport) -> dict[str, int]:
    """Return sites with too few samples and their number; none where most sites are small: the column of sites may be a wrong one."""
    sizes = {client.name: sum(client.sizes.values()) for client in report.clients}
    small = {name: n for name, n in sizes.items() if n < MIN_SAMPLES}
    return small if 2 * len(small) <= len(sizes) and len(sizes) - len(small) > 1 else {}


def _repair(column: ColumnProfile, options: Options) -> tuple[str, list[str], str]:
    """Return the option that repairs a column, its entries, and why."""
    why = str(column.doubt)
    if column.doubt == Doubt.DATES:
        ways = [readings(one.words) for one in column.sites.values() if one.words]
        if all(len(way) == 1 for way in ways):
            return "date", [column.name], "dates, as days since 1970; or drop it"
        return "drop", [column.name], f"dates; day or month first? then: date = [{column.name}:{' or '.join(ways[0])}]"
    if column.doubt == Doubt.CODE:
        return "missing", list(column.odd), f"in {column.name}, unlike its other values"
    if (
        column.doubt == Doubt.TEXT_AMONG_NUMBERS
        and len(column.odd) <= MAX_MARKS
        and not any(re.match(r"\s*[<>≤≥]", word) for word in column.odd)
    ):
        return "missing", list(column.odd), f"text among the numbers of {column.name}"
    if column.doubt == Doubt.SOME_SITES:
        why = f"only at {', '.join(column.sites)}"
    if column.doubt == Doubt.IDS and not options.keys() & {"group", "split", "split_column"} and _repeats(column):
        return "group", [column.name], "identifiers of who was measured repeatedly: kept in one split, and no feature"
    return "drop", [column.name], why


def _repeats(column: ColumnProfile) -> bool:
    """Whether an identifier has several rows for some of its values, and every site enough values to be split by them."""
    different, rows = (
        sum(counts) for counts in zip(*((one.different, one.rows - one.missing) for one in column.sites.values()), strict=True)
    )
    enough = all(one.different >= MIN_VALUES for one in column.sites.values())
    return bool(ID_NAME.search(column.name)) and enough and REPEATS * different <= rows


def write_recipe(path: str, options: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Return the config, with the reason for every repair beside it."""
    lines = [
        "# Repairs proposed by 'emdcfl data check --fix'. Read and correct them; your files stay as they are.",
        "# Then: emdcfl data check THIS_FILE, and emdcfl run THIS_FILE",
        "[scenario]",
        'name = "folder"',
        f"path = {_value(path)}",
    ]
    for name, value in options.items():
        if isinstance(value, list):
            lines.append(f"{name} = [")
            lines += [f"    {_value(entry)},{_comment(reasons.get(f'{name}.{entry}', ''))}" for entry in value]
            lines.append("]")
        else:
            lines.append(f"{name} = {_value(value)}{_comment(reasons.get(name, ''))}")
    lines += [f"# {name}:{_comment(reasons[name]).removeprefix('  #')}" for name in ("label_map", "only", "units") if name in reasons]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")


def _comment(why: str) -> str:
    """One line, whatever a column is called."""
    return f"  # {''.join(c if c.isprintable() else '?' for c in why)}" if why else ""
