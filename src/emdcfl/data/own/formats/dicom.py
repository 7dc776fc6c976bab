"""Read DICOM images (.dcm), with pydicom (extra ``dicom``).

Grey values are rescaled as the file says and mapped to 0 … 255: by its first window where it has one, else by the range its bits can
hold, so that a darker scanner stays darker. Several frames, palettes and deflated files are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from emdcfl.core.errors import ConfigError, DataError
from emdcfl.core.optional import require

SUFFIXES = frozenset({".dcm", ".dicom"})
DEFLATED = "1.2.840.10008.1.2.1.99"
GREY = ("MONOCHROME1", "MONOCHROME2")


def is_dicom(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def check_installed(files: Sequence[Path]) -> None:
    """Raise, with the extra that has it, where a file needs pydicom and it is not installed."""
    first = next(filter(is_dicom, files), None)
    if first is None:
        return
    try:
        require("pydicom", "dicom", f"to read {first}")
    except ConfigError as error:
        raise DataError(f"{error}, or export the images as PNG") from error


def read_header(file: Path) -> tuple[str, tuple[int, int]]:
    """Return mode and size (width, height)."""
    found = _read(file, stop_before_pixels=True)
    return ("L" if _grey(found) else "RGB"), (int(found.Columns), int(found.Rows))


def read_pixels(file: Path) -> Image.Image:
    """Return the image, grey or RGB, in 8 bits."""
    found = _read(file)
    pixels = np.asarray(found.pixel_array)
    if not _grey(found):
        return Image.fromarray((pixels >> max(0, int(found.BitsStored) - 8)).astype(np.uint8))
    return Image.fromarray(_as_bytes(found, pixels))


def _read(file: Path, **options: Any) -> Any:
    pydicom = require("pydicom", "dicom", f"to read {file}")
    with file.open("rb") as stream:
        if pydicom.filereader.read_preamble(stream, force=False):
            about = pydicom.filereader._read_file_meta_info(stream)
            if about.get("TransferSyntaxUID") == DEFLATED:  # it may unpack to any size
                raise DataError("a deflated DICOM file; save it without compression")
    found = pydicom.dcmread(file, **options)
    if int(found.get("NumberOfFrames", 1) or 1) != 1:
        raise DataError(f"it has {found.NumberOfFrames} frames; export each as an image")
    if "PALETTE" in str(found.PhotometricInterpretation):
        raise DataError("it has a palette; export it as PNG")
    return found


def _grey(found: Any) -> bool:
    return str(found.PhotometricInterpretation) in GREY


def _as_bytes(found: Any, pixels: NDArray[Any]) -> NDArray[np.uint8]:
    slope, intercept = (float(found.get(name, usual) or usual) for name, usual in (("RescaleSlope", 1.0), ("RescaleIntercept", 0.0)))
    values = pixels.astype(np.float64) * slope + intercept
    center, width = (_first(found.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if center is not None and width is not None and width > 1:
        low, high = center - 0.5 - (width - 1) / 2, center - 0.5 + (width - 1) / 2
    else:
        bits, signed = int(found.BitsStored), int(found.PixelRepresentation)
        least = -(1 << (bits - 1)) if signed else 0
        low, high = sorted((least * slope + intercept, (least + (1 << bits) - 1) * slope + intercept))
    share = np.clip((values - low) / (high - low), 0, 1)
    bright = 1 - share if str(found.PhotometricInterpretation) == "MONOCHROME1" else share
    return np.round(255 * bright).astype(np.uint8)


def _first(value: Any) -> float | None:
    """The first of a window's values, which may be one or several."""
    if value is None or value == "":
        return None
    return float(value[0]) if isinstance(value, Sequence) and not isinstance(value, str) else float(value)
