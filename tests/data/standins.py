"""Tiny Parquet files in the layout of the public data sets, so that the constructions are tested without them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def write(path: Path, images: list[bytes], labels: np.ndarray, names: list[str], *, column: str = "image", **text: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    features = {column: {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    table = pa.table(
        {column: pa.array([{"bytes": b, "path": None} for b in images]), "label": pa.array(labels, pa.int64()), **text},
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=64)


def mnist(root: Path, train: int = 101, test: int = 83) -> None:
    """``train + label`` images of each digit; the pixel at row 0, column ``label`` is lit, and another one at random."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        labels = rng.permutation(np.repeat(np.arange(10), [count + label % 3 for label in range(10)]))
        images = []
        for label in labels:
            pixels = np.zeros((28, 28), np.uint8)
            pixels[rng.integers(1, 28), rng.integers(0, 28)] = rng.integers(1, 255)
            pixels[0, label] = 255
            images.append(png(pixels))
        write(root / "mnist" / f"{split}.parquet", images, labels, [str(i) for i in range(10)])


def cifar10(root: Path, train: int = 400, test: int = 200) -> None:
    """Sorted by class, as the real file; the image column has another name there too."""
    rng = np.random.default_rng(1)
    for split, count in (("train", train), ("test", test)):
        labels = np.repeat(np.arange(10), count // 10)
        images = [png(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in labels]
        write(root / "cifar10" / "plain_text" / f"{split}-00000-of-00001.parquet", images, labels, list("abcdefghij"), column="img")


def pacs(root: Path, per_domain: int, side: int = 227) -> None:
    rng = np.random.default_rng(2)
    domains = np.repeat(["photo", "art_painting", "cartoon", "sketch"], per_domain)
    labels = rng.integers(0, 7, len(domains))
    grey, coloured = np.full((side, side), 9, np.uint8), np.full((side, side, 3), 200, np.uint8)
    encoded = {domain: png(grey) if domain == "sketch" else png(coloured) for domain in set(domains.tolist())}
    images = [encoded[domain] for domain in domains.tolist()]
    write(root / "pacs" / "train.parquet", images, labels, list("abcdefg"), domain=domains.tolist())


def natural(root: Path) -> None:
    """Tables of the natural scenarios: two persons, two classes, series of 800 samples; ``clock`` is when a window starts."""
    (root / "natural").mkdir(parents=True)
    for name, stride, columns in (("watch", 25, ("wrist", "series", "exercise")), ("hapt", 32, ("recording", "segment", "activity"))):
        width = 4 * stride
        kinds = ("left", "right") if name == "watch" else (1, 2)
        rows = [
            {"person": person, columns[0]: kind, columns[1]: series, "start": start, "length": 800, columns[2]: f"class{series}",
             "clock": float(start + 1000 * kinds.index(kind) * (name == "hapt"))}
            for person in "ab" for kind in kinds for series in (0, 1) for start in range(0, 801 - width, stride)
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), root / "natural" / f"{name}.parquet")
