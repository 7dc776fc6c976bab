"""Before round 1 with nodes' own files: agree on classes, image shape, table encoding and standardisation. No sample leaves a node.

The server asks every node two questions. *describe*, together with the greeting: what kind of files it has, which labels in its train
split, which image sizes or table columns. *measure*, with what the answers decided: count, sum and sum of squares per channel, or moments
and category words per column. ``docs/explanation/privacy.md`` lists what this tells the server.
The result is a ``Survey``, which belongs to its run: it is stored beside the run's state, and a run that is resumed reads it again, whoever
is connected then. A client that joins late moves no mean and adds no column; a word that the survey did not know is encoded as none.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from emdcfl.core.errors import ClientError, DataError
from emdcfl.core.files import replace_text
from emdcfl.core.keys import digest
from emdcfl.core.replies import brief
from emdcfl.core.units import names, some
from emdcfl.data.own import defaults
from emdcfl.data.own.cleaning import AS_THEY_ARE, Cleaning, label_variants
from emdcfl.data.own.formats.images import image_shape
from emdcfl.data.own.formats.quantities import common_units
from emdcfl.data.own.parts import label_kind, sort_words
from emdcfl.data.own.tables import Moments, Summary, pool
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.connected import SURVEY, ConnectedNodes
from emdcfl.engines.flower.messages import Retry
from emdcfl.engines.flower.node.survey import DESCRIBE, MEASURE, Answer
from emdcfl.engines.flower.survey_outliers import limited
from emdcfl.engines.flower.survey_replies import check_answer
from emdcfl.models.vision import IMAGENET_MEAN, IMAGENET_STD

log = logging.getLogger("emdcfl")

FILE = "survey.json"
"""Name of a stored survey, in the folder ``state`` of a run directory."""

SEAL = "sha256"
"""Key of its checksum."""

Agreed = tuple[dict[str, Any], Preprocess, tuple[int, ...]]  # encoding, preprocessing, shape of a sample


@dataclass(frozen=True)
class Survey:
    """What the nodes of a run agreed on before round 1."""

    clients: tuple[str, ...]
    """Names of the clients of the run, those that did not answer among them."""
    classes: tuple[str, ...]
    encoding: dict[str, Any]
    """How a file becomes a row (``Scenario.encoding``)."""
    preprocess: Preprocess
    shape: tuple[int, ...]
    """Of a sample."""
    notes: tuple[str, ...]
    label_kind: str = "text"
    """What labels are at the nodes (``Scenario.label_kind``)."""

    def scenario(self, name: str, model: str | None) -> Scenario:
        """Return the scenario, whose sites have names and no samples."""
        dtype = torch.uint8 if self.encoding["kind"] == "images" else torch.float32
        empty = Split(torch.empty((0, *self.shape), dtype=dtype), torch.empty(0, dtype=torch.int64))
        return Scenario(
            name=name,
            sites=tuple(Site(client, empty, empty, {"test": empty}) for client in self.clients),
            classes=self.classes,
            preprocess=self.preprocess,
            model=defaults.recipe(model, shape=self.shape, classes=len(self.classes)),
            defaults=defaults.training(model) | defaults.FINE_TUNING,
            method_defaults=defaults.BY_BENEFIT,
            notes=self.notes,
            encoding=self.encoding,
            label_kind=self.label_kind,
        )

    def write(self, path: Path) -> None:
        content = {**vars(self), "preprocess": self.preprocess.as_dict()}
        replace_text(path, json.dumps({**content, SEAL: _checksum(content)}, indent=1))

    @classmethod
    def read(cls, path: Path) -> Survey:
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if SEAL in raw and raw.pop(SEAL) != _checksum(raw):
                raise ValueError("its checksum does not fit")
            lists = {name: tuple(raw[name]) for name in ("clients", "classes", "shape", "notes")}
            kind = label_kind([raw["label_kind"]], lists["classes"])
            return cls(encoding=dict(raw["encoding"]), preprocess=Preprocess.from_dict(raw["preprocess"]), label_kind=kind, **lists)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: the survey of this run is damaged ({error}); restore it, or start a new run") from error


def _checksum(content: Mapping[str, Any]) -> str:
    return digest(json.dumps(content)).hex()


def survey_nodes(
    connected: ConnectedNodes,
    *,
    clients: list[str] | None,
    label: str | None,
    data_seed: int,
    size: int | None,
    model: str | None,
    cleaning: Cleaning = AS_THEY_ARE,
) -> Survey:
    """Ask the connected nodes about their files and return what they agree on; the options are those of ``apps/server.py``."""
    question = {"question": DESCRIBE, "seed": data_seed, "label": label}
    connected.answers.clear()
    connected.asked = {SURVEY: question}
    try:
        ask = _Survey(connected, clients)
        described = ask(question)
    finally:
        connected.asked = {}
    kinds = sorted({answer["kind"] for answer in described.values()})
    if len(kinds) > 1:
        held = "; ".join(f"{kind}: {names([c for c, answer in described.items() if answer['kind'] == kind])}" for kind in kinds)
        raise DataError(f"expected all nodes to hold images or all to hold tables, got both ({held}); keep one kind")
    classes = tuple(sort_words({str(word) for answer in described.values() for word in answer["labels"]}))
    if len(classes) < 2:
        raise DataError(f"all training samples have the same label {classes[0] if classes else ''!r}: at least two classes are needed")
    labels = {client: [str(word) for word in answer["labels"]] for client, answer in described.items()}
    keys = {"label_map": 'label_map = "OLD=NEW,…"', "merge_labels": "merge_labels = true"}
    doubtful = [f"{told}; if they mean the same, set {keys[repair]} in node.toml of the nodes" for repair, told in label_variants(labels)]
    for doubt in doubtful:  # training may take long
        log.warning("%s", doubt)
    decide = _images if kinds == ["images"] else _tables
    encoding, preprocess, shape = decide(
        ask, described, {"seed": data_seed, "label": label, "size": size, "model": model, "cleaning": cleaning}
    )
    missing = [c for c in ask.clients if c not in described]
    notes = (*([f"not surveyed, because they did not answer: {names(missing)}"] if missing else []), *doubtful)
    kind = label_kind([answer.get("label_kind", "text") for answer in described.values()], classes)
    return Survey(tuple(ask.clients), classes, encoding, preprocess, shape, notes, kind)


class _Survey:
    """Puts a question to the nodes of all clients; leaves out those that do not answer, with a warning."""

    def __init__(self, connected: ConnectedNodes, clients: list[str] | None) -> None:
        self._connected = connected
        self.clients: list[str] = []

        def complete() -> bool:
            self.clients = list(clients or sorted(connected.keys.known) or sorted(connected.nodes))
            return len(self.clients) >= 2 and set(self.clients) <= set(connected.nodes)

        connected.wait_until(complete)
        if len(self.clients) < 2:
            wait = connected.messenger.settings.wait
            raise DataError(f"expected at least two nodes, got {len(self.clients)} connected after {wait:.0f} s; start them")
        left = sorted(set(connected.nodes) - set(self.clients))
        if left:
            log.warning(
                "connected, but not a client of this run: %s; add it to clients of [scenario], or leave clients out to ask all",
                names(left),
            )

    def _find(self) -> dict[str, int]:
        """Return the node of every client that is connected now."""
        self._connected.refresh()
        return self._connected.nodes

    def __call__(self, question: Mapping[str, Any]) -> dict[str, Answer]:
        record, nodes = codec.encode(dict(question)), self._connected.nodes
        answers: dict[str, Answer] = {}
        with_greeting, said = self._connected.asked.get(SURVEY) == question, self._connected.answers
        greeted = {c: said.pop(c)[SURVEY] for c in list(said) if with_greeting and SURVEY in said[c]}
        waiting = [(c, nodes[c], record) for c in self.clients if c in nodes and c not in greeted]
        messenger, retry = self._connected.messenger, Retry(self._find, lambda _: record)
        outcomes = messenger.exchange("query.survey", waiting, group="0", deadline=messenger.settings.deadline, retry=retry)
        for client, outcome in chain(((c, greeted[c]) for c in self.clients if c in greeted), outcomes):
            answer = outcome if isinstance(outcome, dict) else {}
            reason = str(outcome) if isinstance(outcome, ClientError) else answer.get("failure", "no answer in its reply")
            if "failure" not in answer and answer.get("client") == client and isinstance(answer.get("reply"), dict):
                try:
                    check_answer(question, answer["reply"])
                    answers[client] = answer["reply"]
                    continue
                except ClientError as error:
                    reason = error
            log.warning("client %r did not answer the survey: %s", client, brief(str(reason)))
        if len(answers) < 2:
            raise DataError(f"expected at least two nodes to describe their files, got {len(answers)}; see the warnings above")
        return {c: answers[c] for c in self.clients if c in answers}


def _images(ask: _Survey, described: Mapping[str, Answer], options: Mapping[str, Any]) -> Agreed:
    """Shape and standardisation of images, by the rules of ``load_folder``."""
    options["cleaning"].columns((), None)
    pretrained = defaults.is_pretrained(options["model"])
    sizes: Counter[tuple[int, int]] = Counter()
    for answer in described.values():
        sizes.update({(width, height): count for width, height, count in answer["sizes"]})
    if not sizes:
        raise DataError("expected images that can be read, got none at any node; see the warnings above")
    size = 224 if pretrained and options["size"] is None else options["size"]
    shape = image_shape(sizes, size=size, colour=pretrained or any(answer["colour"] for answer in described.values()))
    encoding = {"kind": "images", "shape": list(shape)}
    if pretrained:
        return encoding, Preprocess(mean=IMAGENET_MEAN, std=IMAGENET_STD, scale=1 / 255), shape
    measured = ask({"question": MEASURE, "seed": options["seed"], "shape": list(shape)})
    for channel in range(shape[0]):
        told = [(m["count"], float(m["sums"][channel]), float(m["squares"][channel])) for m in measured.values()]
        found = limited([(n, s / n, max(square - s * s / n, 0.0)) for n, s, square in told])
        if found is not None and found[1][0] < told[found[0]][0]:  # pixels are bounded: their number is all that could ruin the others
            i, (least, _, _) = found
            client, answer = list(measured.items())[i]
            _tell_limited(client, "the brightness of its images")
            less = {key: answer[key] * (least / answer["count"]) for key in ("sums", "squares")}
            measured[client] = {**answer, **less, "count": least}
    answers = measured.values()
    counts, sums, squares = ([answer[key] for answer in answers] for key in ("count", "sums", "squares"))
    preprocess = defaults.standardisation(counts, [x.numpy() for x in sums], [x.numpy() for x in squares], 1 / 255)
    return encoding, preprocess, shape


def _tables(ask: _Survey, described: Mapping[str, Answer], options: Mapping[str, Any]) -> Agreed:
    """Encoding of tables, pooled from what the nodes report about their training rows."""
    label = Counter(answer["label"] for answer in described.values()).most_common(1)[0][0]
    keep = options["cleaning"].columns({name for answer in described.values() for name in answer["columns"]}, label)
    held = {client: [name for name in answer["columns"] if name in keep] for client, answer in described.items()}
    columns = next(iter(held.values()))
    different = sorted(set().union(*held.values()) - set.intersection(*map(set, held.values())))
    if different:
        drop = shlex.quote(f"scenario.drop={brief(','.join(different), 400)}")
        where = some([f"{name!r} only at {names([c for c in held if name in held[c]])}" for name in different], "; ")
        raise DataError(f"all clients need the same columns, got {where}: rename or add them, or leave them out with --set {drop}")
    numeric = [name for name in columns if all(answer["columns"][name] for answer in described.values())]
    categorical = [name for name in columns if name not in numeric]
    question = {"question": MEASURE, "seed": options["seed"], "label": options["label"], "numeric": numeric, "categorical": categorical}
    measured = ask(question)
    moments = {client: {name: Moments(**answer["numeric"][name]) for name in numeric} for client, answer in measured.items()}
    for name in numeric:
        if (found := limited([(m[name].count, m[name].mean, m[name].deviation) for m in moments.values()])) is not None:
            client = list(moments)[found[0]]
            _tell_limited(client, f"column {name!r}")
            moments[client][name] = Moments(*found[1], missing=moments[client][name].missing)
    summaries = [
        Summary(moments[client], {name: tuple(answer["words"][name]) for name in categorical}) for client, answer in measured.items()
    ]
    units = common_units({client: {n: unit for n, unit in answer["units"].items() if n in numeric} for client, answer in described.items()})
    encoding = pool(summaries, label, units=units)
    return encoding.as_dict(), Preprocess(), (encoding.width,)


def _tell_limited(client: str, what: str) -> None:
    log.warning("client %r: mean and spread of %s are far from the others', and count less; check the unit", client, brief(what))
