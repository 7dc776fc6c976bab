from __future__ import annotations

from emdcfl.trust import Ledger


def test_faults_count_by_round_and_end_in_a_ban() -> None:
    ledger = Ledger(max_faults=3)
    for index in (1, 1, 2):  # the first round is repeated
        ledger.begin(index)
        assert ledger.exclusion_reason("a") is None
        ledger.fault("a", "train", f"NaN in round {index}")
        ledger.fault("a", "test", "and again")
        assert ledger.exclusion_reason("a") == f"quarantined for this round: NaN in round {index}"
    assert not ledger.banned("a") and ledger.exclusion_reason("b") is None
    ledger.begin(5)
    ledger.fault("a", "describe", "wrong type")
    assert ledger.banned("a")
    ledger.begin(6)
    reason = ledger.exclusion_reason("a")
    assert reason is not None and "for the run" in reason and "wrong type" in reason
    listed = [(q["client"], q["round"], q["task"], q["reason"], q["for"]) for q in ledger.quarantined()]
    assert listed == [
        ("a", 1, "train", "NaN in round 1", "round"),
        ("a", 2, "train", "NaN in round 2", "round"),
        ("a", 5, "describe", "wrong type", "run"),
    ]


def test_flags_are_kept_by_client_and_kind() -> None:
    ledger = Ledger(max_faults=3)
    for index, value in ((2, 5.0), (2, 5.0), (3, 9.0), (7, 4.0)):
        ledger.begin(index)
        ledger.flag("a", "update norm", value, 1.0)
    (flag,) = ledger.flagged()
    assert flag == {"client": "a", "what": "update norm", "first": 2, "last": 7, "times": 3, "value": 9.0, "typical": 1.0}


def test_what_is_stored_goes_on_as_if_nothing_had_happened() -> None:
    ledger = Ledger(max_faults=2)
    ledger.begin(1)
    ledger.fault("a", "train", "NaN")
    ledger.flag("b", "variance", 3.0, 0.1)
    again = Ledger(max_faults=2)
    again.restore(ledger.as_dict())
    assert again.as_dict() == ledger.as_dict()
    again.begin(1)  # the round that was killed is played again
    again.fault("a", "train", "NaN")
    assert not again.banned("a")
    again.begin(2)
    again.fault("a", "train", "NaN")
    assert again.banned("a")
    Ledger(max_faults=2).restore({})
