from __future__ import annotations

from typing import Any

import pytest
import torch

from emdcfl.core.errors import ClientError
from emdcfl.core.schema import SHARED_OUT, Field, all_pass, check, finite

FIELDS = {
    "theta": Field(torch.float32, ("P",)),
    "n": Field(int, low=1),
    "loss": Field(float),
    "table": Field(torch.float32, (None, 2), optional=True),
    "counts": Field(torch.int64, (None,), low=0, optional=True),
    "boxes": Field(bytes, each=True, optional=True),
    "scores": Field(float, low=0, each=True, optional=True),
}
DIMS = {"P": 3}


def reply(**changes: Any) -> dict[str, Any]:
    return {"theta": torch.zeros(3), "n": 1, "loss": 0.5} | changes


@pytest.mark.parametrize(
    "good",
    [
        reply(),
        reply(loss=1),
        reply(table=torch.zeros(5, 2), counts=torch.tensor([0, 3]), boxes={"a": b""}, scores={"a": 0.0, "b": 2}),
        reply(counts=torch.zeros(0, dtype=torch.int64)),
    ],
)
def test_what_a_task_declares_passes(good: dict[str, Any]) -> None:
    check(good, FIELDS, DIMS)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "expected a reply with fields .* got NoneType"),
        ({"theta": torch.zeros(3), "n": 1}, r"expected a reply with fields .*'loss'.* got \['n', 'theta'\]"),
        (reply(extra=1), "got .*'extra'"),
        (reply(theta=torch.zeros(4)), r"expected theta of shape \(3,\), got \(4,\)"),
        (reply(theta=torch.zeros(1, 3)), r"expected theta of shape \(3,\), got \(1, 3\)"),
        (reply(theta=torch.zeros(3, dtype=torch.float64)), "expected theta as torch.float32, got torch.float64"),
        (reply(theta=[0.0, 0.0, 0.0]), "expected theta as torch.float32, got list"),
        (reply(theta=torch.tensor([0.0, torch.nan, 0.0])), "theta holds values that are not finite"),
        (reply(theta=torch.tensor([0.0, torch.inf, 0.0])), "theta holds values that are not finite"),
        (reply(n=0), "expected n >= 1, got 0"),
        (reply(n=1.0), "expected n to be int, got float"),
        (reply(n=True), "expected n to be int, got bool"),
        (reply(loss=float("nan")), "loss is not finite"),
        (reply(loss="0.5"), "expected loss to be float, got str"),
        (reply(table=torch.zeros(5, 3)), r"expected table of shape \('any', 2\), got \(5, 3\)"),
        (reply(counts=torch.tensor([1, -1])), "expected counts >= 0, got -1"),
        (reply(boxes=b""), "expected boxes to map names to values, got bytes"),
        (reply(boxes={1: b""}), "expected boxes to map names to values"),
        (reply(boxes={"a": "text"}), r"expected boxes\[a\] to be bytes, got str"),
        (reply(scores={"a": -0.5}), r"expected scores\[a\] >= 0, got -0.5"),
    ],
)
def test_anything_else_is_refused_with_the_reason(bad: Any, message: str) -> None:
    with pytest.raises(ClientError, match=message) as caught:
        check(bad, FIELDS, DIMS)
    assert "\n" not in str(caught.value)
    always = {name: field for name, field in FIELDS.items() if not field.optional}
    assert all_pass([reply(), reply()], always, DIMS, norm=1.0)
    assert not all_pass([reply(), bad, reply()], always, DIMS, norm=1.0)


def test_among_many_replies_a_long_state_or_a_number_out_of_bounds_is_found() -> None:
    fields = {"theta": Field(torch.float32, ("P",)), "n": Field(int, low=1, high="max_n"), "loss": Field(float, low=-1e-3, high=9.0)}
    dims, rows = {"P": 3, "max_n": 10}, torch.eye(3)
    good = [reply(theta=row, n=10) for row in rows]
    assert all_pass(good, fields, dims, norm=1.0) and all_pass(good[::-1], fields, dims, norm=1.0)
    for changes in ({"theta": 1.1 * rows[1]}, {"n": 11}, {"n": 10**400}, {"loss": 9.1}, {"loss": -0.1}, {"loss": 1}):
        assert not all_pass([good[0], good[1] | changes, good[2]], fields, dims, norm=1.0), changes


BOUNDED = {
    "n": Field(int, low=1, high="max_n"),
    "loss": Field(float, high=1e6),
    "tau": Field(torch.float64, (None,), low=0, high=2, each=True),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 1001}, "expected n <= 1000, got 1001"),
        ({"n": 10**400}, "expected n <= 1000, got a huge integer"),
        ({"loss": 1e7}, r"expected loss <= 1e\+06, got 1e\+07"),
        ({"loss": 10**400}, "loss is not finite"),
        ({"tau": {"a": torch.tensor([0.1, 2.5], dtype=torch.float64)}}, r"expected tau\[a\] <= 2, got 2.5"),
    ],
)
def test_values_have_upper_bounds_too(changes: dict[str, Any], message: str) -> None:
    good = {"n": 1000, "loss": 3, "tau": {"a": torch.tensor([0.0, 2.0], dtype=torch.float64)}}
    check(good, BOUNDED, {"max_n": 1000})
    with pytest.raises(ClientError, match=message):
        check({**good, **changes}, BOUNDED, {"max_n": 1000})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, SHARED_OUT - 1, SHARED_OUT + 1])
def test_one_number_that_is_not_finite_is_found_and_a_sum_that_overflows_is_not_taken_for_it(dtype: torch.dtype, size: int) -> None:
    largest = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
    assert finite(largest) and finite(torch.zeros(0, dtype=dtype))
    for value in (torch.nan, torch.inf, -torch.inf):
        for base in (largest, torch.zeros_like(largest)):
            wrong = base.clone()
            wrong[size // 2] = value
            assert not finite(wrong)
