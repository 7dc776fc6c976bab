"""``load_folder``: a folder of people's own images or tables to a scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from emdcfl.core.errors import DataError
from emdcfl.data.own import defaults
from emdcfl.data.own.images import common_shape, list_images, read_client
from emdcfl.data.own.layout import Layout, discover
from emdcfl.data.own.parts import FRACTIONS, SPLITS, Part, Raw, class_names, divide, known_only, to_site, warnings
from emdcfl.data.own.readers import read_client_tables, read_shared_table
from emdcfl.data.own.tables import TableEncoding, column_kinds, pool, summarise
from emdcfl.data.types import Preprocess, Scenario

Divided = dict[str, dict[str, Part]]
Arrays = Mapping[str, Mapping[str, NDArray[Any]]]


def load_folder(
    path: str | Path,
    *,
    label: str | None = None,
    client: str | None = None,
    seed: int = 0,
    model: defaults.Model = None,
    size: int | None = None,
    fractions: Sequence[float] = FRACTIONS,
) -> Scenario:
    """Read people's own data.

    Parameters
    ----------
    path : path
        One sub-folder per client with class sub-folders of images (optionally below train/val/test), one CSV/TSV/Parquet file per
        client, or one such file with a client column.
    label, client : str, optional
        Columns of tables: the label (default: the first of label, target, class, y) and the client.
    seed : int
        Seed of the splits, made per client and class.
    model : str or ModelRecipe, optional
        Default: an MLP for tables, a CNN for images.
    size : int, optional
        Height and width of images. Default: the most frequent size if it is square and at most 64, else 64 (224 for pretrained networks).
    fractions : three floats
        Shares of train, validation and test where the folder does not say.

    Returns
    -------
    Scenario
        With everything that was left out or looks doubtful in ``notes``, and how files are read in ``encoding``.
    """
    path = Path(path)
    layout = discover(path, client_column=client)
    raws, details, notes = _read(layout, label=label, client=client, model=model, size=size)
    if not raws:
        raise DataError(f"{path} holds no rows of any client: at least two clients are needed to train together")
    if len(raws) < 2:
        raise DataError(f"{path} holds one client only ({raws[0].name!r}): at least two are needed to train together")
    divided = {raw.name: divide(raw, seed, fractions) for raw in raws}
    origins = {raw.name: raw.origin for raw in raws}
    classes = class_names(divided)
    for name, parts in divided.items():
        for split in ("val", "test"):
            parts[split], more = known_only(name, origins[name], split, parts[split], classes)
            notes += more
        notes += warnings(name, origins[name], parts)
    arrays, encoding, preprocess, more = _encode(divided, origins, details, model)
    notes += more
    shape = arrays[raws[0].name]["train"].shape[1:]
    return Scenario(
        name=path.stem if path.is_file() else path.resolve().name,
        sites=tuple(to_site(name, arrays[name], parts, classes) for name, parts in divided.items()),
        classes=classes,
        preprocess=preprocess,
        model=defaults.recipe(model, shape=shape, classes=len(classes)),
        defaults=defaults.training(model),
        notes=tuple(notes),
        encoding=encoding,
    )


def _read(
    layout: Layout, *, label: str | None, client: str | None, model: defaults.Model, size: int | None
) -> tuple[list[Raw], dict[str, Any], list[str]]:
    """Read all clients; ``details`` says how: the images' shape, or the label's column."""
    notes: list[str] = []
    if layout.kind == "images":
        listed = [list_images(files) for files in layout.clients]
        pretrained = defaults.is_pretrained(model)
        shape = common_shape(listed, size=size or (224 if pretrained else None), colour=True if pretrained else None)
        read = [read_client(files, shape) for files in listed]
        return [raw for raw, _ in read], {"kind": "images", "shape": list(shape)}, [note for _, more in read for note in more]
    if layout.kind == "table":
        assert layout.table is not None
        assert client is not None
        raws, column, notes = read_shared_table(layout.table, label, client)
        return raws, {"kind": "table", "label": column}, notes
    raws = []
    column = ""
    for files in layout.clients:
        raw, column, more = read_client_tables(files, label)
        raws.append(raw)
        notes += more
    return raws, {"kind": "table", "label": column}, notes


def _encode(
    divided: Divided, origins: Mapping[str, str], details: Mapping[str, Any], model: defaults.Model
) -> tuple[Arrays, dict[str, Any], Preprocess, list[str]]:
    if details["kind"] == "images":
        arrays: Arrays = {name: {split: parts[split].x for split in SPLITS} for name, parts in divided.items()}
        return arrays, dict(details), defaults.image_preprocess([splits["train"] for splits in arrays.values()], model), []
    encoding, notes = table_encoding(divided, origins, details["label"])
    encoded: Arrays = {name: {split: encoding.encode(parts[split].x, origins[name]) for split in SPLITS} for name, parts in divided.items()}
    # The encoding has standardised already, in double precision, so nothing is left for the device.
    return encoded, encoding.as_dict(), Preprocess(), notes


def table_encoding(divided: Divided, origins: Mapping[str, str], label: str) -> tuple[TableEncoding, list[str]]:
    """Pool what the clients report about their training rows; returns the encoding and notes."""
    every = [(f"client {name!r} ({origins[name]})", part.x) for name, parts in divided.items() for part in parts.values()]
    numeric, categorical, notes = column_kinds(every, leave_out=[label])
    return pool([summarise(parts["train"].x, numeric, categorical) for parts in divided.values()], label), notes
