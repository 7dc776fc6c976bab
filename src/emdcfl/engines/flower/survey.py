"""Before round 1 with nodes' own files: agree on classes, image shape, table encoding and standardisation. No sample leaves a node.

Two questions to every node. *look*: what kind of files, which labels in the train split, image sizes or table columns. *measure*: with
what the answers decided, count, sum and sum of squares per channel, or moments and category words per column. ``docs/privacy.md`` lists
what this tells the server. The result is a ``Scenario`` whose sites have names and no samples.

May import: data, models, session.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from emdcfl.core.errors import ClientError, DataError
from emdcfl.core.replies import brief
from emdcfl.data.own import defaults
from emdcfl.data.own.images import LARGEST_DEFAULT
from emdcfl.data.own.parts import sort_words
from emdcfl.data.own.tables import Moments, Summary, pool
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.directory import HELLO, Directory
from emdcfl.engines.flower.post import LostError, Post
from emdcfl.engines.flower.session import NODES, Session, current
from emdcfl.models.vision import IMAGENET_MEAN, IMAGENET_STD

if TYPE_CHECKING:
    from flwr.app import RecordDict

log = logging.getLogger("emdcfl")

Answer = dict[str, Any]


@scenario(NODES, "the connected nodes, each with files of its own (Flower only; see docs/deploy.md)")
def nodes(
    *,
    clients: list[str] | None = None,
    label: str | None = None,
    data_seed: int = 0,
    size: int | None = None,
    model: str | None = None,
) -> Scenario:
    """Ask the connected nodes about their files; see the module.

    Parameters
    ----------
    clients : list of str, optional
        Names of the clients of the run; by default those on the server's list of keys or, if it is empty, whoever is connected.
    label : str, optional
        Label column of tables.
    data_seed : int
        Seed of the splits.
    size : int, optional
        Height and width of images.
    model : str, optional
        Name of the network.
    """
    here = current()
    ask = _Asking(here, clients)
    looked = ask({"question": "look", "seed": data_seed, "label": label})
    kinds = {answer["kind"] for answer in looked.values()}
    if len(kinds) > 1:
        held = ", ".join(f"{client} {answer['kind']}" for client, answer in looked.items())
        raise DataError(f"some nodes hold images and others tables: {held}; keep one kind")
    classes = tuple(sort_words({str(word) for answer in looked.values() for word in answer["labels"]}))
    if len(classes) < 2:
        raise DataError(f"all training samples have the same label {classes[0] if classes else ''!r}: at least two classes are needed")
    decide = _images if kinds == {"images"} else _tables
    encoding, preprocess, shape = decide(ask, looked, {"seed": data_seed, "label": label, "size": size, "model": model})
    dtype = torch.uint8 if kinds == {"images"} else torch.float32
    empty = Split(torch.empty((0, *shape), dtype=dtype), torch.empty(0, dtype=torch.int64))
    missing = [c for c in ask.clients if c not in looked]
    return Scenario(
        name=NODES,
        sites=tuple(Site(name, empty, empty, {"test": empty}) for name in ask.clients),
        classes=classes,
        preprocess=preprocess,
        model=defaults.recipe(model, shape=shape, classes=len(classes)),
        defaults=defaults.training(model),
        notes=(f"not surveyed, because they did not answer: {', '.join(missing)}",) if missing else (),
        encoding=encoding,
    )


class _Asking:
    """Puts a question to the nodes of all clients; those that do not answer are left out, with a warning."""

    def __init__(self, here: Session, clients: list[str] | None) -> None:
        self._post, self._here = Post(here.grid, here.wire), here
        self._directory = Directory(here.grid, here.keys, self._hello)
        end = time.monotonic() + here.wire.wait
        while True:
            self._directory.refresh()
            self.clients = list(clients or sorted(here.keys.known) or sorted(self._directory.nodes))
            if (len(self.clients) >= 2 and set(self.clients) <= set(self._directory.nodes)) or time.monotonic() >= end:
                break
            time.sleep(min(2.0, max(0.1, here.wire.poll)))
        if len(self.clients) < 2:
            raise DataError(f"expected at least two nodes, got {len(self.clients)} connected after {here.wire.wait:.0f} s; start them")

    def _hello(self, requests: Mapping[int, Any]) -> Mapping[int, Any]:
        messages = {node: (node, codec.encode(request)) for node, request in requests.items()}
        return dict(self._post.exchange(f"query.{HELLO}", messages, group="", deadline=self._here.wire.greeting))

    def _ask(self, at: Mapping[str, tuple[int, RecordDict]]) -> Iterator[tuple[str, Any]]:
        """Ask, and ask again those whose node is there but whose answer was lost."""
        for left in reversed(range(self._here.wire.attempts)):
            lost: list[str] = []
            for client, outcome in self._post.exchange("query.survey", at, group="0", deadline=self._here.wire.deadline):
                if left and isinstance(outcome, LostError):
                    lost.append(client)
                else:
                    yield client, outcome
            at = {client: at[client] for client in lost}

    def __call__(self, question: Mapping[str, Any]) -> dict[str, Answer]:
        record = codec.encode(dict(question))
        at = {c: (self._directory.nodes[c], record) for c in self.clients if c in self._directory.nodes}
        answers: dict[str, Answer] = {}
        for client, outcome in self._ask(at):
            reason = (
                str(outcome) if isinstance(outcome, ClientError) else outcome.get("failure") if isinstance(outcome, dict) else "no answer"
            )
            if reason is None and outcome.get("client") == client and isinstance(outcome.get("reply"), dict):
                answers[client] = outcome["reply"]
            else:
                log.warning("client %r did not answer the survey: %s", client, brief(str(reason)))
        if len(answers) < 2:
            raise DataError(f"expected at least two nodes to describe their files, got {len(answers)}; see the warnings above")
        return {c: answers[c] for c in self.clients if c in answers}


def _images(ask: _Asking, looked: Mapping[str, Answer], options: Mapping[str, Any]) -> tuple[dict[str, Any], Preprocess, tuple[int, ...]]:
    """Shape and standardisation of images, by the rules of ``load_folder``."""
    pretrained = defaults.is_pretrained(options["model"])
    size = options["size"] or (224 if pretrained else None)
    if size is None:
        counts: Counter[tuple[int, int]] = Counter()
        for answer in looked.values():
            counts.update({(width, height): count for width, height, count in answer["sizes"]})
        width, height = counts.most_common(1)[0][0]
        size = width if width == height and width <= LARGEST_DEFAULT else LARGEST_DEFAULT
    channels = 3 if pretrained or any(answer["colour"] for answer in looked.values()) else 1
    shape = (channels, size, size)
    encoding = {"kind": "images", "shape": list(shape)}
    if pretrained:
        return encoding, Preprocess(mean=IMAGENET_MEAN, std=IMAGENET_STD, scale=1 / 255), shape
    measured = ask({"question": "measure", "seed": options["seed"], "shape": list(shape)})
    count = float(sum(answer["count"] for answer in measured.values()))
    mean = torch.stack([answer["sums"] for answer in measured.values()]).sum(0).numpy() / 255 / count
    square = torch.stack([answer["squares"] for answer in measured.values()]).sum(0).numpy() / 255**2 / count
    variance = np.maximum(square - mean**2, 0)
    std = np.where(variance > 1e-12 * np.maximum(1, mean**2), np.sqrt(variance), 1.0)
    return encoding, Preprocess(mean=tuple(mean.tolist()), std=tuple(std.tolist()), scale=1 / 255), shape


def _tables(ask: _Asking, looked: Mapping[str, Answer], options: Mapping[str, Any]) -> tuple[dict[str, Any], Preprocess, tuple[int, ...]]:
    """Encoding of tables, pooled from what the nodes report about their training rows."""
    first, *others = looked
    names = list(looked[first]["columns"])
    for client in others:
        different = set(names) ^ set(looked[client]["columns"])
        if different:
            raise DataError(f"clients {first!r} and {client!r} differ in the column {min(different)!r}: all clients need the same columns")
    numeric = [name for name in names if all(answer["columns"][name] for answer in looked.values())]
    categorical = [name for name in names if name not in numeric]
    question = {"question": "measure", "seed": options["seed"], "label": options["label"], "numeric": numeric, "categorical": categorical}
    summaries = [
        Summary(
            {name: Moments(**answer["numeric"][name]) for name in numeric}, {name: tuple(answer["words"][name]) for name in categorical}
        )
        for answer in ask(question).values()
    ]
    encoding = pool(summaries, looked[first]["label"])
    return encoding.as_dict(), Preprocess(), (encoding.width,)
