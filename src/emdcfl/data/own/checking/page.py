"""The page of ``emdcfl data check``: the same words on the terminal, in HTML and at a node. Built from a ``FolderReport`` alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from emdcfl.core.units import names, plural, quantity, reading_order, some
from emdcfl.data.own.checking.check import ClientReport, FolderReport
from emdcfl.data.own.checking.columns import ColumnProfile, Doubt
from emdcfl.data.own.cleaning import folded
from emdcfl.data.own.notes import LeftOut
from emdcfl.data.own.tables import withheld

MAX_COLUMNS = 200
"""Columns of a table on the page; ``--json`` has all."""
MANY_CLASSES = 20
MANY_SIZES = 5


@dataclass(frozen=True)
class Block:
    """A part of the page: sentences, and a table whose columns in ``right`` hold numbers."""

    title: str
    sentences: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    right: frozenset[int] = frozenset()
    kind: str = ""
    """``problem``, ``note`` or ``sign`` where it looks different."""


@dataclass(frozen=True)
class DataPage:
    """Everything a data steward reads and signs."""

    title: str
    headline: str
    facts: tuple[tuple[str, str], ...]
    blocks: tuple[Block, ...]


def data_page(report: FolderReport, *, across: int = 3) -> DataPage:
    """Write the page; tables list up to ``across`` sites beside each other, and summarise more."""
    report = replace(report, clients=tuple(report.clients[i] for i in reading_order([client.name for client in report.clients])))
    left_out = [note for note in report.notes if isinstance(note, LeftOut)]
    doubts = [note for note in report.notes if not isinstance(note, LeftOut)]
    blocks = [
        Block("Fix before a run", report.errors, kind="problem"),
        Block("Look at this first", tuple(doubts), kind="note"),
        Block("Read with these repairs", report.repairs),
        _sites(report),
        _classes(report),
        _images(report),
        _columns(report, across),
        _repeats(report),
        Block("Left out", (*_dropped(report, left_out), *left_out)),
        Block("What each site reveals", tuple(_reveals(report)) if report.clients else ()),
        _signature(report),
    ]
    return DataPage(
        f"Data check of {report.path}", headline(report), tuple(_facts(report)), tuple(b for b in blocks if b.sentences or b.rows)
    )


def headline(report: FolderReport) -> str:
    """Say whether a run can start."""
    if report.errors:
        return f"{plural(len(report.errors), 'problem')} to fix before a run"
    return "ready to run; read the notes first" if report.notes else "ready to run"


def _facts(report: FolderReport) -> Iterator[tuple[str, str]]:
    if not report.clients:
        return
    yield "sites", str(len(report.clients))
    yield ("images" if report.kind == "images" else "rows"), f"{sum(sum(c.sizes.values()) for c in report.clients):,}"
    if report.classes:
        yield "classes", str(len(report.classes))
    if report.kind == "table":
        yield "features", f"{len(report.columns) - len(report.left_out):,}"
        yield ("label" if report.classes else "predicted"), str(report.label)
    elif report.shape:
        yield "read as", f"{report.shape[2]}×{report.shape[1]} {'grey' if report.shape[0] == 1 else 'RGB'}"


def _sites(report: FolderReport) -> Block:
    splits = list(dict.fromkeys(split for client in report.clients for split in client.sizes))
    rows = [(c.name, *(str(c.sizes.get(split, 0)) for split in splits), _balance(c)) for c in report.clients]
    heads = ("site", *("rows" if split == "all" else split for split in splits), "classes" if report.classes else str(report.label))
    return Block("Sites", (), heads, tuple(rows), frozenset(range(1, 1 + len(splits))))


def _balance(client: ClientReport) -> str:
    """Write the number of samples per class: each where there are few classes, else the range; of numbers to predict, theirs."""
    if found := client.numbers:
        return f"{quantity(found['low'])} to {quantity(found['high'])}, mean {quantity(found['mean'])}"
    labels = client.labels or client.spelled
    if len(labels) <= 6:
        return ", ".join(f"{name}: {count}" for name, count in labels.items())
    low, high = min(labels.values()), max(labels.values())
    return f"{len(labels)} classes, {low if low == high else f'{low} to {high}'} samples each"


def _classes(report: FolderReport) -> Block:
    """Every class with its spellings, and the sites that have each."""
    if len(report.classes) > MANY_CLASSES:
        return Block("Classes", (f"{len(report.classes)} classes: {some(report.classes)}",))
    rows = []
    for name in report.classes:
        at: dict[str, list[str]] = {}
        for client in report.clients:
            for word in client.spelled:
                if report.renamed.get(word, word) == name:
                    at.setdefault(word, []).append(client.name)
        samples = sum(n for client in report.clients for word, n in client.spelled.items() if word in at)
        sites = {site for found in at.values() for site in found}
        same = list(at) == [name]
        everywhere = len(sites) == len(report.clients)
        spelled = "alike" if same else "; ".join(f"{word!r} at {names(found)}" for word, found in at.items())
        others = [other for other in report.classes if other != name and folded(other) == folded(name)]
        where = "all" if everywhere else names(sorted(sites))
        rows.append((name, f"{samples:,}", where, f"like {some(list(map(repr, others)))}?" if others else spelled))
    return Block("Classes", (), ("class", "samples", "sites", "spelled"), tuple(rows), frozenset({1}))


def _images(report: FolderReport) -> Block:
    rows = [(c.name, _image_sizes(c.images)) for c in report.clients if c.images]
    return Block("Images as they are stored", (), ("site", "size and colour (images)"), tuple(rows))


def _image_sizes(images: Mapping[str, int]) -> str:
    """Write sizes and colours with their numbers of images; where there are many, the range of the widths and heights of each colour."""
    if len(images) <= MANY_SIZES:
        return ", ".join(f"{what} ({n})" for what, n in images.items())
    colours: dict[str, list[tuple[int, int, int]]] = {}
    for what, n in images.items():
        size, _, colour = what.partition(" ")
        width, height = map(int, size.split("×"))
        colours.setdefault(colour, []).append((width, height, n))
    said = []
    for colour, found in colours.items():
        widths, heights, numbers = zip(*found, strict=True)
        span = "×".join(str(low) if (low := min(x)) == max(x) else f"{low}–{max(x)}" for x in (widths, heights))
        said.append(f"{span} {colour} ({sum(numbers)}{f' in {len(found)} sizes' if len(found) > 1 else ''})")
    return ", ".join(said)


def _columns(report: FolderReport, across: int) -> Block:
    """Columns with kind, and range or words per site; the most suspicious first."""
    gravity = {doubt: i for i, doubt in enumerate(Doubt)}
    columns = sorted(report.columns, key=lambda column: gravity[column.doubt] if column.doubt else len(gravity))
    sites = [client.name for client in report.clients]
    side_by_side = len(sites) <= across
    heads = ("column", "what it is", *(sites if side_by_side else ("all sites", "differs most")), "missing")
    shown = columns[:MAX_COLUMNS]
    rows = []
    for column in shown:
        missing = f"{column.missing:,}" if column.missing else "–"
        what = _what(column, sites, column.name in report.left_out)
        rows.append((column.name, what, *_ranges(column, sites, side_by_side), missing))
    doubtful = sum(column.doubt is not None for column in columns)
    sentences = []
    if doubtful:
        come = "looks doubtful and comes" if doubtful == 1 else "look doubtful and come"
        sentences.append(f"{plural(doubtful, 'column')} of {len(columns):,} {come} first")
    if len(columns) > len(shown):
        kinds = Counter(column.kind for column in columns[len(shown) :])
        sentences.append(f"not listed, see --json: {', '.join(f'{n:,} {kind}' for kind, n in kinds.most_common())}")
    return Block("Columns", tuple(sentences), heads, tuple(rows), frozenset({len(heads) - 1}))


def _what(column: ColumnProfile, sites: Sequence[str], left_out: bool) -> str:
    if column.doubt == Doubt.SOME_SITES:
        told = f"only at {len(column.sites)} of {len(sites)} sites"
    else:
        told = column.kind if column.doubt in (None, Doubt.DATES) else str(column.doubt)
    return f"{told} (left out)" if left_out else told


def _ranges(column: ColumnProfile, sites: Sequence[str], side_by_side: bool) -> Iterator[str]:
    if side_by_side:
        yield from (column.range_at(site) for site in sites)
        return
    yield column.range_over()
    odd = column.odd_one_out()
    yield "–" if odd is None else f"{odd}: {column.range_at(odd)}"


def _repeats(report: FolderReport) -> Block:
    found = report.repeats
    if found is None:
        return Block("Equal samples")
    sentences = found.sentences() or ["none: no sample equals another one across splits or sites"]
    shown = sentences[:MANY_CLASSES]
    if len(sentences) > len(shown):
        shown.append(f"{len(sentences) - len(shown)} more with --json")
    if found.by_chance and len(sentences) > 1:
        shown.append("most rows repeat inside their site, so that chance explains these")
    elif found.sentences() and not found.notes(""):
        shown.append("chance may give as many")
    return Block("Equal samples", tuple(shown))


def _dropped(report: FolderReport, notes: Sequence[str]) -> Iterator[str]:
    """Columns that are left out and no note names."""
    asked = [name for name in report.left_out if not any(repr(name) in note for note in notes)]
    if asked:
        yield f"columns that are no features: {some(asked, most=MANY_CLASSES)}"


def _reveals(report: FolderReport) -> Iterator[str]:
    """What leaves a site; docs/explanation/privacy.md has the whole list."""
    yield (
        "Run on this machine (emdcfl run --data), nothing leaves it. The run directory names sites, classes and columns, and holds trained "
        "models; delete state/ and personal/, which hold models of single sites, before you hand it on."
    )
    if not report.classes:
        yield "Numbers are predicted on one machine alone: a federation of nodes predicts classes."
        return
    before = f"In a federation, the server learns of each site before training: its classes ({some(report.classes)}) and number of samples"
    if report.kind == "images":
        yield f"{before}; image sizes; sums of its pixels and of their squares."
    else:
        features = [column for column in report.columns if column.name not in report.left_out]
        textual = [column for column in features if column.words]
        told = [column.name for column in textual if not any(withheld(one.words) for one in column.sites.values())]
        kept = [column.name for column in textual if column.name not in told]
        words = f"; the words in {some(told)}" if told else ""
        yield (
            f"{before}; {plural(len(features), 'column name')}; how many values each of the {len(features) - len(textual):,} columns of "
            f"numbers has, their mean, spread and unit{words}."
        )
        if kept:
            yield f"A node would refuse to list the words in {some(kept)}, which look like names or free text, and take no part; drop them."
    yield (
        "While training, the server receives the site's model every round, losses, accuracies, and projected embeddings of samples; "
        "no row, no image, no label. Trained models can give away samples that they were trained on."
    )
    yield (
        "Partners receive the class counts of its validation sample and averages of models, from which they may learn its own trained "
        "model (grouping by benefit, the default). 'emdcfl node check HOME' lists what a node's own policy releases; "
        "docs/explanation/privacy.md says what protects it and what does not."
    )


def _signature(report: FolderReport) -> Block:
    if not report.clients:
        return Block("Signature")
    rows = tuple((client.name, client.fingerprint, "") for client in report.clients)
    text = "A run notes these fingerprints and refuses to go on with other samples: one changed cell changes them."
    return Block("Signature", (text,), ("site", "fingerprint of its samples", "name, date, signature"), rows, kind="sign")
