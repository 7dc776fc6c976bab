"""A node's answers to the survey (``engines.flower.survey``): what its own files contain, in counts and sums. No sample leaves the node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from emdcfl.core.errors import DataError
from emdcfl.data.own.cleaning import Cleaning
from emdcfl.data.own.formats.images import is_grey, list_images, read_client, read_headers
from emdcfl.data.own.formats.layout import ClientFiles, site_files
from emdcfl.data.own.parts import Part, Raw, divide
from emdcfl.data.own.splitting import SplitRule
from emdcfl.data.own.tables import Moments, is_numeric, summarise
from emdcfl.engines.flower.node.data import check_column, check_words, image_labels, read_table, training_rows
from emdcfl.engines.flower.node.home import HomeNode
from emdcfl.engines.flower.node.policy import Policy, PolicyError

DESCRIBE, MEASURE = "describe", "measure"
"""The two questions of the survey."""

MIN_VALUES = 5
"""Numbers of a column below which its mean and spread are not told."""

Answer = dict[str, Any]


def answer_survey(node: HomeNode, request: Any) -> Answer:
    """Answer a question of the survey about this node's own files."""
    if node.config.data == "scenario":
        raise DataError(f"node {node.name!r} has no files of its own: set data in {node.home}/node.toml to its folder or table")
    policy, path, seed = node.config.policy, node.data, request["seed"]
    policy.check_seed(seed)
    if not path.exists():
        raise DataError(f"client {node.name!r}: no such file or folder: {path}; correct data in {node.home}/node.toml")
    label, describes = node.config.label or request.get("label"), request["question"] == DESCRIBE
    rule, cleaning = node.config.rule, node.config.cleaning
    kind, files = site_files(path, node.name)
    if kind == "images":
        cleaning.columns((), None)
        if not describes:
            policy.check_shape(request["shape"])
            answer = _measure_images(files, seed, rule, cleaning, request["shape"])
        else:
            answer = _describe_images(files, seed, rule, cleaning)
    else:
        raw, _ = read_table(node.name, path, label, rule, cleaning)
        if not describes:
            policy.check_columns(request["numeric"] + request["categorical"])
        train = training_rows(raw, seed, node.home / "state", node.config.label, policy)
        answer = _describe_table(raw, train, policy) if describes else _measure_table(raw.label, train, request, policy)
    return {"client": node.name, "reply": answer}


def _describe_images(files: ClientFiles, seed: int, rule: SplitRule, cleaning: Cleaning) -> Answer:
    listed = list_images(files)
    headers = [header for header in read_headers(listed) if header is not None]
    sizes = Counter(size for _, size in headers)
    labels = image_labels(listed, seed, rule, cleaning)
    check_words(Counter(labels.tolist()), "the names of the class folders")
    return {
        "kind": "images",
        "labels": sorted(set(labels.tolist())),
        "colour": not all(is_grey(mode) for mode, _ in headers),
        "sizes": [[width, height, count] for (width, height), count in sorted(sizes.items())],
    }


def _measure_images(files: ClientFiles, seed: int, rule: SplitRule, cleaning: Cleaning, shape: Sequence[int]) -> Answer:
    channels, height, width = shape
    raw, _ = read_client(list_images(files), (channels, height, width), rule)
    x = divide(cleaning.clean(raw), seed)["train"].x
    squares = np.square(x, dtype=np.float64).sum(axis=(0, 2, 3))
    sums = x.sum(axis=(0, 2, 3), dtype=np.float64)
    return {"count": int(x.shape[0] * height * width), "sums": torch.from_numpy(sums), "squares": torch.from_numpy(squares)}


def _describe_table(raw: Raw, train: Part, policy: Policy) -> Answer:
    column = raw.label
    told = [name for name in train.x.column_names if name != column and (not policy.columns or name in policy.columns)]
    columns = {name: bool(is_numeric(train.x.schema.field(name).type)) for name in told}
    units = {name: unit for name, unit in raw.units.items() if columns.get(name)}
    labels = {"labels": sorted(set(train.labels.tolist())), "label": column, "label_kind": train.kind}
    return {"kind": "table", **labels, "columns": columns, "units": units}


def _measure_table(label: str, train: Part, request: Mapping[str, Any], policy: Policy) -> Answer:
    if label in request["numeric"] + request["categorical"]:
        raise PolicyError(f"this node does not measure its label column {label!r}: the mean would tell how many samples each class has")
    table = train.x
    there = set(table.column_names)
    unknown = next((name for name in request["numeric"] + request["categorical"] if name not in there), None)
    if unknown is not None:
        raise PolicyError(f"this node has no column {unknown!r}, or its owner leaves it out (drop, only in node.toml)")
    for name in request["categorical"]:
        check_column(table, name, policy)
    summary = summarise(table, request["numeric"], request["categorical"])
    return {
        "numeric": {name: asdict(_of_several(moments)) for name, moments in summary.numeric.items()},
        "words": {name: list(words) for name, words in summary.words.items()},
    }


def _of_several(moments: Moments) -> Moments:
    """Moments as they are, or as if no value were present where there are so few that they would tell single ones."""
    few = moments.count < MIN_VALUES
    return Moments(0, 0.0, 0.0, moments.count + moments.missing) if few else moments
