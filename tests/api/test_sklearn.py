"""The estimator keeps scikit-learn's conventions, and places sites that were not in ``fit``."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.model_selection import LeaveOneGroupOut, cross_val_score
from sklearn.utils.estimator_checks import check_estimator

import emdcfl
from emdcfl.sklearn import FederatedClassifier, FederatedRegressor

TOO_FEW = "the check's data have fewer than 10 rows per site, which a site needs"
DATA_NOT_AN_ARRAY = ("classifier_data_not_an_array", "regressor_data_not_an_array")
CHECKS = ("n_features_in_after_fitting", "estimators_nan_inf", "fit2d_1feature", *DATA_NOT_AN_ARRAY)
EXPECTED = {f"check_{name}": TOO_FEW for name in (*CHECKS, "regressors_no_decision_function")}
EXPECTED["check_methods_subset_invariance"] = "float32 rounds by batch: numbers differ in the seventh digit"


class InTwoSites:
    """The checks know no groups: every other row belongs to the second site."""

    def fit(self, X: Any, y: Any) -> Any:
        rows = len(np.asarray(y)) if y is not None else 0
        return super().fit(X, y, groups=np.arange(rows) % 2)


class TwoSites(InTwoSites, FederatedClassifier): ...


class TwoSitesOfNumbers(InTwoSites, FederatedRegressor): ...


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [TwoSites(rounds=1), TwoSitesOfNumbers(rounds=1)])
def test_scikit_learns_own_checks(estimator: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(estimator, on_fail=None, expected_failed_checks=EXPECTED)
    status = {entry["check_name"]: entry["status"] for entry in found}
    assert [name for name, said in status.items() if said == "failed"] == []
    assert {name for name, said in status.items() if said == "xfail"} <= set(EXPECTED)
    assert sum(said == "passed" for said in status.values()) > 40


def rows(sites: dict[str, int], n: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sites of two groups in which the label means the opposite."""
    rng = np.random.default_rng(0)
    sign = np.repeat(list(sites.values()), n)
    x = rng.normal(size=(len(sign), 4)) + 2 * sign[:, None]
    return x, np.where(sign * x[:, 0] > 2, "yes", "no"), np.repeat(list(sites), n)


def test_groups_are_found_and_unseen_sites_placed() -> None:
    x, y, site = rows({"a": 1, "b": 1, "c": -1, "d": -1, "e": 1, "f": -1})
    seen = np.isin(site, ["a", "b", "c", "d"])
    model = FederatedClassifier(rounds=3).fit(x[seen], y[seen], groups=site[seen])
    assert model.clusters_ == {"a": 0, "b": 0, "c": 1, "d": 1}
    assert model.place(x, site) == {**model.clusters_, "e": 0, "f": 1}
    assert model.score(x[~seen], y[~seen], groups=site[~seen]) > 0.85
    only_e = site == "e"  # without groups, the rows are one unseen site
    assert np.array_equal(model.predict(x[only_e]), model.predict(x[only_e], groups=site[only_e]))
    assert np.allclose(model.predict_proba(x, groups=site).sum(axis=1), 1)
    again = pickle.loads(pickle.dumps(model))  # noqa: S301  our own bytes
    assert np.array_equal(again.predict(x, groups=site), model.predict(x, groups=site))


def test_it_is_the_same_run_as_fit() -> None:
    x, y, site = rows({"a": 1, "b": -1}, n=40)
    model = FederatedClassifier("fedavg", rounds=1, local_epochs=1, random_state=3).fit(x, y, groups=site)
    copy = clone(model)
    assert not hasattr(copy, "result_") and copy.get_params() == model.get_params() == pickle.loads(pickle.dumps(copy)).get_params()  # noqa: S301
    codes = np.unique(y, return_inverse=True)[1]
    splits = {name: model._split(name, x[site == name], codes[site == name], codes[site == name], 3) for name in ("a", "b")}
    plain = emdcfl.fit(splits, method="fedavg", task="classification", rounds=1, local_epochs=1, seed=3)
    assert plain.summary["config"] == model.result_.summary["config"]
    assert np.array_equal(plain.serving.models.numpy(), model.result_.serving.models.numpy())


def test_a_site_is_known_by_its_number_however_that_is_stored() -> None:
    x, y, site = rows({"1": 1, "2": -1}, n=40)
    model = FederatedClassifier("local", rounds=1).fit(x, y, groups=site.astype(int))
    by_integers = model.predict_proba(x, groups=site.astype(int))
    assert np.array_equal(model.predict_proba(x, groups=site.astype(float)), by_integers)
    assert np.array_equal(FederatedClassifier("local", rounds=1).fit(x, y, groups=site.astype(float)).predict_proba(x, site), by_integers)


def test_cross_validation_over_sites() -> None:
    x, y, site = rows({"a": 1, "b": 1, "c": 1}, n=40)
    with sklearn.config_context(enable_metadata_routing=True):
        model = FederatedClassifier("fedavg", rounds=2).set_fit_request(groups=True).set_score_request(groups=True)
        scores = cross_val_score(model, x, y, params={"groups": site}, cv=LeaveOneGroupOut())
    assert len(scores) == 3 and scores.min() > 0.7


def test_what_does_not_fit_is_a_value_error() -> None:
    x, y, site = rows({"a": 1, "b": -1}, n=20)
    with pytest.raises(ValueError, match="groups="):
        FederatedClassifier().fit(x, y)
    with pytest.raises(ValueError, match="two (clients|sites)"):
        FederatedClassifier(rounds=1).fit(x, y, groups=np.zeros(len(x)))
    with pytest.raises(ValueError, match="for every row, got gaps"):
        FederatedClassifier(rounds=1).fit(x, y, groups=np.where(site == "a", 1.0, np.nan))
    local = FederatedClassifier("local", rounds=1).fit(x, y, groups=site)
    with pytest.raises(ValueError, match="has no model for a site that was not in fit"):
        local.predict(x, groups=np.full(len(x), "z"))
