"""Image tables in Parquet, in the layout of the public Hugging Face data sets: a struct of encoded bytes, a label, maybe more columns.

The names of the classes come from the feature description in the schema's metadata. Images are decoded once, in parallel, into a cache of
memory-mapped files, so that they need not fit into memory. Its folder is ``$EMDCFL_CACHE``, else ``~/.cache/emdcfl``; files are written to
a temporary name and renamed when complete.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from emdcfl.core import keys
from emdcfl.core.errors import DataError
from emdcfl.core.optional import pa, pq
from emdcfl.data.own.formats.layout import FORMATS

_BATCH = 512


@dataclass(frozen=True)
class LabelledImages:
    """Images with labels, before they are divided among sites."""

    images: NDArray[np.uint8]
    """uint8 ``(N, C, H, W)``; may be memory-mapped."""
    labels: NDArray[np.int64]
    """int64 ``(N,)``."""
    classes: tuple[str, ...]
    """Names of the labels."""
    columns: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """Further columns of the table, for example ``domain``."""
    vocabularies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageTable:
    """One split of an image data set: everything but the pixels in memory."""

    name: str
    files: list[Path]
    shape: tuple[int, int, int]
    """Channels, height and width every image must have after conversion."""
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    columns: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Text columns as codes."""
    vocabularies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Their texts in sorted order."""

    def __len__(self) -> int:
        return len(self.labels)

    def side(self) -> int | None:
        """Return the width of the first image where it is square and readable; every other one must then have the same size."""
        batch = next((batch for _, batch in self._encoded() if len(batch)), None)
        if batch is None:
            return None
        try:
            with Image.open(io.BytesIO(batch[0].as_py() or b""), formats=FORMATS) as image:
                width, height = image.size
        except (OSError, ValueError, SyntaxError):  # told with its row when it is decoded
            return None
        return width if width == height else None

    def load(self, rows: NDArray[np.int64] | None = None) -> LabelledImages:
        """Return the chosen rows, in the order given, with memory-mapped images.

        A site order given here makes every site a contiguous piece of one file: no copy in memory, and only what is used is decoded.
        """
        rows = np.arange(len(self), dtype=np.int64) if rows is None else rows
        key = fingerprint(self.files, self.shape, rows.tobytes())
        images = cached_images(self.name, key, (len(rows), *self.shape), lambda out: self._decode(rows, out))
        columns = {name: codes[rows] for name, codes in self.columns.items()}
        return LabelledImages(images, self.labels[rows], self.classes, columns, self.vocabularies)

    def _decode(self, rows: NDArray[np.int64], out: Images) -> None:
        position = np.full(len(self), -1, dtype=np.int64)
        position[rows] = np.arange(len(rows))
        if len(np.unique(rows)) != len(rows):
            raise DataError(f"{self.name}: a row may be asked for only once")

        def place(row: int, data: bytes) -> None:
            out[position[row]] = self._pixels(row, data)

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for first, batch in self._encoded():
                wanted = [row for row in range(first, first + len(batch)) if position[row] >= 0]
                list(pool.map(place, wanted, (batch[row - first].as_py() for row in wanted)))

    def _encoded(self) -> Iterator[tuple[int, Any]]:
        first = 0
        for file in self.files:
            with pq.ParquetFile(file) as table:
                column = _image_column(table.schema_arrow, file)
                for batch in table.iter_batches(batch_size=_BATCH, columns=[f"{column}.bytes"], use_threads=False):
                    yield first, batch.column(0).field("bytes")
                    first += batch.num_rows

    def _pixels(self, row: int, data: bytes | None) -> Images:
        channels, height, width = self.shape
        try:
            with Image.open(io.BytesIO(data or b""), formats=FORMATS) as image:
                pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"), dtype=np.uint8)
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"{self.name}: row {row} of {self.files[0].parent} holds no readable image ({error})") from error
        if pixels.shape[:2] != (height, width):
            raise DataError(f"{self.name}: row {row} is {pixels.shape[1]}×{pixels.shape[0]} pixels, expected {width}×{height}")
        return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def read_table(name: str, files: list[Path], shape: tuple[int, int, int], *, text: tuple[str, ...] = ()) -> ImageTable:
    """Read labels and the named text columns; the pixels stay in the files."""
    # without pq.read_table and to_numpy: they import pandas where it is installed, 0.2 s in every process
    try:
        schema = pq.read_schema(files[0])
        parts = [_read_columns(file, ["label", *text]) for file in files]
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read {files[0]}: {str(error).splitlines()[0]}") from error
    missing = {"label", *text} - set(parts[0].column_names)
    if missing:
        raise DataError(f"{files[0]} has no column {', '.join(sorted(missing))}; it has {', '.join(schema.names)}")
    table = pa.concat_tables(parts)
    labels = np.array(table.column("label").to_pylist(), dtype=np.int64)
    columns, vocabularies = {}, {}
    for column in text:
        words, codes = np.unique(np.asarray(table.column(column).to_pylist(), dtype=str), return_inverse=True)
        columns[column], vocabularies[column] = codes.astype(np.int64), tuple(str(word) for word in words)
    return ImageTable(name, files, shape, labels, _class_names(schema, labels), columns, vocabularies)


def _read_columns(file: Path, columns: list[str]) -> pa.Table:
    with pq.ParquetFile(file) as table:
        return table.read(columns)


def _class_names(schema: pa.Schema, labels: NDArray[np.int64]) -> tuple[str, ...]:
    description = (schema.metadata or {}).get(b"huggingface")
    features = json.loads(description)["info"]["features"] if description else {}
    named = features.get("label", {}).get("names")
    return tuple(named) if named else tuple(str(label) for label in range(int(labels.max()) + 1))


def _image_column(schema: pa.Schema, file: Path) -> str:
    for column in schema:
        if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
            return str(column.name)
    raise DataError(f"{file} has no image column (a struct with encoded bytes); it has {', '.join(schema.names)}")


Images = NDArray[np.uint8]
_FORMAT = 1  # raise when the stored layout changes: older files are then ignored


def cache_dir() -> Path:
    """Return the cache folder (not necessarily existing)."""
    chosen = os.environ.get("EMDCFL_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "emdcfl"


def fingerprint(files: list[Path], *parts: object) -> str:
    """Key of what was decoded: names, sizes and modification times of the files, and further parts such as the row order."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return keys.digest(_FORMAT, stats, *parts).hex()[:20]


def cached_images(name: str, key: str, shape: tuple[int, ...], fill: Callable[[Images], None]) -> Images:
    """Return a memory-mapped uint8 array; ``fill`` writes it the first time.

    The map is private (copy-on-write): nothing a caller does can change the file, and unused pages can be dropped by the system.
    """
    path = cache_dir() / "decoded" / f"{name}-{key}.npy"
    if (found := _open(path, shape)) is not None:
        return found
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        array: Images = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)
        try:
            fill(array)
            array.flush()  # type: ignore[attr-defined]
            del array
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"cannot write decoded images to {path.parent} ({error}): set EMDCFL_CACHE to a folder with free space") from error
    opened = _open(path, shape)
    if opened is None:
        raise DataError(f"{path} changed while it was written: delete it and run again")
    return opened


def _open(path: Path, shape: tuple[int, ...]) -> Images | None:
    try:
        array: Images = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError, OSError):
        return None
    return array if array.shape == shape and array.dtype == np.uint8 else None
