"""Images in class folders: find them, choose a common shape, decode them in parallel. Unreadable files are left out with a note."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageMode, ImageOps

from emdcfl.core.errors import DataError
from emdcfl.core.units import names
from emdcfl.data.own.formats import dicom
from emdcfl.data.own.formats.layout import FORMATS, IMAGE_SUFFIXES, UNREAD, ClientFiles, visible
from emdcfl.data.own.notes import Note
from emdcfl.data.own.parts import Part, Raw
from emdcfl.data.own.splitting import RANDOM, SplitRule, file_keys

MAX_DEFAULT = 64

MAX_SIDE = 1 << 16
MAX_PIXELS = 1 << 27
"""Pixels of an image, as it is stored and after it is resized: more would take the memory that others need."""

MAX_RATIO = 128
"""Long over short side of an image that is read. One that is too narrow for some size only would let a server, which says the size,
choose between two divisions of a site's images."""

DARK = 16
"""Brightest pixel of a client, of 255, below which its images may be 12-bit values in a 16-bit file."""

Shape = tuple[int, int, int]
Header = tuple[str, tuple[int, int]]
"""Mode and size (width, height) of an image."""


@dataclass(frozen=True)
class Listed:
    """Image files of one client by split, with the class each lies in."""

    name: str
    origin: str
    files: dict[str, list[tuple[Path, str]]]
    others: tuple[Path, ...] = ()
    """Files that are no images, or lie outside the class folders."""


def list_images(client: ClientFiles) -> Listed:
    """List a client's images; class folders are the direct sub-folders of its parts."""
    origin = client.parts.get("train", next(iter(client.parts.values())))
    origin = origin.parent if "train" in client.parts else origin
    files: dict[str, list[tuple[Path, str]]] = {}
    for split, folder in client.parts.items():
        classes = [entry for entry in visible(folder) if entry.is_dir()]
        files[split] = [(file, entry.name) for entry in classes for file in files_below(entry) if file.suffix.lower() in IMAGE_SUFFIXES]
    listed = {file for part in files.values() for file, _ in part}
    dicom.check_installed(sorted(listed))
    others = tuple(file for folder in client.parts.values() for file in files_below(folder) if file not in listed)
    if not listed:
        unread = sorted({file.suffix.lower() for file in others} & set(UNREAD))  # a file's name may be a patient's
        remedy = f"; {', '.join(unread)} cannot be read as they are: {UNREAD[unread[0]]}" if unread else ""
        raise DataError(f"client {client.name!r} ({origin}) holds no images: expected CLASS/*.png or similar in it{remedy}")
    return Listed(client.name, str(origin), files, others)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder in sorted order, without hidden ones: copies that a notebook keeps, what macOS writes beside files.

    A folder that several links lead to counts once: links in a circle would have no end.
    """
    seen = {folder.resolve()}

    def below(place: Path) -> Iterator[Path]:
        for entry in visible(place):
            if not entry.is_dir():
                yield entry
            elif (real := entry.resolve()) not in seen:
                seen.add(real)
                yield from below(entry)

    return below(folder)


def read_headers(client: Listed) -> list[Header | None]:
    """Mode and size of every image of a client."""
    return [read_header(file) for part in client.files.values() for file, _ in part]


def common_shape(clients: Mapping[str, Sequence[Header | None]], *, size: int | None = None, colour: bool | None = None) -> Shape:
    """Channels, height and width for all: grey only if every image is; the most frequent size where it is square and small, else 64×64."""
    known = [header for headers in clients.values() for header in headers if header is not None]
    if not known:
        raise DataError(f"none of the {sum(map(len, clients.values()))} images of {names(clients)} can be read; save them again as PNG")
    colour = not all(is_grey(mode) for mode, _ in known) if colour is None else colour
    return image_shape(Counter(shape for _, shape in known), size=size, colour=colour)


def image_shape(sizes: Counter[tuple[int, int]], *, size: int | None, colour: bool) -> Shape:
    """Channels, height and width, given how many images have which width and height; see ``common_shape``."""
    if size is None:
        width, height = sizes.most_common(1)[0][0]
        size = width if width == height and width <= MAX_DEFAULT else MAX_DEFAULT
    if size < 4 or size**2 > MAX_PIXELS:
        raise DataError(f"images need at least 4×4 and at most {MAX_PIXELS:,} pixels, got scenario.size = {size}; choose another")
    return 3 if colour else 1, size, size


def is_grey(mode: str) -> bool:
    """Whether an image of this mode of Pillow has one channel, besides transparency."""
    return ImageMode.getmode(mode).basemode == "L"


def read_client(listed: Listed, shape: Shape, rule: SplitRule = RANDOM) -> tuple[Raw, list[Note]]:
    """Decode a client's images to one shape; return them and a note on unreadable files."""
    parts: dict[str, Part] = {}
    bad: list[str] = []
    for split, files in listed.files.items():
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            decoded = list(pool.map(lambda item: _decode(item[0], shape), files))
        good = [i for i, pixels in enumerate(decoded) if isinstance(pixels, np.ndarray)]
        bad += [f"{file}: {error}" for (file, _), error in zip(files, decoded, strict=True) if isinstance(error, str)]
        pixels = [decoded[i] for i in good]
        x = np.stack(pixels) if pixels else np.empty((0, *shape), np.uint8)
        by = file_keys([files[i][0] for i in good], rule, f"client {listed.name!r} ({listed.origin})")
        parts[split] = Part(x, np.array([files[i][1] for i in good], dtype=str), by)
    if not any(len(part) for part in parts.values()):
        raise DataError(f"client {listed.name!r} ({listed.origin}): none of its images can be read, for example {bad[0]}")
    notes = []
    if bad:
        notes.append(Note(listed.name, listed.origin, "unreadable images left out: {n} ({words})", len(bad), tuple(bad), left_out=True))
    brightest = max(int(part.x.max()) for part in parts.values() if len(part))
    if brightest < DARK:
        text = "no pixel is brighter than {n} of 255; if 10 or 12 bits are stored as 16, scale them to the full range"
        notes.append(Note(listed.name, listed.origin, text, brightest, doubt=True))
    if listed.others:
        text = "files left out, because they are no images or lie outside the class folders: {n} ({words})"
        notes.append(Note(listed.name, listed.origin, text, len(listed.others), tuple(file.name for file in listed.others), left_out=True))
    return Raw(listed.name, listed.origin, parts, rule), notes


def read_image(file: Path, shape: Shape) -> NDArray[np.uint8]:
    """Decode one image to ``shape``: shorter side resized (bilinear), centre cut out."""
    pixels = _decode(file, shape)
    if isinstance(pixels, str):
        raise DataError(f"{file} is not a readable image ({pixels})")
    return pixels


def _decode(file: Path, shape: Shape) -> NDArray[np.uint8] | str:
    """Return the pixels, or why they cannot be read."""
    try:
        if dicom.is_dicom(file):
            _check_size(dicom.read_header(file)[1], (shape[2], shape[1]))
            return _fit(dicom.read_pixels(file), shape)
        with Image.open(file, formats=FORMATS) as image:
            _check_size(image.size, (shape[2], shape[1]))
            with suppress(Exception):  # as many ways to fail as below; a damaged image fails again when it is converted
                ImageOps.exif_transpose(image, in_place=True)  # cameras store how they were held beside the pixels
            return _fit(image, shape)
    except Exception as error:  # every decoder has its own ways to fail on a damaged file: struct.error, IndexError, EOFError, …
        said = str(error).strip().partition("\n")[0].replace(repr(str(file)), "").strip()
        return said or type(error).__name__


def _fit(image: Image.Image, shape: Shape) -> NDArray[np.uint8]:
    channels, height, width = shape
    if image.mode == "F":
        raise DataError("its pixels are floating-point numbers of unknown range; save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # 16-bit grey: PIL's own conversion would clip at 255
        values = np.asarray(image)
        if values.min() < 0 or values.max() >= 1 << 16:
            raise DataError("its pixels are below 0 or beyond 16 bits; save it with 8 or 16 bits")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != (width, height):
        ratio = max(width / image.width, height / image.height)
        new = (max(width, round(image.width * ratio)), max(height, round(image.height * ratio)))
        image = image.resize(new, Image.Resampling.BILINEAR)
        left, top = (new[0] - width) // 2, (new[1] - height) // 2
        image = image.crop((left, top, left + width, top + height))
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _check_size(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    """Refuse an image by its header, before it is decoded."""
    width, height = size
    ratio = max(wanted[0] / max(width, 1), wanted[1] / max(height, 1))
    if max(size) > min(MAX_SIDE, MAX_RATIO * min(size)) or width * height * max(1.0, ratio**2) > MAX_PIXELS:
        raise DataError(f"{width}×{height} pixels are too many or too narrow; crop the image")


def read_header(file: Path) -> Header | None:
    """Return an image's mode and size (width, height) without decoding it; ``None`` if it cannot be opened."""
    try:
        if dicom.is_dicom(file):
            return dicom.read_header(file)
        with Image.open(file, formats=FORMATS) as image:
            return image.mode, image.size
    except Exception:  # reported when the file is read
        return None
