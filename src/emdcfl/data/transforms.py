"""Image transforms applied before samples are dealt to sites: rotation, border, colour, patch, blur, noise.

Pure functions on uint8 arrays ``(N, C, H, W)``. Rotation equals PIL's, pixel for pixel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from emdcfl.core.errors import ConfigError

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
RGB = tuple[float, float, float]


def rotate(images: Images, angle: float, *, expand: bool = False) -> Images:
    """Rotate counter-clockwise about the centre: nearest neighbour, black fill; ``expand`` enlarges the canvas so that nothing is lost."""
    if angle % 360 == 0:
        return images
    height, width = images.shape[-2:]
    if angle % 90 == 0 and (expand or height == width):
        return np.ascontiguousarray(np.rot90(images, round(angle / 90) % 4, axes=(-2, -1)))
    shape, origin, outside = _rotation_map(height, width, float(angle), expand)
    out = np.take(images.reshape(*images.shape[:2], -1), origin, axis=-1, mode="clip")
    out[..., outside] = 0
    return out.reshape(*images.shape[:2], *shape)


@functools.lru_cache(maxsize=32)
def _rotation_map(height: int, width: int, angle: float, expand: bool) -> tuple[tuple[int, int], Labels, Labels]:
    """Source of every pixel of the result, and pixels without one, found by rotating an image of pixel numbers with PIL."""
    numbers = np.arange(1, height * width + 1, dtype=np.int32).reshape(height, width)
    rotated = np.asarray(Image.fromarray(numbers).rotate(angle, resample=Image.Resampling.NEAREST, expand=expand, fillcolor=0))
    origin = rotated.ravel().astype(np.int64)
    return (rotated.shape[0], rotated.shape[1]), np.maximum(origin - 1, 0), np.flatnonzero(origin == 0)


def border(images: Images, width: int) -> Images:
    return np.pad(images, ((0, 0), (0, 0), (width, width), (width, width)))


def colour(images: Images, rgb: RGB) -> Images:
    """Colour grey images: ``trunc(grey/255 · rgb · 255)`` per channel, so black stays black.

    Examples
    --------
    >>> import numpy as np
    >>> colour(np.full((1, 1, 1, 1), 255, np.uint8), (0.26, 0.63, 0.40)).ravel().tolist()
    [66, 160, 102]
    """
    if images.shape[1] != 1:
        raise ConfigError(f"colour needs grey images (one channel), got {images.shape[1]} channels")
    table = np.trunc(np.arange(256)[:, None] / 255 * np.asarray(rgb, dtype=np.float64) * 255).astype(np.uint8)
    return np.ascontiguousarray(table[images[:, 0]].transpose(0, 3, 1, 2))


def colour_by_label(images: Images, labels: Labels, palette: Sequence[RGB]) -> Images:
    """Colour each grey image with the entry of ``palette`` that belongs to its label."""
    out = np.empty((len(images), 3, *images.shape[2:]), dtype=np.uint8)
    for label in np.unique(labels):
        out[labels == label] = colour(images[labels == label], palette[label])
    return out


def patch(images: Images, labels: Labels, palette: Sequence[tuple[int, int, int]]) -> Images:
    """Paint the top-left 3 × 3 pixels with the palette entry of each label."""
    out = images.copy()
    out[:, :, :3, :3] = np.asarray(palette, dtype=np.uint8)[labels][:, :, None, None]
    return out


def blur(images: Images, radius: float) -> Images:
    """Gaussian blur with standard deviation ``radius`` in pixels."""
    if radius == 0:
        return images
    from scipy import ndimage  # importing it takes a quarter of a second, in every process

    smooth = ndimage.gaussian_filter(images.astype(np.float32), sigma=(0, 0, radius, radius))
    blurred: Images = np.clip(np.rint(smooth), 0, 255).astype(np.uint8)
    return blurred


def noise(images: Images, sigma: float, rng: np.random.Generator) -> Images:
    """Add Gaussian noise with standard deviation ``sigma`` (as a share of full brightness), clipped to the range of uint8."""
    if sigma == 0:
        return images
    noisy = images + rng.standard_normal(images.shape, dtype=np.float32) * np.float32(255 * sigma)
    return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)
