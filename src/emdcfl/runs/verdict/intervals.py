r"""How sure is a score? 95 % intervals of means over sites and of differences between runs, as pure functions of counts.

Site :math:`s` of :math:`S` answers :math:`x_s` of :math:`n_s` test samples correctly, :math:`\hat p_s = x_s/n_s`. Accuracy is the
unweighted mean :math:`\bar p = \frac1S\sum_s \hat p_s`. Three questions have three answers:

*These sites* (:func:`these_sites`): what would :math:`\bar p` be with endless test samples from the same sites? Sites are fixed, samples
are random. The variance of the mean, with every :math:`\hat p_s` drawn a little towards the mean, so that a site without an error is not
certain,

.. math:: V = \frac1{S^2}\sum_s \frac{\tilde p_s(1-\tilde p_s)}{n_s}, \qquad \tilde p_s = \frac{x_s + 4\bar p}{n_s + 4},

gives the number of samples :math:`n^* = \bar p(1-\bar p)/V` of one site with the same variance, and Wilson's interval [1]_ for :math:`n^*`
samples is the answer (effective sample size [2]_). For one site it is Wilson's own.

*New sites* (:func:`new_sites`): what is the mean over all sites of which these are a sample? Student's interval
:math:`\bar p \pm t_{S-1}\,\mathrm{sd}(\hat p_s)/\sqrt S`, which holds the noise of test samples too, widened to that of these sites: others
are not known better, even if all of these happen to agree.

*Differences* (:func:`difference`): both runs are tested on the same samples of the same sites, but which samples each answers correctly
stays at the sites. Two intervals of :math:`\bar d = \bar p_A - \bar p_B` hold: Newcombe's [3]_ from both runs' intervals, as if their
samples were independent (wider than needed where errors coincide), and Student's over the paired differences :math:`d_s` (wider than
needed where gains differ between sites). Each is taken at 97.5 %, so that both hold together with 95 % (Bonferroni), and the answer is
their intersection. With fewer than ``MIN_PAIRS`` sites Student's says next to nothing, and Newcombe's is taken at 95 %.

Runs of several seeds (:func:`over_seeds`) may share their test samples. Distances from the mean to the ends are therefore averaged, not
divided by :math:`\sqrt R`, and Student's over the :math:`R` means is added in quadrature: training differs from seed to seed.

Predicted numbers are scored by R², whose standard error :math:`e_s` each site sends (``objective.r_squared_error``). *These sites* is
then :math:`\bar p \pm t_\nu\sqrt{\sum_s e_s^2}/S` with Satterthwaite's [4]_ degrees of freedom
:math:`\nu = (\sum_s e_s^2)^2 / \sum_s (e_s^4/(n_s - 1))`; the other answers stay as they are.

Sites without test samples do not count; where nothing is left, there is no interval.

References
----------
.. [1] Wilson. Probable inference, the law of succession, and statistical inference. JASA 22, 1927.
.. [2] Korn, Graubard. Confidence intervals for proportions with small expected number of positive counts estimated from survey data.
   Survey Methodology 24, 1998.
.. [3] Newcombe. Interval estimation for the difference between independent proportions. Statistics in Medicine 17, 1998.
.. [4] Satterthwaite. An approximate distribution of estimates of variance components. Biometrics Bulletin 2, 1946.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from emdcfl.core.metric import Metric, score_of

LEVEL = 0.95
"""Confidence of every interval shown."""

KIND = "95 %: low and high of the mean over these sites, new_sites of the mean over sites like these"
"""What the ends in a summary mean."""

BORROWED = 4.0
"""Samples at the common mean that each site's variance borrows (Agresti and Coull's two successes and two failures)."""

MIN_PAIRS = 4
"""Sites from which on the spread of paired differences is used."""


@dataclass(frozen=True)
class SiteScores:
    """Score and number of test samples of each site, in the order of clients; a site that was not tested has 0 samples.

    ``errors``, of R² only, are the standard errors of the scores; an accuracy's follow from the samples.
    """

    values: tuple[float, ...]
    samples: tuple[int, ...]
    errors: tuple[float, ...] | None = None

    @classmethod
    def of(cls, score: Mapping[str, Any]) -> SiteScores | None:
        """Read what a summary keeps of one test variant; None where it keeps no scores of sites, or not one per site."""
        try:
            values, samples = _floats(score["sites"]), tuple(int(n) for n in score["tested"])
            errors = _floats(score["errors"]) if "errors" in score else None
        except (KeyError, TypeError, ValueError):
            return None
        whole = len(values) == len(samples) and (errors is None or len(errors) == len(samples))
        possible = all(0 <= p <= 1 for p in values) if errors is None else all(map(math.isfinite, (*values, *errors)))
        return cls(values, samples, errors) if whole and possible else None

    @property
    def metric(self) -> Metric:
        return Metric.ACCURACY if self.errors is None else Metric.R2

    def only(self, sites: Sequence[int]) -> SiteScores:
        """Return the scores of some sites, by number."""
        errors = None if self.errors is None else tuple(self.errors[i] for i in sites)
        return SiteScores(tuple(self.values[i] for i in sites), tuple(self.samples[i] for i in sites), errors)

    def each(self) -> list[SiteScores]:
        """Return the scores of every site alone."""
        return [self.only([i]) for i in range(len(self.values))]

    def weighted(self, weights: Sequence[float]) -> SiteScores:
        """Return scores whose mean over the tested sites is the weighted mean of these."""
        total = math.fsum(w for w, n in zip(weights, self.samples, strict=True) if n > 0)
        scale = [w * len(self.counted) / total if total > 0 else 1.0 for w in weights]
        errors = None if self.errors is None else tuple(e * w for e, w in zip(self.errors, scale, strict=True))
        return SiteScores(tuple(p * w for p, w in zip(self.values, scale, strict=True)), self.samples, errors)

    @property
    def counted(self) -> list[tuple[float, int]]:
        return [(p, n) for p, n in zip(self.values, self.samples, strict=True) if n > 0]


def _floats(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(0.0 if value is None else float(value) for value in values)


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float
    metric: Metric = Metric.ACCURACY

    @property
    def sign(self) -> int:
        """1 or −1 where the interval lies on one side of zero, else 0."""
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    @property
    def range(self) -> str:
        """The two ends for people."""
        return self.metric.range(self.low, self.high)

    def __neg__(self) -> Interval:
        return Interval(-self.mean, -self.high, -self.low, self.metric)

    def points(self, sign: str = "+", *, unit: bool = True) -> str:
        """Write a difference of accuracies in points of a percent, or one of R²; without ``sign`` a plus is left out.

        Examples
        --------
        >>> Interval(0.031, -0.0002, 0.0622).points(), Interval(0.01, 0.01, 0.01).points("")
        ('+3.1 points (0.0 to +6.2)', '1.0 points (1.0 to 1.0)')
        >>> Interval(0.031, -0.0112, 0.0622, Metric.R2).points(unit=False)
        '+0.03 (-0.01 to +0.06)'
        """
        mean, low, high = (self.metric.change(value, sign) for value in (self.mean, self.low, self.high))
        return f"{mean}{f' {self.metric.unit}' if unit else ''} ({low} to {high})"

    def inside(self, least: float) -> Interval:
        """Return the interval of a score (``least`` = 0) or of a difference (−1) within what is possible."""
        if self.metric is Metric.R2:
            return self if least else replace(self, high=min(self.high, 1.0))
        return replace(self, low=max(self.low, least), high=min(self.high, 1.0))


def wilson(share: float, n: float, level: float = LEVEL) -> Interval:
    r"""Wilson's score interval of a share of ``n`` samples.

    .. math:: \frac{\hat p + z^2/2n \pm z\sqrt{\hat p(1-\hat p)/n + z^2/4n^2}}{1 + z^2/n}

    Examples
    --------
    >>> found = wilson(0.9, 10)
    >>> round(found.low, 3), round(found.high, 3)
    (0.596, 0.982)
    """
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2 / n
    middle, half = share + z2 / 2, math.sqrt(z2 * (share * (1 - share) + z2 / 4))
    low, high = (middle - half) / (1 + z2), (middle + half) / (1 + z2)
    return Interval(share, max(min(low, share), 0.0), min(max(high, share), 1.0))  # rounding may cut off a share of 0 or 1


def these_sites(tested: SiteScores, level: float = LEVEL) -> Interval | None:
    """Mean score over exactly these sites; uncertain because test samples are few.

    Examples
    --------
    >>> found = these_sites(SiteScores((0.9, 1.0), (50, 30)))
    >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3)
    (0.95, 0.887, 0.979)
    """
    sites = tested.counted
    if not sites:
        return None
    if tested.errors is not None:
        return _by_errors([(p, n, e) for p, n, e in zip(tested.values, tested.samples, tested.errors, strict=True) if n > 0], level)
    mean = min(max(math.fsum(p for p, _ in sites) / len(sites), 0.0), 1.0)
    shrunk = [((p * n + BORROWED * mean) / (n + BORROWED), n) for p, n in sites]
    variance = math.fsum(p * (1 - p) / n for p, n in shrunk) / len(sites) ** 2
    if variance <= 0:  # all right or all wrong: the limit of the ratio below
        return wilson(mean, len(sites) ** 2 / math.fsum(1 / n for _, n in sites), level)
    return wilson(mean, mean * (1 - mean) / variance, level)


def _by_errors(sites: Sequence[tuple[float, int, float]], level: float) -> Interval:
    """Interval of a mean of scores with known standard errors; one that spans nothing where all predictions are exact."""
    from scipy.special import stdtrit

    mean = math.fsum(p for p, *_ in sites) / len(sites)
    variance = math.fsum(e**2 for *_, e in sites)
    if variance == 0:
        return Interval(mean, mean, mean, Metric.R2)
    freedom = variance**2 / math.fsum(e**4 / max(n - 1, 1) for _, n, e in sites)
    half = float(stdtrit(freedom, (1 + level) / 2)) * math.sqrt(variance) / len(sites)
    return Interval(mean, mean - half, mean + half, Metric.R2).inside(0.0)


def new_sites(tested: SiteScores) -> Interval | None:
    """Mean score over all sites of which these are a sample; None with fewer than two sites."""
    found, here = _student([p for p, _ in tested.counted], LEVEL, metric=tested.metric), these_sites(tested)
    if found is None or here is None:
        return None
    return replace(found, low=min(found.low, here.low), high=max(found.high, here.high)).inside(0.0)


def row_interval(row: Mapping[str, Any], variant: str) -> Interval | None:
    """Interval of one client's score in a row of metrics; None where the number of its test samples is unknown."""
    score, n = (score_of(row) or {}).get(variant), (row.get("test_samples") or {}).get(variant)
    if score is None or not n:
        return None
    return these_sites(SiteScores((float(score),), (int(n),), (float(row["r2_error"][variant]),) if "r2_error" in row else None))


def difference(one: SiteScores, other: SiteScores, level: float = LEVEL) -> Interval | None:
    """Mean over these sites of the score of one run less that of another, site by site.

    Examples
    --------
    >>> found = difference(SiteScores((0.9, 0.8, 0.9, 0.8), (100,) * 4), SiteScores((0.7, 0.6, 0.7, 0.6), (100,) * 4))
    >>> round(found.mean, 3), found.sign
    (0.2, 1)
    """
    if len(one.values) != len(other.values) or one.metric is not other.metric:
        return None
    samples = tuple(min(n, m) if n > 0 and m > 0 else 0 for n, m in zip(one.samples, other.samples, strict=True))
    gains = [p - q for p, q, n in zip(one.values, other.values, samples, strict=True) if n > 0]
    if not gains:
        return None
    level = level if len(gains) < MIN_PAIRS else (1 + level) / 2
    a, b = (these_sites(replace(run, samples=samples), level) for run in (one, other))
    assert a is not None and b is not None
    mean = math.fsum(gains) / len(gains)
    low = mean - math.hypot(a.mean - a.low, b.high - b.mean)
    high = mean + math.hypot(a.high - a.mean, b.mean - b.low)
    if len(gains) >= MIN_PAIRS:
        # sites that all differ by the same count are no proof of a certain difference: half a sample is the resolution
        resolution = math.sqrt(math.fsum((0.5 / n) ** 2 for n in samples if n > 0)) / len(gains) if one.errors is None else 0.0
        spread = _student(gains, level, resolution)
        assert spread is not None
        low, high = max(low, spread.low), min(high, spread.high)
    return Interval(mean, low, high, one.metric).inside(-1.0)


def more_samples(tested: Mapping[str, int], share: float) -> dict[str, float]:
    r"""Return the fewest test samples to add, by site, so that the variance of the mean over sites falls to this share.

    The variance is taken as :math:`\sum_s 1/n_s`: it falls fastest where the smallest sites are filled up to one level.

    Examples
    --------
    >>> more_samples({"a": 10, "b": 10}, 0.5), more_samples({"a": 10, "b": 1000}, 0.5)
    ({'a': 10.0, 'b': 10.0}, {'a': 10.2})
    """
    known = sorted((n, site) for site, n in tested.items() if n > 0)
    wanted = share * math.fsum(1 / n for n, _ in known)
    for k in range(1, len(known) + 1):
        rest = wanted - math.fsum(1 / n for n, _ in known[k:])
        level = k / rest if rest > 0 else math.inf
        if k == len(known) or level <= known[k][0]:
            return {site: round(level - n, 1) for n, site in known[:k]}
    return {}


def over_seeds(found: Sequence[Interval]) -> Interval | None:
    """Mean over runs that differ in their seed only.

    Examples
    --------
    >>> over_seeds([Interval(0.9, 0.88, 0.92)]).low
    0.88
    >>> two = over_seeds([Interval(0.9, 0.88, 0.92), Interval(0.91, 0.89, 0.93), Interval(0.92, 0.9, 0.94)])
    >>> round(two.mean, 3), round(two.low, 3), round(two.high, 3)
    (0.91, 0.878, 0.942)
    """
    if not found:
        return None
    mean = math.fsum(f.mean for f in found) / len(found)
    down, up = (math.fsum(side) / len(found) for side in ([f.mean - f.low for f in found], [f.high - f.mean for f in found]))
    seeds = _student([f.mean for f in found], LEVEL)
    half = 0.0 if seeds is None else seeds.high - seeds.mean
    return Interval(mean, mean - math.hypot(down, half), mean + math.hypot(up, half), found[0].metric).inside(-1.0)


def _student(values: Sequence[float], level: float, least: float = 0.0, metric: Metric = Metric.ACCURACY) -> Interval | None:
    """Student's interval of the mean of independent values, with a standard error of at least ``least``."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    mean = math.fsum(values) / len(values)
    error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    half = float(stdtrit(len(values) - 1, (1 + level) / 2)) * max(error, least)
    return Interval(mean, mean - half, mean + half, metric)
