"""Four sites as NumPy arrays: who belongs together, and what each group's model scores."""

import numpy as np
from matplotlib import pyplot as plt

import emdcfl

rng, sites = np.random.default_rng(0), {}
for name, shift in {"north": 1, "east": 1, "south": -1, "west": -1}.items():
    x = rng.normal(size=(300, 8)).astype("float32") + 2 * shift
    sites[name] = x, (shift * x[:, 0] > 2).astype(int)

result = emdcfl.fit(sites, rounds=3, seed=0)
print(result)
print(result.clusters)
assert result.clusters == {"north": 0, "east": 0, "south": 1, "west": 1}

for name, (x, y) in sites.items():
    colour = ["tab:blue", "tab:orange"][result.clusters[name]]
    plt.scatter(x[:, 0], x[:, 1], s=8 + 20 * y, alpha=0.4, color=colour, label=f"{name}: {result.accuracy.clients[name]:.0%}")
plt.legend(title="site: accuracy of its group's model")
plt.xlabel("first feature")
plt.ylabel("second feature")
plt.title("Two groups found (colour); large points have label 1")
plt.savefig("arrays.png", dpi=100)
print("picture: arrays.png")
