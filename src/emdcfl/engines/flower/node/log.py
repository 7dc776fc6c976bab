"""What a node was asked, what it released and what it refused: a log for its owner, kept at the node and bounded in size.

One JSON object per line in ``state/log.jsonl``: ``time``, ``what`` (``released``, ``refused`` or ``failed``), ``text``, and for requests
of a run ``run`` and ``round``. From ``MAX_BYTES`` bytes on, the file becomes ``log.1.jsonl``, in place of the one before, whose entries are
counted in ``log.counts.json``: a server that has many requests refused hides no release.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from emdcfl.core.files import locked, replace_text
from emdcfl.core.replies import brief
from emdcfl.engines.flower.connected import SURVEY

MAX_BYTES = 1 << 20
FILES = ("log.1.jsonl", "log.jsonl")
"""Older, newer."""
COUNTS = "log.counts.json"


def note(state: Path, kind: str, request: Any, answer: Mapping[str, Any], *, refused: bool) -> None:
    """Write what was asked and what was answered, without any of the data."""
    asked = request if isinstance(request, Mapping) else {}
    job = asked.get("job") if isinstance(asked.get("job"), Mapping) else {}
    entry = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "what": "released", "text": sent(kind, answer.get("reply"))}
    if "failure" in answer:
        entry |= {"what": "refused" if refused else "failed", "text": f"{kind}: {brief(str(answer['failure']))}"}
    if isinstance(job, Mapping) and "run" in job and kind != SURVEY:  # which belongs to no run, whatever it says
        entry |= {"run": brief(str(job["run"]), 40), "round": brief(str(asked.get("round")), 20)}
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    older, newer = (state / name for name in FILES)
    with locked(newer):  # messages may be separate processes
        if newer.exists() and newer.stat().st_size > MAX_BYTES:
            replace_text(state / COUNTS, json.dumps(_counted([*counts(state), *_entries(older)])))
            newer.replace(older)
        with newer.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def sent(task: str, reply: Any) -> str:
    """Say in words what an answer told the server."""
    given = reply if isinstance(reply, Mapping) else {}
    samples, table = given.get("samples"), given.get("table")
    rows = [len(z) for z in samples.values() if isinstance(z, Tensor)] if isinstance(samples, Mapping) else []
    words = {
        "describe": f"that it has {given.get('n')} train and {given.get('m')} validation samples; its public key",
        "train": "a model trained on its data, the loss",
        "test": f"accuracy{', balanced accuracy, AUC' if 'auc' in given else ''} and loss on its test data",
        "personalize": f"{'the served model, fine-tuned on its data, and ' if 'theta' in given else ''}what that gains in validation loss",
        "evaluate": f"losses and accuracies on its data under {len(table) if isinstance(table, Tensor) else 'some'} models",
        "reference": f"{sum(rows)} projected embeddings of train samples; sealed seeds for {len(given.get('boxes') or {})} partners",
        "profile": "means and spreads of its columns or of features of its images, the share of each class",
        "recalibrate": "distances inside its data at class counts that partners offer",
        "project": f"{sum(rows)} projected embeddings of its samples, under models of {len(rows)} partners",
        "survey": f"what its files contain: {', '.join(sorted(map(str, given)))}",
    }
    return f"{task}: {words.get(task, 'the answer of this task (' + ', '.join(sorted(map(str, given))) + ')')}"


def read(state: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries, oldest first; a line that is damaged is left out."""
    for name in FILES:
        yield from _entries(state / name)


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry


def counts(state: Path) -> list[dict[str, Any]]:
    """Return how often each task was answered in each run in entries that are no longer kept, and how much was refused or failed.

    An entry has ``what``, ``task``, ``run`` (both None for what was not released), ``count``, and the times of the ``first`` and the last.
    """
    try:
        found = json.loads((state / COUNTS).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _counted(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count entries by task and run; what was refused or failed only in all, because a server may name any number of runs in it."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in entries:
        task = one.get("task", str(one.get("text")).partition(":")[0])
        key = ("released", task, one.get("run")) if one.get("what") == "released" else (one.get("what"), None, None)
        sofar = found.setdefault(
            key, {**dict(zip(("what", "task", "run"), key, strict=True)), "count": 0, "first": one.get("first", one.get("time"))}
        )
        sofar["count"], sofar["time"] = sofar["count"] + one.get("count", 1), one.get("time")
    return list(found.values())
