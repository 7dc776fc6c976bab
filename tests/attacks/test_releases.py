"""A server has one sample embedded under many models to learn the projection R: a node answers few, and counts on disk."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from safetensors import SafetensorError
from tests.attacks.hostile import HostileServer, digits_job, settings
from tests.attacks.test_policy import omega
from torch import Tensor

from emdcfl.core.keys import NodeSecret
from emdcfl.engines.flower.node.home import HomeNode
from emdcfl.engines.flower.node.policy import PolicyError
from emdcfl.engines.flower.node.releases import Releases
from emdcfl.privacy.exchange import announced_key, seal

KEY = announced_key(NodeSecret(b"p" * 32), NodeSecret(b"q" * 32))


def other(number: int) -> Tensor:
    """Another model, which nothing distinguishes from an honest one."""
    return omega() * (1 + number / 100)


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
    assert "reply" in reference(server, other(0))
    assert "policy.models_per_round" in str(reference(server, other(1))["failure"])
    assert "reply" in reference(server, other(0)), "a lost reply is asked for again"


@pytest.mark.slow
def test_many_rounds_show_few_rows_of_r(server: HostileServer) -> None:
    rows = [reference(server, other(i), round=i) for i in range(40)]
    assert sum("reply" in said for said in rows) == 16
    assert "policy.models_per_run" in str(rows[-1]["failure"])


def test_another_seed_or_setting_counts_as_another_release(server: HostileServer) -> None:
    assert "reply" in reference(server, omega())
    assert "failure" in reference(server, omega(), seed=1)


@pytest.mark.parametrize("changed", [{"precision": "fp32 "}, {"preprocess": {**digits_job()["preprocess"], "scale": 0.9}}, {"more": 1}])
def test_another_job_counts_as_another_release(server: HostileServer, changed: dict[str, Any]) -> None:
    """The name of a precision alone would change the noise of every record: many answers would average it out."""
    inputs = {"omega": omega(), "partners": {}, "sizes": [16], "settings": settings()}
    assert "reply" in server.ask("reference", **inputs)
    assert "policy.models_per_round" in server.refused("reference", job=changed, **inputs)
    assert "reply" in server.ask("reference", job={"threads": 2}, **inputs)


@pytest.mark.parametrize("kinds", [(torch.float32, torch.int32), (torch.float16, torch.int16)])
def test_the_same_bytes_as_another_type_are_no_second_model(server: HostileServer, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """It would be counted as the first, and get the same noise: the difference of the two answers would have none."""
    model, how = omega().to(kinds[0]), settings(privacy_epsilon=8.0)
    said = [server.ask("reference", omega=model.view(kind), partners={}, sizes=[16], settings=how) for kind in kinds]
    assert ["reply" in one for one in said] == [kinds[0] is torch.float32, False]


def test_another_run_key_of_a_partner_counts_as_another_release(server: HostileServer) -> None:
    keys = [announced_key(NodeSecret(b"p" * 32), NodeSecret(bytes([i]) * 32)) for i in range(2)]
    inputs = {"sizes": [16], "settings": settings(projection="pair"), "omega": omega()}
    assert ["reply" in server.ask("reference", partners={"row": key}, **inputs) for key in (*keys, keys[0])] == [True, False, True]
    column = {
        "rows": ["row"],
        "omegas": {"row": omega()},
        "boxes": {},
        "size": 16,
        "held_out": True,
        "settings": settings(projection="pair"),
    }
    assert ["reply" in server.ask("project", keys={"row": key}, **column) for key in (*keys, keys[0])] == [True, False, True]


def test_runs_are_counted_one_by_one(server: HostileServer) -> None:
    assert "reply" in reference(server, omega())
    assert "reply" in reference(server, other(0), run="second")
    assert "failure" in reference(server, other(1), run="second")


@pytest.mark.slow
def test_many_models_in_the_name_of_one_partner_are_refused(server: HostileServer) -> None:
    now = [project(server, "site-1", other(i)) for i in range(3)]
    assert ["reply" in said for said in now] == [True, False, False]
    later = [project(server, "site-1", other(i), round=i) for i in range(2, 20)]
    assert sum("reply" in said for said in later) == 15


def test_many_partners_in_one_round_are_refused(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='trust = "relay"\n[policy]\npartners_per_round = 3')
    said = [project(server, f"site-{i}", omega()) for i in range(5)]
    assert ["reply" in answer for answer in said] == [True, True, True, False, False]
    assert "policy.partners_per_round" in str(said[-1]["failure"])


def test_a_damaged_count_refuses_instead_of_starting_anew(server: HostileServer) -> None:
    assert "reply" in reference(server, omega())
    for file in ("*/releases.json", "released.json"):
        (count,) = (server.home / "state").glob(file)
        before = count.read_text()
        count.write_text("[1")
        assert count.name in str(reference(server, omega())["failure"])
        count.write_text(before)
    assert "reply" in reference(server, omega())


def test_run_names_that_look_like_paths_stay_in_the_state_folder(server: HostileServer) -> None:
    reference(server, omega(), run="../../outside")
    assert not list(server.home.parent.glob("outside*"))


def test_more_runs_than_allowed_are_refused_across_restarts(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='trust = "relay"\n[policy]\nruns = 2')
    assert ["reply" in server.ask("describe", job={"run": run}) for run in ("a", "b", "a", "c", "d", "b")] == [
        True,
        True,
        True,
        False,
        False,
        True,
    ]
    assert "policy.runs " in server.refused("describe", job={"run": "c"})


def test_only_enrolled_runs_are_answered_where_the_owner_names_them(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='[policy]\nrun_names = ["study"]')
    assert "reply" in server.ask("describe", job={"run": "study"})
    assert "policy.run_names" in server.refused("describe", job={"run": "another"})


def test_models_in_all_runs_and_requests_of_a_run_are_limited(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='trust = "relay"\n[policy]\nmodels_in_all = 2\nrequests_per_run = 3')
    assert ["reply" in reference(server, omega(), run=f"run {i}") for i in range(3)] == [True, True, False]
    assert "policy.models_in_all" in str(reference(server, omega(), run="run 3")["failure"])
    assert ["reply" in server.ask("describe", job={"run": "run 0"}) for _ in range(3)] == [True, True, False]
    assert "policy.requests_per_run" in server.refused("describe", job={"run": "run 0"})


def test_a_run_that_nobody_used_for_long_is_over_and_its_key_is_gone(server: HostileServer) -> None:
    assert "reply" in reference(server, omega())
    (key,) = (server.home / "state").glob("*/run.key")
    assert key.stat().st_mode & 0o077 == 0
    old = time.time() - 31 * 86400
    os.utime(key, (old, old))
    assert "reply" in server.ask("describe", job={"run": "another"})
    assert not key.exists()
    assert "this run is over" in str(reference(server, omega())["failure"]), "else the same samples would be sent under another R"


def test_a_node_whose_disk_was_full_takes_part_in_the_run_when_it_is_repaired(server: HostileServer) -> None:
    """The key of a run that was written by half, or not at all, would be refused until somebody deletes it."""
    server.ask("describe", job={"run": "before"})
    for where, error in (("os.urandom", OSError(28, "full")), (f"{HomeNode.__module__}.HomeNode.keep", SafetensorError("I/O error"))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, Mock(side_effect=error))
            assert "cannot read or write its files" in server.refused("describe")
        assert "reply" in server.ask("describe")


def test_another_projection_of_a_partner_in_a_run_is_refused(server: HostileServer) -> None:
    """A partner that sides with the server seals seed after seed: each would draw the noise of the same embeddings anew."""
    node, session = NodeSecret(b"p" * 32), NodeSecret(b"q" * 32)
    key = server.ask("describe")["reply"]["key"]
    rows = {"omegas": {"row": omega()}, "keys": {"row": KEY}, "size": 16, "held_out": True, "settings": settings(privacy_epsilon=64.0)}
    said = []
    for seed in (b"a" * 32, b"b" * 32, b"a" * 32):
        box = seal(node, key, seed, context=("run", "row", server.name), session=session)
        said.append(server.ask("project", rows=["row"], boxes={"row": box}, **rows)["reply"])
    assert [list(reply["samples"]) for reply in said] == [["row"], [], ["row"]]
    assert "one projection in a run" in said[1]["refused"]["row"]
    assert said[0]["samples"]["row"].equal(said[2]["samples"]["row"]), "another box of the same seed, as after a lost reply"
    rows["keys"], session = {"row": announced_key(node, NodeSecret(b"n" * 32))}, NodeSecret(b"n" * 32)  # it lost the key of the run
    box = seal(node, key, b"c" * 32, context=("run", "row", server.name), session=session)
    assert "models of client 'row' in round 1" in server.refused("project", rows=["row"], boxes={"row": box}, **rows), "it is counted"
    assert "row" in server.ask("project", round=2, rows=["row"], boxes={"row": box}, **rows)["reply"]["samples"]


def test_two_requests_at_the_same_time_keep_the_projections_of_both(tmp_path: Path) -> None:
    """Each read what was known before the other wrote; a seed that is forgotten could be exchanged."""
    one, two = (Releases(tmp_path, "run") for _ in range(2))
    one.session()  # the run is known
    seen = [releases.projections() for releases in (one, two)]
    one.keep_projections({**seen[0], "a": "seed of a"})
    two.keep_projections({**seen[1], "b": "seed of b"})
    assert one.projections() == {"a": "seed of a", "b": "seed of b"}
    with pytest.raises(PolicyError, match="one projection in a run"):
        two.keep_projections({"a": "another seed"})
    assert one.projections() == {"a": "seed of a", "b": "seed of b"}
