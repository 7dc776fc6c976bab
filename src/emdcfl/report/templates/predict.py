"""Predict classes or numbers with the model of this folder: ``python predict.py FILE …``. Needs torch, numpy, and Pillow for images."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
GAPS = {"", "-", "--", "–", "—", ".", "?", "na", "n/a", "n.a.", "nan", "null", "none", "nil", "missing", "unknown", "#n/a"}

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
TRUTH = {"true": 1.0, "false": 0.0}
CSV = "a CSV file in UTF-8, with commas between columns and decimal points"


def image(file: Path, shape: list[int]) -> np.ndarray[Any, Any]:
    """Return an image as (1, C, H, W) bytes: the shorter side resized, the centre cut out."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    with Image.open(file, formats=FORMATS) as opened:
        if opened.mode == "F":
            sys.exit(f"{file}: its pixels are floating-point numbers of unknown range; save it with 8 or 16 bits")
        with suppress(Exception):  # damaged metadata
            ImageOps.exif_transpose(opened, in_place=True)  # as the camera was held
        deep = opened.mode.startswith("I")  # 16-bit grey
        grey = Image.fromarray((np.asarray(opened).astype(np.uint32) >> 8).astype(np.uint8)) if deep else opened
        picture = grey.convert("L" if channels == 1 else "RGB")
    if picture.size != (width, height):
        ratio = max(width / picture.width, height / picture.height)
        new = (max(width, round(picture.width * ratio)), max(height, round(picture.height * ratio)))
        left, top = (new[0] - width) // 2, (new[1] - height) // 2
        picture = picture.resize(new, Image.Resampling.BILINEAR).crop((left, top, left + width, top + height))
    pixels = np.asarray(picture, dtype=np.uint8)
    return pixels[None, None] if channels == 1 else pixels.transpose(2, 0, 1)[None]


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def written(date: str) -> str:
    """Return the format of a column of dates: the one asked for, or of training (``auto:FORMAT``), or none."""
    return date.removeprefix("auto").removeprefix(":")


def amount(text: str, date: str) -> float | None:
    """Return a number, true as 1, seconds of a time of day, or days since 1970 of a date: as the column's are, else as in 2024-12-31."""
    if not date and (found := TRUTH.get(text.lower(), number(text))) is not None:
        return found
    for form in [written(date)] if date.startswith("%") else [written(date), ""]:
        with suppress(ValueError):
            when = datetime.strptime(text, form) if form else datetime.fromisoformat(text)
            return (when.replace(tzinfo=when.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / 86400
    with suppress(ValueError):
        return (datetime.fromisoformat(f"1970-01-01 {text}") - datetime(1970, 1, 1)).total_seconds()
    return None


def table(file: Path, encoding: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the rows of a CSV file with commas and decimal points as the numbers the network was trained on.

    Where training left out rows with missing values, such a row ends the program.
    """
    columns, gaps, marks = encoding["columns"], "gaps" not in encoding, set(encoding.get("missing", []))
    codes = {number(mark) for mark in marks} - {None} | {math.inf, -math.inf}
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (UnicodeDecodeError, csv.Error):
        sys.exit(f"{file}: expected {CSV}; save it as that, or use 'emdcfl predict', which reads other tables")
    encoded: list[list[float]] = []
    unknown: dict[str, None] = {}
    for row in rows:
        values: list[float] = []
        for column in columns:
            if column["name"] not in row:
                sys.exit(f"{file} lacks the column {column['name']!r}; expected the columns of training, in {CSV}")
            text = (row[column["name"]] or "").strip()
            gap = text in marks or (text == "" if "words" in column else text.lower() in GAPS or number(text) in codes)
            if gap and not gaps:
                sys.exit(f"{file}: row {len(encoded) + 1} lacks {column['name']!r}; training left such rows out, so leave it out, too")
            if "words" in column:
                unknown |= {} if gap or text in column["words"] else {f"{column['name']} {text!r}": None}
                values += [float(text == word and not gap) for word in column["words"]]
                continue
            unit = column.get("unit", "")
            text = text.removeprefix(unit).removesuffix(unit).strip()
            value = column["mean"] if gap else amount(text, column.get("date", ""))
            if value is None:
                date = column.get("date", "")
                dates = f"dates written as {written(date) or '2024-12-31'}"
                sys.exit(f"{file}: column {column['name']!r} must hold {dates if date else f'numbers, or {dates}'}, got {text!r}")
            values.append((value - column["mean"]) / column["std"])
            values += [float(gap)] if column["gaps"] else []
        encoded.append(values)
    if unknown:
        few = ", ".join([*unknown][:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        print(f"{file}: words that the model does not know are read as missing: {few}", file=sys.stderr)
    return np.asarray(encoded, dtype=np.float32)


def read(file: Path, config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the samples of a file as the model takes them."""
    encoding = config["encoding"]
    if not file.is_file():
        sys.exit(f"{file} is a folder; name its files" if file.is_dir() else f"no such file: {file}")
    if encoding["kind"] == "images":
        try:
            return image(file, encoding["shape"])
        except Exception as error:  # every decoder has its own ways to fail on a damaged file
            sys.exit(f"{file} is not a readable image ({error})")
    if encoding["kind"] == "table":
        return table(file, encoding)
    try:
        return np.asarray(np.load(file, allow_pickle=False), dtype=np.float32)
    except (OSError, ValueError) as error:
        sys.exit(f"{file} is not a readable .npy file of numbers ({error})")


def main(files: list[str]) -> int:
    """Print file, row, class and probability; or file, row and number. Return 1 where a file could not be read."""
    failed = 0
    config = json.loads((HERE / "config.json").read_text(encoding="utf-8"))
    with (HERE / "model.pt2").open("rb") as file:  # torch cannot open a path that is no UTF-8
        model = torch.export.load(file).module()
    for name in files:
        try:
            x, shape = read(Path(name), config), config["input"]["shape"]
            if x.size == 0 or list(x.shape[1:]) != shape:
                sys.exit(f"{name} must hold at least one sample of shape {shape}, got {list(x.shape)}")
        except (SystemExit, OSError) as error:  # the other files are predicted
            print(error, file=sys.stderr)
            failed = 1
            continue
        with torch.no_grad():
            p = model(torch.from_numpy(np.array(x, order="C")))  # a copy: an image's own array is read-only
        images = config["encoding"]["kind"] == "images"
        for row, values in enumerate(p.tolist(), start=1):
            found = [f"{values[0]:.6g}"] if "target" in config else [str(config["classes"][np.argmax(values)]), f"{max(values):.1%}"]
            print(name if images else f"{name}:{row}", *found, sep="\t", flush=True)
    return failed


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python predict.py FILE …")
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # what reads the output, such as head, has enough
        os._exit(141)
