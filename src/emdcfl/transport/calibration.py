r"""A tolerance in units of W that every client computes locally, from its own train-to-validation problem.

Let :math:`T(V)` be the transport cost from a fixed train sample A to a validation sample V of m points from a distribution Q, and g the
dual potential on V. Empirical transport obeys a central limit theorem (del Barrio and Loubes, 2019; del Barrio, Gonzalez-Sanz and Loubes,
2024), so that under the null hypothesis, a partner's data follow the client's own distribution,

.. math:: W_{c,c'} = T(V_{c'}) - T(V_c) \ \approx\ N\bigl(0,\ \operatorname{Var}_Q(g)\,(1/m + 1/m')\bigr),
          \qquad \epsilon_c = q\,\sqrt{\operatorname{Var}(g_\tau)\,(1/m + 1/m')}.

q is the one-sided quantile of Student's distribution for a family-wise error :math:`\alpha` over all C(C-1) ordered pairs (Bonferroni).
Whether groups that differ are told apart (the power) is *not* controlled by :math:`\alpha`.

*Matched classes.* If the partner's sample has the class counts :math:`m_k` of :math:`V_c`, both samples consist of :math:`m_k` draws from
the same distribution of each class, and only the scatter inside classes is left, with m - K degrees of freedom instead of m - 1:

.. math:: \sigma^2 = \frac{1}{m - K}\sum_{k=1}^{K}\sum_{j:\,y_j = k} (g_j - \bar g_k)^2 .

Weighting :math:`V_c` to the class mix of A would not do: T has a kink where both mixes agree, so the two values would have different means.

Assumptions: samples are independent draws; A does not overlap V, on which the model was not trained; m and m' are equal or close; m is 64
or more. The potential of a finite problem is not unique: it is always the one of the network simplex. ``docs/explanation/tolerance.md``
says more.
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
