"""What a run recommends: the baselines decide, with intervals; a grouping that loses is never recommended."""

from __future__ import annotations

from typing import Any

import pytest

from emdcfl.runs.personal import in_words
from emdcfl.runs.scoring import site_scores
from emdcfl.runs.verdict.advice import advice, worth, worth_rows
from emdcfl.runs.verdict.findings import how_sure, in_brief, sentences
from emdcfl.runs.verdict.structure import headline, structure

SITES = ("a", "b", "c", "d", "e", "f")
GROUPS = [0, 0, 0, 1, 1, 1]


def summary(
    mean: float | tuple[float, ...], clusters: list[int] | None = None, n: int = 200, rare: tuple[float, float] | None = None
) -> dict[str, Any]:
    """``rare``: balanced accuracy and AUC, where classes are unbalanced."""
    shares = (mean,) * len(SITES) if isinstance(mean, float) else mean
    uneven = {} if rare is None else {"unbalanced": {"test": {"balanced": rare[0], "balanced_n": 40, "auc": rare[1], "auc_n": 40}}}
    rows = [{"client": c, "accuracy": {"test": p}, "test_samples": {"test": n}, **uneven} for c, p in zip(SITES, shares, strict=True)]
    score = site_scores(rows, "test")
    k = 1 if clusters is None else len(set(clusters))
    overall = {**score, "samples": n * len(SITES), "variants": {"test": score}}
    return {"method": "emdcfl", "clients": SITES, "k": k, "clusters": clusters, "classes": 2, "accuracy": overall}


def baselines(together: float, alone: float, n: int = 200) -> dict[str, Any]:
    return {"fedavg": summary(together, n=n), "local": summary(alone, n=n)}


READING = {"not_compared": [], "borderline": [], "doubts": [], "near_bounds": 0, "sentences": [], "clusters": {}}
ONE, ALL = [0] * 6, list(range(6))


@pytest.mark.parametrize(
    ("clusters", "own", "together", "alone", "n", "choice", "words"),
    [
        (GROUPS, 0.9, 0.7, 0.8, 200, "this run", "10.0 points"),
        (GROUPS, 0.9, 0.7, 0.9, 200, "this run", "20.0 points"),
        (GROUPS, 0.9, 0.7, 0.99, 200, "local", "9.0 points"),
        (GROUPS, 0.8, 0.95, 0.9, 200, "fedavg", "15.0 points"),
        (GROUPS, 0.9, 0.9, 0.9, 20, "undecided", "120 test samples"),
        (GROUPS, 0.9, 0.9, 0.9, 20_000, "undecided", "simplest"),
        (ONE, 0.9, 0.9, 0.8, 200, "this run", "10.0 points"),
        (ONE, 0.6, 0.6, 0.91, 200, "local", "do not agree on labels"),
        (ONE, 0.9, 0.9, 0.93, 2000, "local", "look alike"),
        (ALL, 0.9, 0.8, 0.9, 200, "this run", "10.0 points"),
        (ALL, 0.8, 0.95, 0.8, 200, "fedavg", "15.0 points"),
    ],
)  # fmt: skip
def test_the_paired_differences_decide(
    clusters: list[int], own: float, together: float, alone: float, n: int, choice: str, words: str
) -> None:
    run, others = summary(own, clusters, n), baselines(together, alone, n)
    found = advice(run, others)
    assert found.choice == choice and words in found.headline
    assert headline(run, READING, others) == found.headline
    assert bool(found.doubts) == (choice in ("local", "fedavg"))


@pytest.mark.parametrize(
    ("own", "alone", "choice", "words"),
    [
        ((0.5, 0.51), (0.5, 0.5), "none", "No model is of use yet: one model for all is not known to be better than chance"),
        ((0.5, 0.8), (0.5, 0.7), "none", "No model is of use yet: one model for all hardly ever predicts a rare class"),
        ((0.5, 0.51), (0.8, 0.9), "local", "Train every site alone: one model for all is not known to be better than chance"),
        ((0.8, 0.9), (0.8, 0.9), "undecided", "Train all 6 sites together, the simplest choice"),
    ],
)
def test_a_model_that_has_learned_nothing_is_not_recommended(
    own: tuple[float, float], alone: tuple[float, float], choice: str, words: str
) -> None:
    """At 95 % of one class, 95 % accuracy is what always answering that class has."""
    run, others = summary(0.95, ONE, 20_000, own), {"local": summary(0.95, None, 20_000, alone)}
    found = advice(run, others)
    assert found.choice == choice and found.headline.startswith(words)
    assert in_brief(run, READING, others)[0][1].startswith(words)
    assert headline(run, READING).startswith("No model is of use yet") == (own[0] == 0.5)


@pytest.mark.parametrize(
    ("own", "rare", "choice"),
    [
        (0.84, None, "none"),  # as good as always answering each site's most frequent class
        (0.84, (0.5, 0.51), "none"),
        (0.84, (0.7, 0.8), "this run"),  # ranks the samples of unbalanced sites
        (0.95, None, "this run"),
    ],
)
def test_every_sites_most_frequent_class_is_guessing_too(own: float, rare: tuple[float, float] | None, choice: str) -> None:
    """Sites with other frequent classes are balanced together, and half of the sites need not be unbalanced."""
    run, others = summary(own, GROUPS), baselines(0.5, 0.6)
    if rare is not None:
        uneven = summary(own, GROUPS, rare=rare)["accuracy"]
        run = {**run, "accuracy": {**run["accuracy"], **{name: {**uneven[name], "sites": 3} for name in ("balanced", "auc")}}}
    others["logistic"] = {**summary(0.6), "most_frequent": {"sites": [0.85] * 6, "tested": [200] * 6}}
    found = advice(run, others)
    assert found.choice == choice
    assert ("most frequent class (-1.0 points" in found.headline) == (choice == "none")


def test_a_model_that_beats_the_most_frequent_class_is_of_use_however_few_its_rare_samples_are() -> None:
    few = summary(0.97, ONE, 36, rare=(1.0, 1.0))
    few["accuracy"] |= {name: {**few["accuracy"][name], "low": 0.34} for name in ("balanced", "auc")}
    assert advice(few, {"local": few}).choice == "none"
    guess = {"most_frequent": {"sites": [0.7] * 6, "tested": [36] * 6}}
    assert advice(few, {"local": few, "logistic": {**few, **guess}}).choice == "undecided"


@pytest.mark.parametrize(
    ("accuracy", "own", "other", "said"),
    [
        (0.97, 0.65, 0.8, "one model for all finds rare classes better than training in these 2 groups"),
        (0.97, 0.65, 0.66, ""),
        (0.95, 0.8, 0.65, "training in these 2 groups finds rare classes better than one model for all"),
    ],
)
def test_a_training_that_finds_rare_classes_better_is_named(accuracy: float, own: float, other: float, said: str) -> None:
    """Of 2 % positives, all may be missed within two points of accuracy."""
    found = advice(summary(accuracy, GROUPS, rare=(own, 0.8)), {"fedavg": summary(0.95, rare=(other, 0.8))})
    assert [doubt.partition(":")[0] for doubt in found.doubts] == ([said] if said else [])


@pytest.mark.parametrize(("change", "better"), [(0.031, 10), (-0.131, 2), (-0.031, 2)])
@pytest.mark.parametrize(("other", "rival"), [("fedavg", True), ("local", True), ("fedavg+ft", False)])
def test_a_gain_over_a_training_that_other_rounds_would_improve_is_doubted(other: str, rival: bool, change: float, better: int) -> None:
    """With more rounds, or fewer, it may be as good; not if it was clearly worse in its best round, too."""
    others = {**baselines(0.79, 0.8), "fedavg+ft": summary(0.9)}
    others[other] = {**others[other], "better_rounds": (better, change), "rounds": 5}
    run, doubted = summary(0.9, GROUPS), rival and change != -0.031
    found = advice(run, others)
    assert found.choice == "this run" and bool(found.doubts) == doubted
    told = "still improving" if change > 0 else "better after fewer rounds"
    assert (told in found.headline) == (other == "local" and doubted)  # whose difference the line names
    if doubted:
        assert f"{100 * abs(change):.1f} points" in found.doubts[0] and f"--rounds {better}" in found.doubts[0]
        assert f"--rounds {better}" in in_brief(run, READING, others)[1][1]


@pytest.mark.parametrize(("change", "doubted"), [(0.031, True), (-0.2, True), (-0.031, False)])
def test_a_loss_that_other_rounds_might_make_good_is_doubted(change: float, doubted: bool) -> None:
    run = {**summary(0.8, GROUPS), "better_rounds": (4, change), "rounds": 2}
    found = advice(run, baselines(0.7, 0.9))
    assert found.choice == "local"
    told = [doubt for doubt in found.doubts if "--rounds 4" in doubt]
    assert len(told) == doubted and all(doubt.startswith("training in these 2 groups") for doubt in told)


@pytest.mark.parametrize(
    ("here", "there", "clusters", "doubted"), [(0.9, 0.0, GROUPS, True), (0.9, 0.01, GROUPS, False), (0.9, 0.0, [0] * 6, False)]
)
def test_groups_that_have_classes_of_their_own_are_doubted(here: float, there: float, clusters: list[int], doubted: bool) -> None:
    """They may only tell apart how sites spell their labels."""
    told = {"feature": "class 'No'", "said": "class 'No' is more frequent", "kind": "share", "here": here, "there": there, "effect": 9.0}
    run = {**summary(0.9, clusters), "what_differs": [{"who": "cluster 1", "members": ["d", "e", "f"], "found": [told]}]}
    look = dict(in_brief(run, READING, baselines(0.6, 0.9)))["Look at"]
    assert ("class 'No' at d, e, f" in look and "--label-map" in look) == doubted


@pytest.mark.parametrize(("one", "n", "doubted"), [(0.0, 32, True), (0.0, 2, False), (0.1, 32, False)])
def test_a_site_that_one_model_for_all_never_gets_right_is_named(one: float, n: int, doubted: bool) -> None:
    """In a federation, nobody but the site knows how frequent its classes are."""
    run, others = summary(0.9, [0] * 5 + [1], n), {"fedavg": summary((0.9, 0.9, 0.9, 0.9, 0.9, one), n=n), "local": summary(0.9, n=n)}
    found = advice(run, others)
    assert [("never right at f: check how labels" in doubt) for doubt in found.doubts] == [True] * doubted
    assert ("never right at f" in dict(in_brief(run, READING, others))["Look at"]) == doubted


def test_where_groups_are_undecided_no_training_is_recommended_that_another_clearly_beats() -> None:
    """Neither differs clearly from the groups, and yet they differ from each other."""
    run = summary((0.95, 0.83, 0.89, 0.92, 0.86, 0.89), GROUPS, 60)
    one, tuned = summary((0.8, 0.93, 0.82, 0.85, 0.89, 0.81), n=60), summary((0.94, 0.94, 0.93, 0.94, 0.92, 0.93), n=60)
    found = advice(run, {"fedavg": one, "fedavg+ft": tuned})
    assert found.choice == "undecided"
    assert found.headline.startswith("Undecided, for now train one model for all, fine-tuned at home: 8.3 points")
    logistic = advice(run, {"fedavg": one, "logistic": tuned})
    assert logistic.headline.startswith("Undecided, for now train a logistic regression per site: 8.3 points")
    assert advice(run, {"fedavg": one, "fedavg+ft": one}).headline.startswith("Undecided, for now train one model for all: ")


@pytest.mark.parametrize(
    ("change", "words"), [(-0.01, "now train one model for all: "), (0.01, "now train all 6 sites together, fine-tuned at home")]
)
def test_where_fine_tuning_one_model_is_undecided_its_own_test_decides(change: float, words: str) -> None:
    one = (0.95, 0.83, 0.89, 0.92, 0.86, 0.89)
    tuned = tuple(p + change + step for p, step in zip(one, (0.04, -0.04) * 3, strict=True))
    run = {**summary(one, ONE, 60), "personalized": {"accuracy": summary(tuned, n=60)["accuracy"], "kept": list(SITES)}}
    found = advice(run, {"fedavg": summary(one, n=60)})
    assert found.choice == "undecided" and words in found.headline


def test_groups_by_benefit_are_called_what_was_tested() -> None:
    """Distances may show nothing where a split pays."""
    split = {"round": 1, "pays": True, "members": SITES, "points": 12.34}
    told = structure(summary(0.9, GROUPS), {**READING, "splits": [split]})
    assert "12.3 points" in told and "separated" not in told
    alone = structure(summary(0.9, GROUPS), {**READING, "splits": [{**split, "pays": False}]})  # a site that never answered
    assert "no division pays" in alone and "lower" not in alone
    assert structure(summary(0.9, GROUPS), READING).endswith("clearly separated")


def test_more_samples_are_asked_of_the_sites_that_have_too_few() -> None:
    run = summary(0.9, GROUPS)
    few = {**run["accuracy"]["variants"]["test"], "tested": [3, 12, 900, 900, 900, 900]}
    unequal = {**run, "accuracy": {**run["accuracy"], "variants": {"test": few}}}
    assert "more at a, b would" in advice(unequal, {"fedavg": unequal}).headline


@pytest.mark.parametrize("name", ["logistic", "linear"])
def test_a_regression_that_is_better_is_recommended_in_a_sentence(name: str) -> None:
    run, networks = summary(0.6, GROUPS), baselines(0.5, 0.55)
    better = advice(run, {**networks, name: summary(0.9)})
    assert better.choice == name and better.headline.startswith(f"Train a {name} regression per site: 30.0 points")
    level = advice(run, {**networks, name: summary(0.6)})
    assert level.choice == "this run" and f"{name} regression per site may be as good" in level.headline
    worse = advice(run, {**baselines(0.6, 0.6), name: summary(0.4)})
    assert worse.choice == "undecided", "to beat a regression is no reason for groups"


def test_the_verdict_names_the_row_it_compares() -> None:
    """Plain one model for all is another row of the table."""
    tuned = summary(0.8, ONE)
    run = {**summary(0.6, ONE), "personalized": {"kept": ["a"], "accuracy": tuned["accuracy"]}}
    found = advice(run, {**baselines(0.6, 0.8), "logistic": summary(0.95)})
    assert "15.0 points" in found.headline
    assert found.headline.endswith("better than one model for all, fine-tuned at home")


@pytest.mark.parametrize(("tuned", "choice"), [((0.8, 0.99, 0.93, 0.9, 0.99, 0.91), "local"), (0.99, "fedavg+ft")])
def test_where_labels_disagree_a_shared_start_must_be_clearly_better(tuned: float | tuple[float, ...], choice: str) -> None:
    found = advice(summary(0.6, ONE), {**baselines(0.6, 0.91), "fedavg+ft": summary(tuned)})
    assert found.choice == choice and "agree on labels" in found.doubts[0]


def test_a_loss_names_the_group_the_sites_and_the_remedy() -> None:
    run = summary((0.9, 0.9, 0.9, 0.5, 0.5, 0.9), GROUPS)
    found = advice(run, baselines(0.6, 0.9))
    (doubt,) = found.doubts
    assert "cluster 1 (d, e, f)" in doubt and "label-aware" in doubt and "data check" in doubt
    assert "d (-40.0 points), e (-40.0 points)" in found.look[0] and "f (" not in found.look[0]


def test_how_sure_says_whose_accuracy_it_is_where_another_training_is_recommended() -> None:
    run, others = summary(0.9, GROUPS), baselines(0.7, 0.8)
    assert dict(in_brief(run, READING, others))["How sure"].startswith("Accuracy")
    assert dict(in_brief(run, READING, {**others, "logistic": summary(0.99)}))["How sure"].startswith("This run's accuracy")


def test_without_baselines_distances_speak_and_nothing_is_certain() -> None:
    assert headline(summary(0.9, ONE), READING).startswith("Train all 6 sites together")
    assert headline(summary(0.9, ALL), READING).startswith("Train every site alone")
    low_power = {**READING, "doubts": ["low power"]}
    for clusters in (ONE, ALL, GROUPS):
        undecided = headline(summary(0.9, clusters), low_power)
        assert undecided.startswith("Undecided") and "more validation samples would decide" in undecided
    assert headline(summary(0.9, ALL), {**READING, "borderline": ["a"]}).endswith("of every site alone would decide")
    topics = [topic for topic, _ in sentences(summary(0.9, ONE), low_power, {})]
    assert topics == ["Trained with", "Doubt"]


def test_without_baselines_validation_losses_say_what_to_do() -> None:
    whole = {"round": 1, "members": SITES, "cells": [SITES[:3], SITES[3:]], "points": 7.6, "pays": True}
    found = headline(summary(0.9, GROUPS), {**READING, "splits": [whole]})
    assert found.startswith("Train in these 2 groups") and "7.6 points" in found
    kept = headline(summary(0.9, ONE), {**READING, "splits": [{**whole, "pays": False}]})
    assert kept.startswith("Train all 6 sites together")
    assert "pay" not in headline(summary(0.9, ONE), {**READING, "splits": []}), "no division was tried"
    late = headline(summary(0.9, GROUPS), {**READING, "splits": [{**whole, "members": SITES[:4]}]})
    assert late.startswith("Train in these 2 groups") and "7.6" not in late, "what some of the clients gain is not what all gain"


def test_groups_of_one_site_each_are_not_told_to_train_as_they_do() -> None:
    """A run that ends with every site alone has shared its first rounds, and may differ from every site alone."""
    better = advice(summary(0.95, ALL), baselines(0.7, 0.8))
    assert better.headline.startswith("Train as in this run, which ends with every site alone: worth 15.0")
    worse = advice(summary(0.6, ALL), baselines(0.5, 0.9))
    assert worse.headline.startswith("Train every site alone from the start: 30.0 points")
    assert worse.look[0].startswith("better off alone: a from the start (-30.0 points)")
    tuned = {**summary(0.5, ALL), "personalized": {"accuracy": summary(0.9)["accuracy"], "kept": list(SITES)}}
    assert not advice(tuned, baselines(0.5, 0.9)).doubts, "no sites of a group differ"
    assert worth_rows(summary(0.9, ALL), {})[0][0] == "6 groups of one site each (emdcfl)"


def test_three_lines_say_what_to_use_where_to_look_and_how_sure() -> None:
    run = summary((0.9, 0.9, 0.9, 0.9, 0.9, 0.6), GROUPS)
    lines = dict(in_brief(run, READING, baselines(0.7, 0.6)))
    assert list(lines) == ["Use", "Look at", "How sure"]
    assert (
        lines["Use"].startswith("Train in these 2 groups") and "f (60.0%)" in lines["Look at"] and "1200 test samples" in lines["How sure"]
    )
    assert "better off alone" in dict(in_brief(run, READING, baselines(0.7, 0.8)))["Look at"].lower()
    few = (0.9, 0.9, 0.9, 0.9, 0.9, 1 / 6)  # 5 right of 6 alone, 1 in its group: of many sites one does so by chance
    assert "alone" not in dict(in_brief(summary(few, GROUPS, n=6), READING, baselines(0.7, 5 / 6, n=6)))["Look at"]
    borderline = dict(in_brief(summary(0.9, GROUPS), {**READING, "borderline": ["c"]}, {}))
    assert "c" in borderline["Look at"] and dict(in_brief(summary(0.9, GROUPS), READING, {}))["Look at"] == "No site stands out."


def test_models_that_nobody_kept_gain_nothing_and_that_is_certain() -> None:
    run = summary(0.8, ONE, n=10)
    told = [in_words({**run, "personalized": {"kept": kept, "gain": 0.0, "accuracy": run["accuracy"]}}) for kept in ([], ["a"])]
    assert [" points (" in said for said in told] == [False, True]


def test_groups_that_only_fine_tuning_saves_are_named() -> None:
    run = {**summary(0.5, ONE), "personalized": {"accuracy": summary(0.9)["accuracy"], "kept": list(SITES)}}
    found = advice(run, baselines(0.5, 0.9))
    assert "before fine-tuning" in found.doubts[0] and "labels" in found.doubts[0]
    assert not advice({**run, "accuracy": summary(0.9)["accuracy"]}, baselines(0.5, 0.9)).doubts


def test_one_group_is_one_model_for_all() -> None:
    run = summary(0.9, ONE)
    assert advice(run, {"fedavg": summary(0.9)}) is None
    assert worth(run, baselines(0.9, 0.8)).endswith("against every site alone") and "one model" not in worth(run, baselines(0.9, 0.8))


def test_after_fine_tuning_the_models_that_clients_use_count() -> None:
    run = {**summary(0.8, GROUPS), "personalized": {"accuracy": summary(0.95)["accuracy"], "kept": ["a"]}}
    others = {**baselines(0.7, 0.8), "fedavg+ft": summary(0.85)}
    found = advice(run, others)
    assert found.choice == "this run"
    assert found.headline.startswith("Train in these 2 groups, fine-tuned at home: worth 10.0 points")
    unkept = advice({**run, "personalized": {**run["personalized"], "kept": []}}, others)
    assert unkept.headline.startswith("Train in these 2 groups: worth")
    assert advice(summary(0.8, GROUPS), others).choice == "fedavg+ft"


def test_a_run_that_was_not_tested_says_nothing() -> None:
    run = summary(0.9, GROUPS, n=0)
    assert run["accuracy"]["mean"] is None and how_sure(run) is None and advice(run, baselines(0.9, 0.8)) is None
    assert headline(run, READING, baselines(0.9, 0.8)) == "2 groups among 6 clients, clearly separated"


def test_summaries_without_scores_of_sites_are_compared_by_their_means() -> None:
    def bare(mean: float, samples: int = 400) -> dict[str, Any]:
        return {"method": "m", "k": 3, "clients": SITES, "clusters": [0, 0, 1, 1, 2, 2], "accuracy": {"mean": mean, "samples": samples}}

    found = advice(bare(0.9), {"fedavg": bare(0.7), "local": bare(0.8)})
    assert found.choice == "this run" and found.look == []
