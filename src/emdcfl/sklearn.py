"""Estimators of scikit-learn: ``fit(X, y, groups=site)``, where ``groups`` says whose row it is.

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> site = np.repeat(["north", "east", "south", "west"], 100)
>>> sign = np.where(np.isin(site, ["north", "east"]), 1, -1)
>>> X = rng.normal(size=(400, 4)) + 2 * sign[:, None]
>>> y = sign * X[:, 0] > 2
>>> model = FederatedClassifier(rounds=2).fit(X, y, groups=site)
>>> model.clusters_
{'east': 0, 'north': 0, 'south': 1, 'west': 1}
>>> bool(model.score(X, y, groups=site) > 0.9)
True
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from emdcfl.api import Result, fit
from emdcfl.core import keys
from emdcfl.core.errors import EmdcflError
from emdcfl.data.own.arrays import has_gaps
from emdcfl.data.own.parts import MIN_SAMPLES, rows_of
from emdcfl.data.split import stratified_indices
from emdcfl.methods.base import Method
from emdcfl.runs.served import Served

__all__ = ["FederatedClassifier", "FederatedRegressor"]

Array = NDArray[Any]


class _Federated(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no annotations
    """What both estimators share: parameters, the run, and whose model predicts which rows."""

    def __init__(
        self,
        method: str | Method = "emdcfl",
        *,
        model: Any = None,
        rounds: int | None = None,
        local_epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        personalize: str | None = None,
        validation_fraction: float = 0.25,
        settings: Mapping[str, Any] | None = None,
        random_state: Any = 0,
    ) -> None:
        self.method = method
        self.model = model
        self.rounds = rounds
        self.local_epochs = local_epochs
        self.batch_size = batch_size
        self.lr = lr
        self.personalize = personalize
        self.validation_fraction = validation_fraction
        self.settings = settings
        self.random_state = random_state

    def _run(self, X: Array, y: Array, groups: ArrayLike | None, strata: Array, task: Literal["classification", "regression"]) -> None:
        """Divide every site's rows by ``strata``, and run."""
        sites, seed = _sites(groups, X), self._seed()
        given: dict[str, Any] = {name: getattr(self, name) for name in ("rounds", "local_epochs", "batch_size", "lr", "personalize")}
        with _value_errors():
            clients = {name: self._split(name, X[rows], y[rows], strata[rows], seed) for name, rows in rows_of(sites).items()}
            self.result_: Result = fit(clients, self.model, self.method, task=task, seed=seed, settings=self.settings, **given)
        self.clusters_ = self.result_.clusters

    def _seed(self) -> int:
        state = self.random_state
        return int(state) if isinstance(state, int | np.integer) else int(check_random_state(state).randint(2**31 - 1))

    def _split(self, name: str, x: Array, y: Array, strata: Array, seed: int) -> dict[str, tuple[Array, Array]]:
        """Divide a site's rows into training and validation; there is no third part, so the second also tests."""
        share = self.validation_fraction
        if not 0 < share < 1:
            raise ValueError(f"expected validation_fraction between 0 and 1, got {share}")
        if len(x) < MIN_SAMPLES:
            raise ValueError(f"site {name!r} has {len(x)} samples; at least {MIN_SAMPLES} are needed; add some, or leave it out")
        train, val = stratified_indices(strata, (1 - share, share), keys.generator(seed, name, 0, "split"))
        held = (x[val], y[val])
        return {"train": (x[train], y[train]), "val": held, "test": held}

    def _outputs(self, X: Any, groups: ArrayLike | None) -> Iterator[tuple[NDArray[np.int64], Array]]:
        """Yield rows of each site and what its model makes of them."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype="numeric", allow_nd=True, reset=False)
        with _value_errors():
            for name, rows in rows_of(_sites(groups, X, required=False)).items():
                yield rows, self._model_of(name, X[rows]).probabilities(self.result_.inputs(X[rows])).numpy()

    def _model_of(self, name: str, x: Array) -> Served:
        result = self.result_
        if name in result.clients:
            return result.model_of(name)
        models = result.serving.models
        if len(models) == 1:
            return Served(result.about, models, (1.0,))
        if result.serving.clusters is None:
            raise ValueError(f"{result.config.method.name} has no model for a site that was not in fit, got {name!r}; use emdcfl or fedavg")
        return result.place_unlabelled(x, name=name).model

    def place(self, X: Any, groups: ArrayLike) -> dict[str, int | None]:
        """Return the cluster of every site of these rows: the one it trained in, or the nearest to the rows of an unseen site."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype="numeric", allow_nd=True, reset=False)
        known = self.clusters_ or {}
        with _value_errors():
            return {
                name: known[name] if name in known else self.result_.place_unlabelled(X[rows], name=name).cluster
                for name, rows in rows_of(_sites(groups, X)).items()
            }


class FederatedClassifier(ClassifierMixin, _Federated):  # type: ignore[misc]
    """Find which sites belong together and train one network per group; a site never seen gets the nearest groups'.

    Parameters
    ----------
    method : str or Method
        As in ``emdcfl.fit``.
    model : str or callable, optional
        Name of a network, or a function that returns a fresh ``nn.Module``. Default: an MLP.
    rounds, local_epochs, batch_size, lr, personalize : optional
        As in ``emdcfl.fit``.
    validation_fraction : float
        Share of every site's rows that decides what pays; the others train.
    settings : mapping, optional
        Other keys of a config, as in ``emdcfl.fit``.
    random_state : int, RandomState or None
        Everything random follows from it.

    Attributes
    ----------
    classes_ : array
    clusters_ : dict or None
        Site → cluster; ``None`` for methods without hard clusters.
    result_ : Result
        The run; its accuracies are those on the validation rows.
    """

    def fit(self, X: Any, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Train on the rows of all sites.

        Parameters
        ----------
        X : (n, F) array_like of numbers, or images as in ``emdcfl.fit``
        y : (n,) array_like
        groups : (n,) array_like
            Whose row it is; at least two sites.
        """
        X, y = validate_data(self, X, y, dtype="numeric", allow_nd=True, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"expected at least two classes, got one class: {self.classes_[0]!r}")
        self._run(X, codes, groups, codes, "classification")
        return self

    def predict(self, X: Any, groups: ArrayLike | None = None) -> Array:
        """Return the most likely class of every row; ``groups`` as in ``predict_proba``."""
        chosen = self.predict_proba(X, groups).argmax(axis=1)
        return np.asarray(self.classes_[chosen])

    def predict_proba(self, X: Any, groups: ArrayLike | None = None) -> Array:
        """Return class probabilities, one column per entry of ``classes_``.

        Parameters
        ----------
        groups : (n,) array_like, optional
            Whose row it is: a site of ``fit`` has its own model. The rows of an unseen site together decide which group's model fits
            them (see ``place``). Left out, all rows are one unseen site.
        """
        parts = list(self._outputs(X, groups))
        known = np.array([int(name) for name in self.result_.about.classes])  # a class may be missing in the rows that train
        found = np.zeros((sum(len(rows) for rows, _ in parts), len(self.classes_)))
        for rows, outputs in parts:
            found[np.ix_(rows, known)] = outputs
        return found

    def score(self, X: Any, y: ArrayLike, groups: ArrayLike | None = None, sample_weight: ArrayLike | None = None) -> float:
        """Return the accuracy over rows."""
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))


class FederatedRegressor(RegressorMixin, _Federated):  # type: ignore[misc]
    """Predict numbers with one network per group of sites; parameters as of ``FederatedClassifier``.

    Attributes
    ----------
    clusters_ : dict or None
        Site → cluster; ``None`` for methods without hard clusters.
    result_ : Result
        The run; its R² and RMSE are those on the validation rows.
    """

    def fit(self, X: Any, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Train on the rows of all sites; ``groups`` says whose row it is."""
        X, y = validate_data(self, X, y, dtype="numeric", allow_nd=True, ensure_min_samples=2, y_numeric=True)
        numbers = np.asarray(column_or_1d(y, warn=True), dtype=np.float64)
        self._run(X, numbers, groups, np.zeros(len(numbers), dtype=np.int64), "regression")
        return self

    def predict(self, X: Any, groups: ArrayLike | None = None) -> Array:
        """Return the predicted numbers; a site of ``fit`` has its own model, an unseen one those of the groups nearest to its rows."""
        parts = list(self._outputs(X, groups))
        found = np.zeros(sum(len(rows) for rows, _ in parts))
        for rows, outputs in parts:
            found[rows] = outputs[:, 0]
        return found

    def score(self, X: Any, y: ArrayLike, groups: ArrayLike | None = None, sample_weight: ArrayLike | None = None) -> float:
        """Return R² over rows."""
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))


def _sites(groups: ArrayLike | None, X: Array, *, required: bool = True) -> NDArray[np.str_]:
    if groups is None and required:
        raise ValueError("expected groups= (whose row it is, one value per row), got none; fit(X, y, groups=site)")
    if groups is None:
        return np.full(len(X), "new rows")
    sites = column_or_1d(groups)
    check_consistent_length(X, sites)
    if has_gaps(sites.tolist()):
        raise ValueError("expected groups= to say whose row it is for every row, got gaps; leave those rows out")
    names = sites.tolist()
    # a gap elsewhere turns pandas' integers into floats: 1.0 is site 1
    return np.array([str(int(name) if isinstance(name, float) and name.is_integer() else name) for name in names])


@contextmanager
def _value_errors() -> Iterator[None]:
    """Let scikit-learn see the errors it expects."""
    try:
        yield
    except EmdcflError as error:
        raise ValueError(str(error)) from error
