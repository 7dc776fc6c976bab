"""A server has one sample embedded under many models to learn the projection R: a node answers few, and counts on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.attacks.hostile import HostileServer, settings
from tests.attacks.test_policy import omega
from torch import Tensor

from emdcfl.core.keys import NodeSecret
from emdcfl.privacy.exchange import public_key

KEY = public_key(NodeSecret(b"p" * 32))


def one_bias(where: int) -> Tensor:
    """Zero but for one bias of the embedding layer: every embedding is then one unit vector, and its projection a row of R."""
    crafted = torch.zeros_like(omega())
    crafted[-1 - where] = 1
    return crafted


@pytest.fixture
def server(tmp_path: Path) -> HostileServer:
    return HostileServer(tmp_path / "home", toml='trust = "relay"')


def reference(server: HostileServer, model: Tensor, *, round: int = 1, run: str = "run", seed: int = 0) -> dict[str, object]:
    job = {"run": run, "seed": seed}
    return server.ask("reference", round=round, job=job, omega=model, partners={}, sizes=[16], settings=settings())


def project(server: HostileServer, row: str, model: Tensor, *, round: int = 1) -> dict[str, object]:
    inputs = {"boxes": {}, "size": 16, "held_out": True, "settings": settings(projection="pair")}
    return server.ask("project", round=round, rows=[row], omegas={row: model}, keys={row: KEY}, **inputs)


def test_a_second_model_in_one_round_is_refused_and_the_first_may_be_asked_again(server: HostileServer) -> None:
    assert "reply" in reference(server, one_bias(0))
    assert "policy.models_per_round" in str(reference(server, one_bias(1))["failure"])
    assert "reply" in reference(server, one_bias(0)), "a lost reply is asked for again"


@pytest.mark.slow
def test_many_rounds_show_few_rows_of_r(server: HostileServer) -> None:
    rows = [reference(server, one_bias(i), round=i) for i in range(40)]
    assert sum("reply" in said for said in rows) == 16
    assert "policy.models_per_run" in str(rows[-1]["failure"])


def test_another_seed_or_setting_counts_as_another_release(server: HostileServer) -> None:
    assert "reply" in reference(server, omega())
    assert "failure" in reference(server, omega(), seed=1)


def test_runs_are_counted_one_by_one(server: HostileServer) -> None:
    assert "reply" in reference(server, omega())
    assert "reply" in reference(server, one_bias(0), run="second")
    assert "failure" in reference(server, one_bias(1), run="second")


@pytest.mark.slow
def test_many_models_in_the_name_of_one_partner_are_refused(server: HostileServer) -> None:
    now = [project(server, "site-1", one_bias(i)) for i in range(3)]
    assert ["reply" in said for said in now] == [True, False, False]
    later = [project(server, "site-1", one_bias(i), round=i) for i in range(2, 20)]
    assert sum("reply" in said for said in later) == 15


def test_many_partners_in_one_round_are_refused(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='trust = "relay"\n[policy]\npartners_per_round = 3')
    said = [project(server, f"site-{i}", omega()) for i in range(5)]
    assert ["reply" in answer for answer in said] == [True, True, True, False, False]
    assert "policy.partners_per_round" in str(said[-1]["failure"])


def test_a_damaged_count_refuses_instead_of_starting_anew(server: HostileServer) -> None:
    assert "reply" in reference(server, omega())
    (count,) = (server.home / "state").glob("*/releases.json")
    count.write_text("[1")
    assert "releases.json" in str(reference(server, omega())["failure"])


def test_run_names_that_look_like_paths_stay_in_the_state_folder(server: HostileServer) -> None:
    reference(server, omega(), run="../../outside")
    assert not list(server.home.parent.glob("outside*"))
