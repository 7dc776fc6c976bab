"""Requests to a node: whatever a server asks, the node answers with a reply or a refusal, and never sends what its policy keeps back."""

from __future__ import annotations

import logging
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import emdcfl.methods  # noqa: F401  registers the tasks that methods bring
from emdcfl.core.client import Client
from emdcfl.core.errors import EmdcflError
from emdcfl.core.keys import NodeSecret, global_seed
from emdcfl.core.params import Network
from emdcfl.core.tasks import Training
from emdcfl.data import scenarios
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.node import log as node_log
from emdcfl.engines.flower.node.policy import Policy
from emdcfl.engines.flower.node.serve import make_app
from emdcfl.methods.emdcfl.settings import CompareSettings, Options
from emdcfl.models import BUILDERS
from emdcfl.privacy.exchange import public_key, seal
from emdcfl.privacy.keylist import KeyList
from fuzz.feed import Feed, any_value, changed_value

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # filled in by Flower in a deployment

TASKS = (
    *("train", "evaluate", "test", "describe", "reference", "project", "embed", "deposit", "data_subspace", "soft_train", "personalize"),
    *("loss_moments", "recalibrate"),
)
NAME, PARTNER = "rot0-1", "rot90-1"
MAX_NUMBER = 64
"""Most samples or epochs in a request that is run; larger ones only cost time."""


class OneNode:
    """A node with a default policy, its client in memory."""

    def __init__(self) -> None:
        logging.getLogger("emdcfl").setLevel(logging.CRITICAL)
        torch.set_num_threads(1)
        self.scenario = scenarios.build("rotated-digits", groups=2)
        with global_seed(0):
            network = Network(self.scenario.model)
        self.theta = network.theta.clone()
        site = next(site for site in self.scenario.sites if site.name == NAME)
        self.name, self.secret, self.details = NAME, NodeSecret.simulated(0, NAME), True
        self.held = Client(site, network, self.scenario.preprocess, seed=0, secret=self.secret)
        self.partners, self.policy = KeyList(trust="relay"), Policy()
        self.permitted: tuple[str, Any] | None = None
        self.place = Path(tempfile.mkdtemp(prefix="fuzz-"))

    def permit(self, task: str, round: int, job: Any, inputs: Any) -> None:
        self.permitted = None
        self.policy.check(task, job, inputs)
        self.permitted = (task, inputs)
        if any(isinstance(v, int) and v > MAX_NUMBER for part in ("training", "settings") for v in _numbers(inputs, part)):
            raise ValueError("too much work for a fuzzer")

    def note(self, kind: str, request: Any, answer: Any, *, refused: bool) -> None:
        node_log.note(self.place, kind, request, answer, refused=refused)
        for file in self.place.iterdir():
            file.unlink()

    def client(self, job: Any) -> Client:
        return self.held

    def keep(self, client: Client) -> None:
        """Nothing to do."""


def _numbers(inputs: Any, part: str) -> list[Any]:
    value = inputs.get(part) if isinstance(inputs, dict) else None
    return list(value.values()) if isinstance(value, dict) else []


@cache
def node() -> tuple[OneNode, Any, dict[str, dict[str, Any]]]:
    """Return the node, its app, and an honest request for every task."""
    here = OneNode()
    settings = {**CompareSettings.of(Options()).as_dict(), "match_classes": False, "max_samples": 32}
    training = Training(local_epochs=1, batch_size=32).as_dict()
    theta, models = here.theta, torch.stack([here.theta, here.theta])
    omega = theta[here.held.network.layout.embedding]
    partner = NodeSecret.simulated(0, PARTNER)
    key, own = public_key(partner), public_key(here.secret)
    box = seal(partner, own, bytes(range(32)), context=("run", PARTNER, NAME))
    offer = seal(partner, own, np.full(10, 4, "<u4").tobytes(), context=("run", PARTNER, NAME, "offer"))
    asked: dict[str, dict[str, Any]] = {
        "train": {"theta": theta, "training": training},
        "personalize": {"models": models[:1], "weights": torch.ones(1), "training": training},
        "loss_moments": {"models": list(models)},
        "evaluate": {"models": models, "split": "val", "reduction": "mean"},
        "test": {"models": models[:1], "weights": torch.ones(1)},
        "reference": {"omega": omega, "partners": {PARTNER: key}, "sizes": [32], "settings": settings, "again": False},
        "project": {
            "rows": [PARTNER],
            "boxes": {PARTNER: box},
            "size": 32,
            "held_out": True,
            "omegas": {PARTNER: omega},
            "keys": {PARTNER: key},
            "settings": settings,
        },
        "recalibrate": {
            "omega": omega,
            "sizes": [128],
            "m": {PARTNER: 128},
            "offers": {PARTNER: offer},
            "keys": {PARTNER: key},
            "settings": {**settings, "match_classes": True},
        },
        "embed": {"theta": theta, "split": "val", "cap": 8},
        "deposit": {"size": 8, "held_out": True, "settings": {**settings, "exchange": "server-samples"}},
        "data_subspace": {"split": "val"},
        "soft_train": {"models": models, "training": training, "method": {"lam": 0.0, "votes": "sample", "split": "val", "smoothing": 0.1}},
    }
    return here, make_app(lambda context: here), asked


def request(task: str) -> dict[str, Any]:
    """Return an honest request."""
    here, _, asked = node()
    job = {
        "run": "run",
        "seed": 0,
        "precision": "fp32",
        "threads": 1,
        "model": here.scenario.model.as_dict(),
        "preprocess": here.scenario.preprocess.as_dict(),
        "data": {"scenario": "rotated-digits", "options": {"groups": 2}},
    }
    return {"task": task, "round": 1, "client": NAME, "job": job, "inputs": asked.get(task, {})}


def seeds() -> list[bytes]:
    """Every task, honest and with a place changed."""
    return [
        bytes([task, times, *([2, place, 3, value] * 2)])
        for task in range(len(TASKS))
        for times in (0, 1)
        for place in (0, 3, 4)
        for value in (0, 5)
    ]


def one(data: bytes) -> None:
    """Send a request and read the answer."""
    feed = Feed(data)
    here, app, _ = node()
    task = feed.choice(TASKS)
    asked: Any = request(task)
    for _ in range(feed.number(4)):
        asked = changed_value(feed, asked) if feed.number(16) else any_value(feed)
    try:
        content = codec.encode(asked)
    except EmdcflError:
        return  # no message can hold it
    here.permitted = None
    message = Message(content=content, message_type=f"query.{task}", dst_node_id=1)
    said = codec.decode(app(message, Context(1, 1, {}, RecordDict(), {})).content)
    assert isinstance(said, dict) and said.get("client") == NAME, said
    assert ("reply" in said) != ("failure" in said), said
    if "reply" in said:
        assert here.permitted is not None, said
        _kept_back(*here.permitted, asked["job"], said["reply"])


def _kept_back(task: str, inputs: Any, job: Any, reply: Any) -> None:
    """Whatever was answered, the policy allows it."""
    assert task in Policy().answered, task
    assert job["model"]["name"] in BUILDERS, job
    if task == "evaluate":
        assert reply["table"].shape[1] == 1 and len(reply["table"]) <= Policy().models_at_once, reply
    if task in ("reference", "project"):
        width = node()[0].held.network.layout.embedding_width
        assert all(z.shape[1] <= 0.9 * width + 1 for z in reply["samples"].values()), reply
