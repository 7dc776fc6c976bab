"""The node's side of every message: decode the request, run the task, encode the answer. An error becomes an answer; the node goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError

import emdcfl
from emdcfl.core.client import TASKS, TaskInfo
from emdcfl.core.errors import ClientError, EmdcflError
from emdcfl.core.federation import Failure
from emdcfl.core.replies import brief
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.connected import ALONG, HELLO, SURVEY
from emdcfl.engines.flower.messages import PING
from emdcfl.engines.flower.node.home import Node
from emdcfl.engines.flower.node.policy import PolicyError
from emdcfl.engines.local.sequential import answer, intra_op_threads, one_line
from emdcfl.privacy.exchange import node_key, prove, public_key

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

log = logging.getLogger("emdcfl")

Open = Callable[["Context"], Node]
Answer = Callable[[Any, Any], dict[str, Any]]  # from the node and the decoded request
Logged = Literal["all", "failures", "nothing"]

MAX_ALONG = 8
"""Tasks that may come along with another one, or with the greeting."""


def hello(node: Node, request: Any) -> dict[str, Any]:
    """Answer with this node's name and key, prove that it holds the key, and answer the tasks that come along."""
    key = public_key(node.secret)
    proof = prove(node.secret, request["challenge"], request["nonce"], node.name)
    return {"name": node.name, "key": key, "proof": proof, "version": emdcfl.__version__, **_along(node, request, node.name)}


def perform_all(node: Node, request: Any) -> dict[str, Any]:
    """Run the tasks that come along with a request, which are of earlier rounds, and then its own; each is allowed, or not, by itself."""
    along = _along(node, request, request["client"])
    own = {key: value for key, value in request.items() if key != ALONG}
    return {**_answered(node, perform, brief(str(request["task"]), 40), own), **along}


def _along(node: Node, request: Any, client: str) -> dict[str, Any]:
    asked = request.get(ALONG)
    if asked is None:
        return {}
    if not isinstance(asked, list) or len(asked) > MAX_ALONG or not all(isinstance(one, dict) for one in asked):
        raise ClientError(f"expected at most {MAX_ALONG} tasks that come along with a request, got something else; check the server")
    shared = {"client": client, "job": request["job"]}
    return {ALONG: [_answered(node, perform, brief(str(one.get("task")), 40), {**one, **shared}) for one in asked]}


def ping(node: Node, request: Any) -> dict[str, Any]:
    """Say that this node has answered everything it was asked before."""
    return {"client": node.name}


def perform(node: Node, request: Any) -> dict[str, Any]:
    """Run the task of a request; the answer holds a ``reply`` or a ``failure``, and the name of the client that gave it."""
    task, round, job = request["task"], int(request["round"]), request["job"]
    if request["client"] != node.name:
        return _failed(node, f"the request is for client {request['client']!r}, but this node is {node.name!r}")
    node.permit(task, round, job, request["inputs"])
    try:
        info = TASKS[task]
        distrusted = check_relayed(node, info, request["inputs"])
        with intra_op_threads(int(job["threads"])):
            client = node.client(job)
            client.distrusted = distrusted
            outcome = answer(client, info, round, request["inputs"])
            if not isinstance(outcome, Failure):
                node.keep(client)
    except ClientError as error:  # others are about the node's files, and may name columns that its owner leaves out
        return _failed(node, str(error))
    if isinstance(outcome, Failure):
        log.error("%s\n%s", outcome, outcome.traceback)
        expected = _is_ours(outcome)
        return _failed(node, outcome.reason if node.details or expected else outcome.reason.partition(":")[0] + " (see the node's log)")
    return {"client": node.name, "reply": outcome}


def _failed(node: Node, reason: str) -> dict[str, Any]:
    return {"client": node.name, "failure": reason}


def _disk(error: Exception) -> str:
    return f"its node cannot read or write its files ({getattr(error, 'strerror', None) or type(error).__name__}); free or repair its disk"


def _unanswered(node: Node, error: Exception) -> str:
    """Say why a request could not be answered: in the words of errors made for the server, of others by their type."""
    if isinstance(error, ClientError) or (node.details and isinstance(error, EmdcflError)):
        return str(error)
    served = "what 'emdcfl node serve' printed there"
    if isinstance(error, EmdcflError):
        return f"its data do not fit the request ({type(error).__name__}); 'emdcfl node data HOME' or {served} says why"
    return f"malformed request ({type(error).__name__}); {served} says why"


def _is_ours(failure: Failure) -> bool:
    """Whether the error is one of ours, whose text was written to be read; others may quote data.

    The reason is then the text alone: a line in the text of another error, which may quote the server, cannot pass for it.
    """
    kind, _, text = failure.traceback.rstrip().rsplit("\n", 1)[-1].partition(": ")
    return kind.startswith("emdcfl.core.errors.") and one_line(text) == failure.reason


def check_relayed(node: Node, info: TaskInfo, inputs: Mapping[str, Any]) -> dict[str, str]:
    """Check every key that the server relays with a request.

    Returns the partners whose key is not the one on this node's list, and why: nothing is sealed for them or opened from them, and the
    others are served. A key that is missing or malformed, another one for this node itself, or no
    partner at all that is trusted refuses the request.
    """
    distrusted: dict[str, str] = {}
    for name in info.relayed_keys:
        keys = inputs.get(name)
        if not isinstance(keys, dict) or not all(isinstance(key, bytes) for key in keys.values()):
            raise ClientError(f"expected {name} of {info.name!r} to map partners to keys of bytes, got something else; check the server")
        keys = {partner: node_key(key) for partner, key in keys.items()}
        if keys.get(node.name, public_key(node.secret)) != public_key(node.secret):
            raise ClientError(f"{name} of {info.name!r} gives {node.name!r} another key than this node's own; check the server")
        for partner in (partner for partner in keys if partner != node.name):
            try:
                node.partners.check(partner, keys[partner])
            except ClientError as error:
                log.warning("a partner is refused: %s", error)
                distrusted[partner] = str(error)
        others = set(keys) - {node.name}
        if others and others <= set(distrusted):
            raise ClientError(next(iter(distrusted.values())))
    return distrusted


def make_app(open_node: Open, survey: Answer | None = None) -> ClientApp:
    """Return a ``ClientApp`` that answers ``hello``, ``ping``, every registered task, and a ``survey``, each as ``query.<name>``.

    ``open_node`` makes the node from Flower's ``Context``, which has the node's config.
    """
    from flwr.clientapp import ClientApp

    app = ClientApp()
    answers: dict[str, tuple[Answer, Logged]] = dict.fromkeys(TASKS, (perform_all, "failures"))
    answers |= {HELLO: (hello, "failures"), PING: (ping, "nothing")}
    if survey is not None:
        answers |= {HELLO: (_greeting(survey), "failures"), SURVEY: (survey, "all")}
    for name, (function, logged) in answers.items():
        app.query(name)(_handler(open_node, function, logged=logged))
    return app


def _greeting(survey: Answer) -> Answer:
    """Return ``hello`` that also answers the first question of a survey, where it comes with the greeting."""

    def greet(node: Node, request: Any) -> dict[str, Any]:
        content = hello(node, request)
        if SURVEY in request:
            content[SURVEY] = _answered(node, survey, SURVEY, request[SURVEY])
        return content

    return greet


def _handler(open_node: Open, function: Answer, *, logged: Logged) -> Callable[[Message, Context], Message]:
    def handle(message: Message, context: Context) -> Message:
        from flwr.app import Message

        kind = message.metadata.message_type.removeprefix("query.")
        content = _answered(open_node(context), function, kind, message.content, logged=logged)
        return Message(content=codec.encode(content), reply_to=message)

    return handle


def _answered(node: Node, function: Answer, kind: str, asked: Any, *, logged: Logged = "all") -> dict[str, Any]:
    """Answer a request, given as a record or decoded, and write the owner's log; whatever goes wrong becomes a failure in words.

    What a function has answered in parts is in the log already: then only ``failures`` of the whole are added.
    """
    request, refused, failed = None, False, True
    try:
        request = asked if isinstance(asked, dict) else codec.decode(asked)
        content, failed = function(node, request), False
    except PolicyError as error:
        log.warning("refused a request of the server (%s): %s", kind, error)
        content, refused = _failed(node, str(error)), True
    except (OSError, SafetensorError) as error:
        log.exception("a request could not be answered")
        content = _failed(node, _disk(error))
    except Exception as error:  # a malformed request: a tensor where a dict belongs, a round that is infinite
        log.exception("a request could not be answered")
        content = _failed(node, _unanswered(node, error))
    if logged == "all" or (logged == "failures" and failed):
        try:
            node.note(kind, request, content, refused=refused)
        except OSError as error:  # what its owner could not read later is not released
            log.error("the owner's log cannot be written: %s", error)
            content = _failed(node, _disk(error))
    return content
