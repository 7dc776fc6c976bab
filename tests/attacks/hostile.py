"""A server that asks a default node for whatever it likes, message by message."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Message
from tests.engines.flower.loopback import LoopbackGrid

from emdcfl.data import scenarios
from emdcfl.data.types import Scenario
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.node.home import HomeNode
from emdcfl.engines.flower.node.serve import make_app
from emdcfl.engines.flower.node.survey import answer_survey
from emdcfl.methods.emdcfl.settings import CompareSettings, Options

NODE = 1


class HostileServer(LoopbackGrid):
    """One node with a home folder; every message opens it anew, as a new process would."""

    def __init__(self, home: Path, name: str = "rot0-1", *, toml: str = "") -> None:
        super().__init__({})
        home.mkdir(parents=True, exist_ok=True)
        (home / "node.toml").write_text(toml, encoding="utf-8")
        self.home, self.name, self.online = home, name, {NODE}
        self._apps[NODE] = make_app(lambda context: HomeNode(name, home), survey=answer_survey)

    def send(self, kind: str, request: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return what the node says."""
        message = Message(content=codec.encode(request), message_type=f"query.{kind}", dst_node_id=NODE)
        (reply,) = self.send_and_receive([message])
        said: dict[str, Any] = codec.decode(reply.content)
        return said

    def ask(self, task: str, *, round: int = 1, job: dict[str, Any] | None = None, **inputs: Any) -> dict[str, Any]:
        """Ask for a task, in a job that is honest but for ``job``."""
        request = {"task": task, "round": round, "client": self.name, "job": {**digits_job(), **(job or {})}, "inputs": inputs}
        return self.send(task, request)

    def refused(self, task: str, **request: Any) -> str:
        """Ask, expect a refusal, and return its reason."""
        said = self.ask(task, **request)
        assert "reply" not in said
        reason: str = said["failure"]
        return reason


@lru_cache(maxsize=1)
def digits() -> Scenario:
    return scenarios.build("rotated-digits", groups=2)


def digits_job() -> dict[str, Any]:
    scenario = digits()
    return {
        "run": "run",
        "seed": 0,
        "precision": "fp32",
        "threads": 1,
        "model": scenario.model.as_dict(),
        "preprocess": scenario.preprocess.as_dict(),
        "data": {"scenario": "rotated-digits", "options": {"groups": 2}},
    }


def settings(**changed: Any) -> dict[str, Any]:
    """Settings of a comparison, as EMD-CFL sends them by default but for ``changed``."""
    return {**CompareSettings.of(Options()).as_dict(), "match_classes": False, **changed}
