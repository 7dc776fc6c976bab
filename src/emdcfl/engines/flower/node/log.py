"""What a node was asked, what it released and what it refused: a log for its owner, kept at the node and bounded in size.

One JSON object per line in ``state/log.jsonl``: ``time``, ``what`` (``released``, ``refused`` or ``failed``), ``text``, and for requests
of a run ``run`` and ``round``. From ``MOST`` bytes on, the file becomes ``log.1.jsonl``, in place of the one before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from emdcfl.core.files import locked
from emdcfl.core.replies import brief

MOST = 1 << 20
FILES = ("log.1.jsonl", "log.jsonl")
"""Older, newer."""


def note(state: Path, kind: str, request: Any, answer: Mapping[str, Any], *, refused: bool) -> None:
    """Write what was asked and what was answered, without any of the data."""
    asked = request if isinstance(request, Mapping) else {}
    job = asked.get("job") if isinstance(asked.get("job"), Mapping) else {}
    entry = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "what": "released", "text": sent(kind, answer.get("reply"))}
    if "failure" in answer:
        entry |= {"what": "refused" if refused else "failed", "text": f"{kind}: {brief(str(answer['failure']))}"}
    if isinstance(job, Mapping) and "run" in job:
        entry |= {"run": brief(str(job["run"]), 40), "round": brief(str(asked.get("round")), 20)}
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    older, newer = (state / name for name in FILES)
    with locked(newer):  # messages may be separate processes
        if newer.exists() and newer.stat().st_size > MOST:
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
        if not (state / name).exists():
            continue
        with (state / name).open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if isinstance(entry, dict):
                    yield entry
