"""A thousand lying clients over all methods: every run ends, and no honest client is blamed or left without a model."""

from __future__ import annotations

import os

import pytest
from tests.trust.random_lies import check_case

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not os.environ.get("EMDCFL_FAULTS"), reason="takes some minutes; run 'make test-faults'"),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("hundred", range(10))
def test_no_honest_client_is_excluded(hundred: int) -> None:
    told = [bool(check_case(number).told) for number in range(100 * hundred, 100 * hundred + 100)]
    assert sum(told) > 90
