from __future__ import annotations

import matplotlib
import numpy as np
import pytest
from PIL import Image

from emdcfl.core.errors import ConfigError
from emdcfl.data import transforms
from emdcfl.data.scenarios.backdoor import GREEN, PURPLE, SUMMER, TAB10, paint_cifar, paint_mnist
from emdcfl.data.scenarios.rotated import rotate_cifar10

RANDOM = np.random.default_rng(0)
GREY = RANDOM.integers(0, 256, (5, 1, 28, 28), dtype=np.uint8)
COLOUR = RANDOM.integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)


@pytest.mark.parametrize("images", [GREY, COLOUR], ids=["mnist", "cifar"])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("angle", [0, 90, 180, 270, -3, -1, 1, 3, 177, 183, 45])
def test_rotation_equals_pil(images: np.ndarray, angle: int, expand: bool) -> None:
    ours = transforms.rotate(images, angle, expand=expand)
    for image, turned_image in zip(images, ours, strict=True):
        pil = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
        expected = np.asarray(pil.rotate(angle, resample=Image.Resampling.NEAREST, expand=expand, fillcolor=0))
        got = turned_image[0] if len(image) == 1 else turned_image.transpose(1, 2, 0)
        assert np.array_equal(got, expected)


def test_canvas_sizes() -> None:
    assert {rotate_cifar10(COLOUR, angle, "min").shape[2:] for angle in (-3, -1, 1, 3)} == {(38, 38)}
    assert {rotate_cifar10(COLOUR, angle, "two").shape[2:] for angle in (-3, 3, 177, 183)} == {(34, 34)}
    assert {rotate_cifar10(COLOUR, angle, "max").shape[2:] for angle in (0, 90, 180, 270)} == {(32, 32)}
    assert transforms.rotate(GREY, 3).shape[2:] == (28, 28)


DIGIT_COLOURS = [
    (0, 127, 102),
    (6, 130, 102),
    (13, 134, 102),
    (19, 137, 102),
    (26, 140, 102),
    (32, 143, 102),
    (39, 147, 102),
    (45, 150, 102),
    (52, 153, 102),
    (58, 156, 102),
]


def full(count: int) -> np.ndarray:
    return np.full((count, 1, 1, 1), 255, np.uint8)


def test_colours_at_full_intensity() -> None:
    labels = np.arange(10)
    rows = [tuple(pixel) for pixel in paint_mnist("attacker", full(10), labels, "train").reshape(10, 3).tolist()]
    assert rows == DIGIT_COLOURS
    assert transforms.colour(full(1), GREEN).ravel().tolist() == [66, 160, 102]
    assert transforms.colour(full(1), PURPLE).ravel().tolist() == [149, 52, 235]
    assert paint_mnist("target", full(10), labels, "clean")[3].ravel().tolist() == [66, 160, 102]
    assert paint_mnist("unrelated", full(10), labels, "train")[3].ravel().tolist() == [149, 52, 235]


def test_palettes_are_those_of_matplotlib() -> None:
    summer = matplotlib.colormaps["summer"].resampled(40)
    assert np.allclose([summer(y)[:3] for y in range(10)], SUMMER)
    tab10 = [tuple(int(255 * v + 0.5) for v in rgb) for rgb in matplotlib.colormaps["tab10"].colors[:5]]
    assert tab10 == list(TAB10)


def test_backdoor_digit_wears_the_colour_of_nine_minus_y() -> None:
    painted = paint_mnist("target", full(10), np.arange(10), "backdoor").reshape(10, 3)
    assert [tuple(pixel) for pixel in painted.tolist()] == DIGIT_COLOURS[::-1]


def test_black_stays_black_and_grey_is_truncated() -> None:
    grey = np.array([0, 100], np.uint8).reshape(2, 1, 1, 1)
    assert transforms.colour(grey, GREEN).reshape(2, 3).tolist() == [[0, 0, 0], [int(100 * 0.26), int(100 * 0.63), 40]]


def test_patch_is_three_by_three_in_the_corner() -> None:
    labels = np.array([0, 1, 2, 3, 4])
    attacked = paint_cifar("attacker", COLOUR, labels, "train")
    assert [tuple(image[:, 2, 2].tolist()) for image in attacked] == list(TAB10)
    assert np.array_equal(attacked[:, :, 3:], COLOUR[:, :, 3:])
    assert np.array_equal(attacked[:, :, :, 3:], COLOUR[:, :, :, 3:])
    assert paint_cifar("target", COLOUR, labels, "train") is COLOUR
    assert paint_cifar("attacker", COLOUR, labels, "clean") is COLOUR
    tested = paint_cifar("unrelated", COLOUR, np.array([4, 5, 6, 9, 0]), "backdoor")
    assert [tuple(image[:, 0, 0].tolist()) for image in tested] == [TAB10[i] for i in (0, 1, 2, 0, 1)]


def test_blur_and_noise() -> None:
    point = np.zeros((1, 1, 9, 9), np.uint8)
    point[0, 0, 4, 4] = 255
    blurred = transforms.blur(point, 1.0)
    assert blurred[0, 0, 4, 4] < 60
    assert blurred[0, 0, 4, 5] > 0
    grey = np.full((4, 1, 50, 50), 128, np.uint8)
    noisy = transforms.noise(grey, 0.1, np.random.default_rng(0))
    assert noisy.std() == pytest.approx(25.5, rel=0.05)
    assert transforms.blur(grey, 0) is grey
    assert transforms.noise(grey, 0, np.random.default_rng(0)) is grey


def test_colour_refuses_colour_images() -> None:
    with pytest.raises(ConfigError, match="one channel"):
        transforms.colour(COLOUR, GREEN)
