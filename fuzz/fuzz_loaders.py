"""People's own files: any CSV, TSV, Parquet or image, alone or among good ones, is read or refused with a ``DataError`` of one line."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from emdcfl.core.errors import DataError
from emdcfl.data.own.folder import load_folder
from emdcfl.data.own.formats.images import read_image
from emdcfl.data.own.site import read_inputs
from fuzz.feed import Feed, one_line

ROWS = "".join(f"{i % 7},{i * 0.5},{'ab'[i % 2]},{'xyz'[i % 3]}\n" for i in range(24))
GOOD = f"a,b,word,label\n{ROWS}"
KINDS = (".csv", ".tsv", ".parquet", ".png", ".jpg", ".gif", ".bmp", ".tif", ".webp", ".ppm")
ENCODING = {
    "kind": "table",
    "label": "label",
    "columns": [{"name": "a", "mean": 0.0, "std": 1.0, "gaps": True}, {"name": "word", "words": ["a"]}],
}


@cache
def folder() -> Path:
    """Return a folder with two good tables, made once."""
    place = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="fuzz-", dir=place if os.access(place, os.W_OK) else None))
    (path / "tables").mkdir()
    for name in ("one", "two"):
        (path / "tables" / f"{name}.csv").write_text(GOOD, encoding="utf-8")
    return path


def _parquet() -> bytes:
    buffer = io.BytesIO()
    table = pa.table({"a": [1, 2, None] * 6, "b": [0.5] * 18, "word": ["a", "b", None] * 6, "label": ["x", "y", "z"] * 6})
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _image(kind: str) -> bytes:
    buffer = io.BytesIO()
    pixels = np.arange(12 * 12 * 3, dtype=np.uint32).reshape(12, 12, 3).astype(np.uint8)
    Image.fromarray(pixels).save(buffer, {".jpg": "jpeg", ".tif": "tiff"}.get(kind, kind[1:]))
    return buffer.getvalue()


@cache
def originals() -> dict[str, bytes]:
    """Return one good file of every kind."""
    tables = {".csv": GOOD.encode(), ".tsv": GOOD.replace(",", "\t").encode(), ".parquet": _parquet()}
    return {kind: tables.get(kind) or _image(kind) for kind in KINDS}


def seeds() -> list[bytes]:
    """Good files, whole and overwritten in a place, and odd tables."""
    whole = [bytes([i, 0]) + originals()[kind] for i, kind in enumerate(KINDS)]
    touched = [bytes([i, 2, 0, 20, 0, 0, 200]) for i in range(len(KINDS))]
    odd = [
        b"label\n",
        b"",
        b"a,a,label\n1,2,x\n",
        b'a,label\n"1,x\n',
        b"a,label\n\xff\xfe,\x00\n",
        b"a,b,word,label\nnan,inf,,x\n1e999,-,a,\n",
    ]
    return whole + touched + [b"\x00\x00" + text for text in odd]


def one(data: bytes) -> None:
    """Write the file and read it alone and beside good ones."""
    feed, place = Feed(data), folder()
    kind = feed.choice(KINDS)
    content = feed.changed(originals()[kind])
    table = kind in (".csv", ".tsv", ".parquet")
    path = (place / "tables" if table else place) / f"three{kind}"
    path.write_bytes(content)
    try:
        if table:
            _told(lambda: load_folder(place / "tables"))
            _told(lambda: load_folder(path, client="word", label="label"))
            _told(lambda: read_inputs([path], encoding=ENCODING))
        else:
            _told(lambda: read_image(path, (3, 8, 8)))
            _told(lambda: read_image(path, (1, 8, 8)))
    finally:
        path.unlink()


def _told(read: Callable[[], object]) -> None:
    try:
        read()
    except DataError as error:
        one_line(error)
