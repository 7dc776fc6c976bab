"""A Flower grid in this process: the same ``ClientApp`` objects, the same serialised messages, no network.

``TaskIdentity`` is Flower's own record of which task a process runs; in a deployment Flower fills it in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PullObjectResponse
from flwr.proto.node_pb2 import Node, NodeInfo
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

import emdcfl.methods  # noqa: F401  registers the tasks that methods bring
from emdcfl.core.client import Client
from emdcfl.core.keys import NodeSecret, global_seed
from emdcfl.core.params import Network
from emdcfl.data.types import Scenario
from emdcfl.engines.flower.connected import ConnectedNodes
from emdcfl.engines.flower.federation import FlowerFederation
from emdcfl.engines.flower.messages import MessageSettings, Messenger
from emdcfl.engines.flower.node.policy import Policy
from emdcfl.engines.flower.node.serve import make_app
from emdcfl.engines.local.sequential import simulated_clients
from emdcfl.privacy.keylist import KeyList

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

RUN = "run"
QUICK = MessageSettings(deadline=5.0, poll=0.001, wait=0.0, check_interval=0.01, grace=0.05)


@dataclass
class MemoryNode:
    """A node whose client lives in this process."""

    held: Client
    partners: KeyList = field(default_factory=lambda: KeyList(trust="relay"))
    details: bool = True
    policy: Policy | None = None
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or self.held.name

    @property
    def secret(self) -> NodeSecret:
        return self.held.secret

    def permit(self, task: str, round: int, job: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        if self.policy is not None:
            self.policy.check(task, job, inputs)

    def client(self, job: Mapping[str, Any]) -> Client:
        return self.held

    def keep(self, client: Client) -> None:
        """Nothing to do: the client stays in memory."""

    def note(self, kind: str, request: Any, answer: Mapping[str, Any], *, refused: bool) -> None:
        """Nobody reads it."""


Handle = Callable[[Message, Callable[[Message], Message]], Message | None]


class LoopbackLink:
    """Gives out replies as the SuperLink does: each once, then its parts. A part whose content is empty has not arrived."""

    def __init__(self, replies: dict[str, Message]) -> None:
        self.replies = replies
        self.parts: dict[str, bytes] = {}

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        found = [self.replies.pop(i) for i in request.message_ids if i in self.replies]
        for reply in found:
            reply.metadata.__dict__["_message_id"] = reply.object_id
            self.parts |= {identity: part.deflate() for identity, part in get_all_nested_objects(reply).items()}
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(reply) for reply in found], message_object_trees=[get_object_tree(reply) for reply in found]
        )

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        content = self.parts.get(request.object_id)
        return PullObjectResponse(object_found=content is not None, object_available=bool(content), object_content=content)

    def ConfirmMessageReceived(self, request: ConfirmMessageReceivedRequest) -> None:
        """Nothing is deleted here."""


class LoopbackGrid(Grid):
    """Nodes by id. ``tamper[node id](message, answer)`` may answer in the node's place, or return ``None`` for never."""

    def __init__(self, nodes: Mapping[int, MemoryNode]) -> None:
        self.nodes = dict(nodes)
        self.online = set(nodes)
        self.since: dict[int, str] = {}
        self.tamper: dict[int, Handle] = {}
        self.log: list[tuple[Message, Message | None]] = []
        self._apps: dict[int, ClientApp] = {}
        self._replies: dict[str, Message] = {}
        self._count = 0
        self._run, self.node, self._runtime_client = SimpleNamespace(run_id=1), Node(node_id=1), LoopbackLink(self._replies)

    def set_run(self, run: Any) -> None:
        """Not used."""

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.online)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, last_activated_at=self.since.get(node, "")) for node in self.get_node_ids()]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node not in self._apps:
            self._apps[node] = make_app(lambda context: self.nodes[context.node_id])
        context = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
        try:
            return self._apps[node](_copy(message), context)
        except Exception as error:  # as Flower does
            return Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identities = []
        for message in messages:
            self._count += 1
            identity = f"message-{self._count}"
            message.metadata.__dict__["_message_id"] = identity
            node = message.metadata.dst_node_id
            if node not in self.online:
                reply: Message | None = Message(Error(code=5, reason="node unavailable"), reply_to=message)
            elif node in self.tamper:
                reply = self.tamper[node](message, self._answer)
            else:
                reply = self._answer(message)
            self.log.append((message, reply))
            if reply is not None:
                self._replies[identity] = reply
            identities.append(identity)
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return HttpGrid.pull_messages(self, message_ids)  # type: ignore[arg-type]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def _copy(message: Message) -> Message:
    """Through Flower's own bytes and back."""
    return message_from_proto(type(message_to_proto(message)).FromString(message_to_proto(message).SerializeToString()))


def job(scenario: Scenario, *, seed: int = 0) -> dict[str, Any]:
    return {
        "run": RUN,
        "seed": seed,
        "precision": "fp32",
        "threads": 1,
        "model": scenario.model.as_dict(),
        "preprocess": scenario.preprocess.as_dict(),
        "data": {"scenario": scenario.name, "options": {}},
    }


def loopback(scenario: Scenario, *, seed: int = 0) -> LoopbackGrid:
    """One node per client, each with a network of its own and the simulation's secret."""
    nodes = {}
    for i, site in enumerate(scenario.sites):
        with global_seed(0):
            network = Network(scenario.model)
        nodes[100 + i] = MemoryNode(simulated_clients(scenario, [site.name], network, seed=seed, run=RUN, precision="fp32")[site.name])
    return LoopbackGrid(nodes)


def federation(
    scenario: Scenario, grid: LoopbackGrid | None = None, *, settings: MessageSettings = QUICK, keys: KeyList | None = None, **options: Any
) -> FlowerFederation:
    grid = loopback(scenario, seed=options.get("seed", 0)) if grid is None else grid
    clients = [site.name for site in scenario.sites]
    connected = ConnectedNodes(Messenger(grid, settings), keys or KeyList())
    about = {"job": job(scenario, seed=options.get("seed", 0)), "truth": scenario.groups, "k": scenario.k, **options}
    return FlowerFederation(connected, clients, scenario.model, **about)


def bytes_of_run(
    *, clients: int, parameters: int, embedding: int, width: int, train: int, validation: int, rounds: int, tests: int
) -> tuple[int, int]:
    """Bytes sent and received in a run of EMD-CFL in which everybody takes part: the formula of ``docs/deploy.md``."""
    sent = (rounds + tests) * parameters + embedding + (clients - 1) * embedding
    received = rounds * parameters + train * width + (clients - 1) * validation * width
    return 4 * clients * sent, 4 * clients * received
