"""A site that took no part: which group it belongs to, with its labels and without."""

import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import emdcfl

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.images))
parts = dict(zip(["north", "south", "east", "west", "new"], np.array_split(order, 5), strict=True))


def site(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Scans of one site: east, west and the new site write black on white."""
    pixels = np.uint8(digits.images[parts[name]] * 255 / 16)
    return (255 - pixels if name in ("east", "west", "new") else pixels), digits.target[parts[name]]


result = emdcfl.fit({name: site(name) for name in ("north", "south", "east", "west")}, rounds=2)
print(result.clusters)
images, labels = site("new")

placed = result.place((images, labels), name="new")
print(placed.verdict())
nearest = result.place_unlabelled(images, name="new")
print(nearest.verdict())
assert list(placed.candidates[0].members) == ["east", "west"]

ratios = {", ".join(found.members): found.ratio for found in placed.candidates}
plt.barh(list(ratios), list(ratios.values()), color=["tab:green" if ratio < 1 else "tab:grey" for ratio in ratios.values()])
plt.axvline(1, color="black", linewidth=1)
plt.xlabel("distance of the new site / tolerance (below 1: belongs to the group)")
plt.tight_layout()
plt.savefig("new_site.png", dpi=100)
print("picture: new_site.png")
