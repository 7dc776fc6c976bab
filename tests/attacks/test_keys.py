"""A server hands a node keys of its own, to open what the node seals for its partners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.attacks.hostile import HostileServer, settings
from tests.attacks.test_policy import omega

from emdcfl.core.keys import NodeSecret
from emdcfl.engines.flower.node.home import NodeConfig
from emdcfl.privacy.exchange import announced_key, fingerprint, node_key

RUN = NodeSecret(b"r" * 32)
GENUINE, FORGED = (announced_key(NodeSecret(letter * 32), RUN) for letter in (b"g", b"f"))
ENROLLING = 'trust = "first-use"\nenrol = true'
CLOSED = 'trust = "first-use"'


def reference(server: HostileServer, partners: Any) -> dict[str, Any]:
    return server.ask("reference", omega=omega(), partners=partners, sizes=[16], settings=settings())


def served(said: dict[str, Any], partner: str = "partner") -> bool:
    return partner in said.get("reply", {}).get("boxes", {})


def test_the_default_trusts_no_key_that_people_did_not_compare(tmp_path: Path) -> None:
    assert NodeConfig().trust == "pinned"
    server = HostileServer(tmp_path / "home")
    assert "no key is pinned" in reference(server, {"invented": FORGED})["failure"]
    (tmp_path / "home" / "partners.toml").write_text(f'partner = "{fingerprint(node_key(GENUINE))}"')
    assert served(reference(server, {"partner": GENUINE}))
    assert "reply" not in reference(server, {"partner": FORGED})


def test_an_invented_partner_is_refused_after_enrolment(tmp_path: Path) -> None:
    assert served(reference(HostileServer(tmp_path / "home", toml=ENROLLING), {"partner": GENUINE}))
    closed = HostileServer(tmp_path / "home", toml=CLOSED)
    assert served(reference(closed, {"partner": GENUINE}))
    both = reference(closed, {"partner": GENUINE, "invented": FORGED})
    assert served(both) and not served(both, "invented") and "no key is pinned" in both["reply"]["refused"]["invented"]
    assert "invented" not in (tmp_path / "home" / "partners.toml").read_text()


def test_first_use_without_enrolment_accepts_nobody(tmp_path: Path) -> None:
    assert "reply" not in reference(HostileServer(tmp_path / "home", toml=CLOSED), {"partner": GENUINE})


def test_a_swapped_key_is_refused_during_enrolment(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml=ENROLLING)
    assert served(reference(server, {"partner": GENUINE}))
    assert "reply" not in reference(server, {"partner": FORGED})


@pytest.mark.parametrize("partners", [{"partner": "text"}, {"partner": GENUINE, "other": None}, {"rot0-1": FORGED}, [GENUINE], None])
def test_one_entry_that_is_no_key_or_the_nodes_own_name_does_not_skip_the_check(tmp_path: Path, partners: Any) -> None:
    assert "reply" not in reference(HostileServer(tmp_path / "home", toml=ENROLLING), partners)
