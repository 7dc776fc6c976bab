"""How a node is admitted by the SuperLink, and what it says where it is not."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

import httpx

from emdcfl.apps import admission, supernode
from emdcfl.core.errors import ConfigError


def test_a_node_is_served_once_and_takes_the_place_of_one_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on the machine where that one ran: elsewhere a copy of the folder would push out a node that lives."""
    from flwr.proto.fleet_pb2 import ActivateNodeResponse

    online: set[int] = set()

    def start() -> int:
        class Client:
            def ActivateNode(self, request: Any) -> Any:
                if 7 in online:
                    refused = httpx.Request("POST", "https://link/v1")
                    raise httpx.HTTPStatusError("no", request=refused, response=httpx.Response(400, request=refused))
                online.add(7)
                return ActivateNodeResponse(node_id=7)

            def DeactivateNode(self, request: Any) -> None:
                online.remove(request.node_id)

        with supernode._lock(tmp_path) as place:
            with pytest.raises(ConfigError, match="another process serves this node"):
                supernode._lock(tmp_path)
            admission.take_place(Client, place)
            return int(Client().ActivateNode(None).node_id)

    online.add(7)
    with pytest.raises(httpx.HTTPStatusError):
        start()
    online.clear()
    assert [start(), start()] == [7, 7], "the second in the place of the first"
    (tmp_path / "boot").write_text("another machine")
    monkeypatch.setattr(admission, "BOOT", tmp_path / "boot")
    with pytest.raises(httpx.HTTPStatusError):
        start()


def answered(status: int, date: str | None = None) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://link/v1")
    return httpx.HTTPStatusError(
        "no", request=request, response=httpx.Response(status, request=request, headers={"date": date} if date else {})
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (httpx.ConnectError("[Errno 111] Connection refused"), "fl.example.org:8000.*Connection refused"),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] unable to get local issuer certificate"), "ca.crt"),
        (answered(401, "Thu, 19 Nov 2026 16:00:10 GMT"), "3590 s ahead of"),
        (answered(401, "Thu, 19 Nov 2026 18:00:00 GMT"), "3600 s behind"),
        (answered(401, "Thu, 19 Nov 2026 17:00:00 GMT"), "enrol auth.pub"),
        (answered(401), "enrol auth.pub"),
        (answered(412), "has not enrolled auth.pub"),
        (answered(503), "503"),
    ],
)
def test_a_node_says_why_it_cannot_connect(error: httpx.HTTPError, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    class Client:
        def ActivateNode(self, request: Any) -> Any:
            raise error

        PullMessages = ActivateNode

    admission.explain_refusals(Client, "fl.example.org:8000")
    with pytest.raises(httpx.HTTPError):
        Client().ActivateNode(None)
    assert len(caplog.messages) == 1
    moment = datetime(2026, 11, 19, 17, tzinfo=UTC).timestamp()
    assert re.search(expected, admission.refusal(error, "fl.example.org:8000", moment))
