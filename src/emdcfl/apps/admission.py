"""How a node is admitted by the SuperLink: what Flower's client does not do, or does not say.

A node that is killed is not deactivated, and the SuperLink would refuse the next process with its key for about a minute. That process
therefore deactivates it first. It may: it holds the key, and the lock on the node's folder says that the one before it has ended.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("emdcfl")

BOOT = Path("/proc/sys/kernel/random/boot_id")


def take_place(client: Any, place: IO[str]) -> None:
    """Let a class of Flower's clients that is refused first deactivate the node of a process that was killed since the machine booted."""
    import httpx
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest

    activate, boot = client.ActivateNode, ""
    with contextlib.suppress(OSError):
        boot = BOOT.read_text(encoding="ascii").strip()

    def activate_node(self: Any, request: Any) -> Any:
        try:
            answer = activate(self, request)
        except httpx.HTTPStatusError:
            place.seek(0)
            number, _, where = place.read().partition(" ")
            if not boot or where != boot:  # a copy of the folder: the node may be served elsewhere
                raise
            with contextlib.suppress(httpx.HTTPStatusError):
                self.DeactivateNode(DeactivateNodeRequest(node_id=int(number)))
            answer = activate(self, request)
        with contextlib.suppress(OSError):  # the disk is full: the next process is refused for a minute
            place.truncate(0)
            place.write(f"{answer.node_id} {boot}")
            place.flush()
        return answer

    client.ActivateNode = activate_node


def explain_refusals(client: Any, superlink: str) -> None:
    """Let a class of Flower's clients say in the node's log why it cannot connect: Flower itself only counts tries, or ends."""
    import httpx

    def explained(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def ask(self: Any, request: Any) -> Any:
            try:
                return call(self, request)
            except httpx.HTTPError as error:
                log.warning("%s", refusal(error, superlink, time.time()))
                raise

        return ask

    for name in ("ActivateNode", "PullMessages"):  # the first thing a node says, and what it says every few seconds
        setattr(client, name, explained(getattr(client, name)))


def refusal(error: httpx.HTTPError, superlink: str, now: float) -> str:
    """Say in one line why the SuperLink cannot be reached or refuses this node, and what to do about it; ``now`` is this machine's time."""
    import httpx

    if not isinstance(error, httpx.HTTPStatusError):
        hint = (
            "compare ca.crt with the operator's, and the name in it"
            if "CERTIFICATE" in str(error)
            else "is it up, and does a firewall pass it?"
        )
        return f"no connection to the SuperLink at {superlink} (superlink in node.toml): {str(error) or type(error).__name__}; {hint}"
    status = error.response.status_code
    if status == httpx.codes.UNAUTHORIZED:
        with contextlib.suppress(KeyError, ValueError, TypeError):
            ahead = now - parsedate_to_datetime(error.response.headers["date"]).timestamp()
            if not -300 < ahead < 4:  # what the SuperLink takes; its own time comes in whole seconds
                off = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the SuperLink's"
                return f"the SuperLink refused this node's signature: this clock is {off}; set it right (NTP)"
        return "the SuperLink refused this node's signature: its key was removed or replaced; ask the operator to enrol auth.pub"
    if status == httpx.codes.PRECONDITION_FAILED:
        return (
            "the SuperLink does not take this node's key: the operator has not enrolled auth.pub, or the node was killed less than a "
            "minute ago on another machine; ask the operator, or try again in a minute"
        )
    return f"the SuperLink at {superlink} answered {status}; its log says why"
