r"""A tolerance in units of W that every client computes locally, from its own train-to-validation problem.

Reasoning
---------
Client c compares its train sample A (n points, fixed) with validation samples. Let :math:`T(V)` be the transport cost from A to a sample V
of m points. With the source held fixed, empirical transport obeys a central limit theorem (del Barrio and Loubes, 2019; del Barrio,
Gonzalez-Sanz and Loubes, 2024): for V drawn from a distribution Q,

.. math:: \sqrt m\,\bigl(T(V) - \mathbb E\,T(V)\bigr) \to N\bigl(0,\ \operatorname{Var}_Q(g)\bigr),

where g is the dual potential on the target side: to first order, exchanging one point of V changes T by the difference of g over m.
Under the null hypothesis that a partner's data follow the client's own distribution, :math:`\tau_c = T(V_c)` with m points and
:math:`T(V_{c'})` with m' points have (for equal sizes) the same mean and are independent given A, so

.. math:: W_{c,c'} = T(V_{c'}) - \tau_c \ \approx\ N\bigl(0,\ \operatorname{Var}(g_\tau)\,(1/m + 1/m')\bigr),
          \qquad \epsilon_c = q\,\sqrt{\operatorname{Var}(g_\tau)\,(1/m + 1/m')}.

Matched classes
---------------
Most of Var(g) lies *between* classes (74-89 % on digits): a validation sample that happens to hold a few more of one class must send them
to another one. That is luck of the draw, not a difference between clients. Let :math:`m_k` be the class counts of V_c. If the partner's
sample has exactly these counts, then under the null hypothesis, *given the counts*, both samples consist of :math:`m_k` independent draws
from the same distribution of each class, so T(V_c) and T(V_c') have the same distribution whatever the class mix of A is, and only
the scatter inside classes is left:

.. math:: W_{c,c'} \approx N\bigl(0,\ \sigma^2\,(1/m + 1/m')\bigr), \qquad
          \sigma^2 = \frac{1}{m - K}\sum_{k=1}^{K}\sum_{j:\,y_j = k} (g_j - \bar g_k)^2 .

(Weighting only V_c to the class mix of A would not do: T is convex in the class mix with a kink where both mixes agree, so the
two values would have different means.) Given the counts it does not matter whether splits were stratified by class. The partner may draw
from its train split too, which the row client's model has not seen either, and average several such blocks (m' is their total).
The null hypothesis is narrower than without: equal distributions *of each class*. A shift of class frequencies alone is not seen.

q is the one-sided quantile for a family-wise error :math:`\alpha` over all C(C-1) ordered pairs (Bonferroni): with probability at
least :math:`1-\alpha` no pair of the same distribution is rejected. The variance is estimated, so q is Student's, with the degrees of
freedom of the estimate: m - K with matched classes, m - 1 without. The power, whether groups that differ are told apart, is *not*
controlled by :math:`\alpha`: it grows with m.

Assumptions: samples are independent draws; A does not overlap V; the model was trained on A's split, not on any V; the sizes m and m'
are equal or close (the mean of T falls with m, so a smaller partner looks farther away than it is); m is large enough for the normal
approximation in the tail (64 or more) and for the plug-in variance; nothing is compared below :func:`min_samples`. The potential of a
finite problem is not unique; the one of the network simplex is used throughout, so that the measured margins apply.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from emdcfl.core.errors import ConfigError, DataError


def dual_variance(g: Any) -> float:
    """Variance of the dual potential over the validation sample of the tau problem (after the c-transform).

    Parameters
    ----------
    g : (m,) array_like
        Potential on the validation sample: ``exact(cost, duals=True).g`` with train rows and validation columns.

    Examples
    --------
    >>> dual_variance([0.0, 1.0, 2.0])
    1.0
    """
    x = np.asarray(g, dtype=np.float64)
    if x.ndim != 1 or x.size < 2 or not np.isfinite(x).all():
        raise DataError(
            f"expected a finite dual potential on at least 2 validation samples, got shape {x.shape}; give the client more validation data"
        )
    return float(x.var(ddof=1))


@lru_cache(maxsize=1024)  # pairs share few degrees of freedom, and Student's quantile is an iteration
def quantile(alpha: float, clients: int, freedom: float = math.inf) -> float:
    """One-sided quantile for a family-wise error `alpha` over the C(C-1) ordered pairs of C clients: Student's, or the normal one.

    Parameters
    ----------
    freedom : float
        Degrees of freedom of the variance that the quantile is multiplied with.

    Examples
    --------
    >>> round(quantile(0.01, 40), 2), round(quantile(0.01, 18), 2), round(quantile(0.01, 18, freedom=20), 2)
    (4.36, 3.99, 5.02)
    """
    from scipy.special import ndtri, stdtrit

    if not 0 < alpha < 1:
        raise ConfigError(f"expected alpha between 0 and 1, got {alpha}; 0.005 is usual")
    if clients < 1:
        raise ConfigError(f"expected at least one client, got {clients}")
    if not freedom >= 1:
        raise DataError(f"expected at least one degree of freedom, got {freedom}; give the client more validation data")
    p = alpha / max(1, clients * (clients - 1))
    return float(-ndtri(p) if math.isinf(freedom) else -stdtrit(freedom, p))


def tolerance(variance: float, m: int, m2: int, q: float) -> float:
    """The tolerance ``q * sqrt(variance * (1/m + 1/m2))`` for a partner with `m2` validation samples.

    Examples
    --------
    >>> round(tolerance(0.01, 512, 512, 4.36), 4)
    0.0273
    """
    if variance < 0 or not math.isfinite(variance):
        raise DataError(f"expected a variance >= 0, got {variance}; it comes from dual_variance")
    if m < 1 or m2 < 1:
        raise DataError(f"expected at least one validation sample on each side, got {m} and {m2}")
    return q * math.sqrt(variance * (1.0 / m + 1.0 / m2))


def min_samples(alpha: float, clients: int) -> int:
    r"""Least m that says anything: with fewer samples the tolerance exceeds a standard deviation of the potential, whatever m' is.

    :math:`q\sqrt{\sigma^2(1/m + 1/m')} > \sigma` for every m' if :math:`m \le q^2`, where q has m - 1 degrees of freedom: not even a
    partner that lies a whole standard deviation of the potential farther away would be rejected, so a link at that size is no evidence
    of likeness.

    Examples
    --------
    >>> min_samples(0.005, 8), min_samples(0.005, 40)
    (22, 31)
    """
    m = max(2, math.floor(quantile(alpha, clients) ** 2) + 1)
    while m <= quantile(alpha, clients, m - 1) ** 2:
        m += 1
    return m
