"""A sample of the thousand lies that ``make test-faults`` tells: one per method."""

from __future__ import annotations

import pytest
from tests.trust.random_lies import check_case

from emdcfl.methods import METHODS


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", range(len(METHODS)))
def test_whatever_one_client_says_nobody_honest_is_excluded(number: int) -> None:
    assert check_case(number).told
