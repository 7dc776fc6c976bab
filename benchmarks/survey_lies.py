"""What one false answer to the survey of nodes costs the others, with and without its limit: a line of JSON per case.

    python benchmarks/survey_lies.py --seeds 3-8

Four sites have tables of 300 rows and six columns of one law. Columns are standardised by the pooled mean and spread that the sites claim;
the fourth claims what it likes, and its claim counts fully, up to the limit (``engines.flower.survey_outliers``), or not at all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping

import numpy as np
import torch

import emdcfl
from emdcfl.core.errors import EmdcflError
from emdcfl.data.own import defaults
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.engines.flower.survey_outliers import Numbers, limited, pooled
from emdcfl.studies.compare import parse_seeds

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Claim = Callable[[Numbers], Numbers]

CASES: Mapping[str, Claim | None] = {
    "is honest": None,
    "claims means of 1e6": lambda told: (told[0], 1e6, told[2]),
    "claims spreads of 6e6": lambda told: (told[0], told[1], 1e16),
    "claims 1e8 equal values": lambda told: (10**8, told[1], 0.0),
    "is honest, with a column that hardly varies elsewhere": None,
}
RULES = ("full", "limited", "left out")
SCALE, CENTRE = np.array([10, 1, 5, 100, 1, 0.1]), np.array([50, 0, 20, 500, 1, 0.3])


def tables(seed: int, *, another_kind: bool) -> list[tuple[Array, Array]]:
    """Return inputs and labels of the four sites; of ``another_kind``, the last counts what is rare at the others."""
    rng = np.random.default_rng(seed)
    weights, found = rng.normal(size=6), []
    for _ in range(4):
        x = rng.normal(size=(300, 6))
        found.append((x * SCALE + CENTRE, (x @ weights + 0.5 * rng.normal(size=300) > 0).astype(float)))
    if another_kind:
        rare = [rng.poisson(20, 300) if i == 3 else rng.random(300) < 0.01 for i in range(4)]
        found = [(np.column_stack([x, extra]), y) for (x, y), extra in zip(found, rare, strict=True)]
    return found


def standardised(sites: list[tuple[Array, Array]], claim: Claim | None, rule: str) -> list[Array]:
    """Return the inputs of all sites, standardised by what they claim."""
    x = np.stack([x for x, _ in sites])
    for c in range(x.shape[2]):
        told = [(len(v), float(v.mean()), float(((v - v.mean()) ** 2).sum())) for v in x[:, :, c]]
        told = [*told[:3], told[3] if claim is None else claim(told[3])]
        if rule != "full" and (found := limited(told)) is not None:
            told[found[0] : found[0] + 1] = [found[1]] if rule == "limited" else []
        mean, spread = pooled(told)
        x[:, :, c] = (x[:, :, c] - mean) / (spread or 1.0)
    return list(x)


def accuracies(inputs: list[Array], labels: list[Array], seed: int) -> list[float] | None:
    """Train with the defaults for own data; none where no site can train."""
    sites = []
    for name, x, y in zip("abcd", inputs, labels, strict=True):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        whole = torch.from_numpy(x).float(), torch.from_numpy(y).long()
        train, val, test = (Split(*(part[at] for part in whole)) for at in (order[:180], order[180:240], order[240:]))
        sites.append(Site(name, train, val, {"test": test}))
    scenario = Scenario(
        name="survey", sites=tuple(sites), classes=("0", "1"), preprocess=Preprocess(),
        model=defaults.recipe(None, shape=inputs[0].shape[1:], classes=2),
        defaults=defaults.training(None) | defaults.FINE_TUNING, method_defaults=defaults.BY_BENEFIT,
    )  # fmt: skip
    try:
        found = emdcfl.fit(scenario, rounds=5, seed=seed).accuracies()
    except EmdcflError:
        return None
    return [float(found.loc[site.name, "accuracy"]) for site in sites]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="3-8")
    args = parser.parse_args()
    for (name, claim), rule in ((case, rule) for case in CASES.items() for rule in RULES):
        scores = []
        for seed in parse_seeds(args.seeds):
            sites = tables(seed, another_kind="column" in name)
            scores.append(accuracies(standardised(sites, claim, rule), [y for _, y in sites], seed))
        ended = np.array([score for score in scores if score is not None])
        means = {"others": 100 * ended[:, :3].mean(), "the fourth": 100 * ended[:, 3].mean()} if len(ended) else {}
        shown = {key: round(float(value), 1) for key, value in means.items()}
        print(json.dumps({"the fourth site": name, "its numbers": rule, **shown, "ended": len(ended), "of": len(scores)}), flush=True)


if __name__ == "__main__":
    main()
