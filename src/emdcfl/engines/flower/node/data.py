"""Read a node's site once and cache it: each message may start a new process, and decoding images again would cost more than training.

The cache is a file in the node's home, readable by its owner alone. Its name is a digest of the request and of the files' names, sizes and
times, so that changed files are read again. Only the newest is kept.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from emdcfl.core.errors import ClientError, DataError, nearest
from emdcfl.core.files import locked, replace_text
from emdcfl.core.keys import digest
from emdcfl.data.own import load_site
from emdcfl.data.own.cleaning import Cleaning
from emdcfl.data.own.formats.client_tables import LABEL_NAMES, read_client_tables
from emdcfl.data.own.formats.images import Listed, list_images
from emdcfl.data.own.formats.layout import site_files
from emdcfl.data.own.notes import Note
from emdcfl.data.own.parts import Part, Raw, Text, divide
from emdcfl.data.own.site import new_site
from emdcfl.data.own.splitting import SplitRule, file_keys
from emdcfl.data.own.tables import is_numeric, withheld
from emdcfl.data.types import Site, Split
from emdcfl.engines.flower.node.policy import Policy, PolicyError

if TYPE_CHECKING:
    from emdcfl.engines.flower.node.home import NodeConfig

log = logging.getLogger("emdcfl")

SCENARIO = "scenario"


def read_site(name: str, home: Path, config: NodeConfig, data: Mapping[str, Any]) -> Site:
    """Return the site of the node at ``home``: its share of a scenario, or its own files.

    ``data`` is the job's: a scenario's name and options, or encoding, classes and seed of own files.
    """
    shares, path, state = config.data == SCENARIO, home / config.data, home / "state"
    if shares and "scenario" not in data:
        raise ClientError(f"node {name!r} serves a share of a scenario, but the run asks for own files; set data in its node.toml")
    if not shares and "encoding" not in data:
        raise ClientError(f"node {name!r} serves its own files, but the run asks for a scenario; run it with --scenario nodes")
    rules = map(repr, (config.rule, config.policy, config.cleaning))
    how = digest(name, config.label, json.dumps(data, sort_keys=True), "" if shares else _listing(path), *rules)
    kept = state / "site" / f"{how.hex()[:32]}.safetensors"
    site = _cached(name, kept)
    if site is None:
        site = _share(name, data) if shares else _own(name, path, config, data, state)
        _keep(site, kept)
    return site


def _share(name: str, data: Mapping[str, Any]) -> Site:
    from emdcfl.data import scenarios  # imports every source of data, which other nodes do not need

    scenario = scenarios.build(data["scenario"], **data["options"])
    names = [site.name for site in scenario.sites]
    if name not in names:
        raise DataError(f"scenario {scenario.name!r} has no client {name!r}: {nearest(name, names)}")
    return scenario.sites[names.index(name)]


def _own(name: str, path: Path, config: NodeConfig, data: Mapping[str, Any], state: Path) -> Site:
    about = {"encoding": data["encoding"], "classes": data["classes"], "seed": int(data["seed"])}
    label, rule, cleaning = config.label, config.rule, config.cleaning
    if data["encoding"]["kind"] == "images":
        cleaning.columns((), None)
        _check_classes(image_labels(list_images(site_files(path, name)[1]), about["seed"], rule, cleaning), data)
        site, notes = load_site(path, name=name, label=label, rule=rule, cleaning=cleaning, **about)
    else:
        raw, said = read_table(name, path, label or data["encoding"]["label"], rule, cleaning)
        train = training_rows(raw, about["seed"], state, label, config.policy)
        _check_words_asked_for(train, data, config.policy)
        _check_classes(train.labels, data)
        site, notes = new_site(raw, notes=said, **about)
    for note in notes:
        log.info("%s", note)
    return site


def _check_classes(labels: Text, data: Mapping[str, Any]) -> None:
    """Refuse classes that leave out a part of the training samples: a server could choose a single one in this way."""
    if left_out := set(labels.tolist()) - set(data["classes"]):
        raise PolicyError(
            f"this node trains on all its samples, and the server leaves out {len(left_out)} of its classes; check the server"
        )


def training_rows(raw: Raw, seed: int, state: Path, configured: str | None, policy: Policy) -> Part:
    """Return the rows to train on, divided by the only label column of this node: its operator's, or the first whose words it tells.

    Whatever else is refused, another column is then, too: each refusal would tell a little of one more division. Refuse also a column
    that the policy keeps back, unless its name says that it holds labels.
    """
    column, path = raw.label, state / "label"
    if configured is None:
        if policy.columns and column not in (*policy.columns, *LABEL_NAMES):
            raise PolicyError(f"this node keeps the column {column!r} back (policy.columns); its operator may set label in node.toml")
        _check_first(path, column)
    train = divide(raw, seed)["train"]
    check_words(Counter(train.labels.tolist()), f"the label column {column!r}")
    if configured is None:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(path):  # messages may be separate processes
            _check_first(path, column)
            if not path.exists():
                replace_text(path, column)
    return train


def _check_first(path: Path, column: str) -> None:
    first = path.read_text(encoding="utf-8") if path.exists() else column
    if column != first:
        raise PolicyError(
            f"this node's labels are in the column {first!r}, got a request for {column!r}; "
            "two divisions of the same rows would show single ones. Its operator sets label in node.toml"
        )


def image_labels(listed: Listed, seed: int, rule: SplitRule, cleaning: Cleaning) -> Text:
    """Return the labels of the train split of images, without decoding any."""
    parts = {}
    for split, files in listed.files.items():
        by = file_keys([file for file, _ in files], rule, f"client {listed.name!r}")
        parts[split] = Part(np.arange(len(files)), np.array([label for _, label in files], dtype=str), by)
    return divide(cleaning.clean(Raw(listed.name, listed.origin, parts, rule)), seed)["train"].labels


def read_table(name: str, path: Path, label: str | None, rule: SplitRule, cleaning: Cleaning) -> tuple[Raw, list[Note]]:
    """Return this site's table as its owner repairs it, without the columns and rows that are left out, and notes."""
    raw, notes = read_client_tables(site_files(path, name)[1], label, rule, cleaning.cells)
    (chosen,), more = cleaning.select([cleaning.clean(raw)], raw.label, raw.origin)
    return chosen, [*notes, *more]


def _check_words_asked_for(train: Part, data: Mapping[str, Any], policy: Policy) -> None:
    """Refuse a job that asks for columns as words which the survey would not list: the server could guess names, and see which occur."""
    for entry in data["encoding"]["columns"]:
        if "words" in entry and entry["name"] in train.x.column_names:
            check_column(train.x, entry["name"], policy)


def _listing(path: Path) -> str:
    """Names, sizes and times of all files below a path."""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    entries = [(str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns) for p in found if p.is_file()]
    return json.dumps(entries)


def _cached(name: str, path: Path) -> Site | None:
    try:
        with safe_open(path, framework="pt") as file:
            variants = json.loads(file.metadata()["tests"])
            splits = {part: Split(file.get_tensor(f"{part}/x"), file.get_tensor(f"{part}/y")) for part in ("train", "val", *variants)}
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        log.warning("%s: the cached copy of this site's data is damaged (%s); reading the files again", path, error)
        return None
    return Site.from_splits(name, splits)


def _keep(site: Site, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    tensors = {f"{part}/{axis}": getattr(split, axis).contiguous() for part, split in site.splits.items() for axis in ("x", "y")}
    if len({t.data_ptr() for t in tensors.values() if t.numel()}) < len([t for t in tensors.values() if t.numel()]):
        tensors = {key: torch.clone(t) for key, t in tensors.items()}  # two variants may share memory, which the format does not allow
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, {"tests": json.dumps([f"test:{variant}" for variant in site.tests])})
        temporary.chmod(0o600)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # of a full disk it would take the rest
    for old in path.parent.glob("*.safetensors"):
        if old != path:
            old.unlink(missing_ok=True)


def check_column(table: pa.Table, name: str, policy: Policy) -> None:
    """Refuse to list a column's values if they are numbers, or look as if they named somebody."""
    values = table.column(name)
    if is_numeric(values.type) and name not in policy.categorical:
        raise PolicyError(
            f"this node does not list the numbers in column {name!r} as words: write it as text or as numbers at all sites, "
            "or its operator adds it to policy.categorical in node.toml"
        )
    words = Counter(str(word).strip() for word in values.to_pylist() if word is not None)
    check_words(words, f"column {name!r}")


def check_words(words: Counter[str], where: str) -> None:
    """Refuse to send words that look like names, numbers of persons, or free text."""
    found = withheld(words)
    if found is not None:
        raise PolicyError(
            f"this node does not send the words of {where}, which look like names or free text ({found}); remove or recode it"
        )
