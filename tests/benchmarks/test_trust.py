"""What a backdoor does to its targets, on points instead of images."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.tiny import tiny

from benchmarks import trust


@pytest.mark.parametrize(("kind", "ari", "isolated"), [("fedavg", None, None), ("oracle", 1.0, True)])
def test_a_backdoor_is_scored_with_and_without_groups(
    monkeypatch: pytest.MonkeyPatch, kind: str, ari: float | None, isolated: bool | None
) -> None:
    def build(name: str, **options: Any) -> Any:
        whole = tiny()
        sites = tuple(replace(s, tests={"clean": s.tests["test"], "backdoor": s.tests["test"]}) for s in whole.sites)
        return replace(whole, sites=sites, groups={s.name: "target" if i < 2 else "attacker" for i, s in enumerate(sites)})

    monkeypatch.setattr(trust.scenarios, "build", build)
    options = SimpleNamespace(scale="small", epochs=1, rounds=1, tolerance="auto", device="cpu", precision="fp32")
    found = trust.backdoor(kind, "", 0, options)
    assert (found["ari"], found["isolated"]) == (ari, isolated) and found["clean"] == found["backdoor"] > 0
