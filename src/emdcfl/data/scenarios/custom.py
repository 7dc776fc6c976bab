"""``custom``: any source, any composition of shifts and divisions, described by values that fit into TOML.

.. code-block:: toml

    [scenario]
    name = "custom"
    source = "digits"
    clients = 3                       # per group
    partition = [
        { kind = "rotation", angles = [0, 180] },
        { kind = "noise", sigmas = [0.0, 0.2] },
        { kind = "dirichlet", alpha = 0.5 },
    ]

Shifts (rotation, colour, blur, noise, domain, classes, permutation) make groups; at most one division (iid, balanced, dirichlet, shards,
quantity; default iid) deals a group to its clients. The groups are recorded as the truth.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from emdcfl.core import keys
from emdcfl.core.checks import check_options
from emdcfl.core.errors import ConfigError, nearest
from emdcfl.data import partition as division
from emdcfl.data import sources
from emdcfl.data.own import defaults
from emdcfl.data.own.parts import FRACTIONS, MIN_SAMPLES
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.shift import SHIFTS, SamplePool, ShiftSetting
from emdcfl.data.split import Indices, split_indices
from emdcfl.data.types import Scenario, Site, Split

DIVISIONS: dict[str, Callable[..., list[Indices]]] = {
    "iid": division.iid,
    "balanced": division.balanced,
    "dirichlet": division.dirichlet,
    "shards": division.shards,
    "quantity": division.quantity,
}


@scenario("custom", "any source with your own shifts and divisions (partition = [{kind = …}, …])")
def custom(
    *,
    source: str,
    partition: Sequence[Mapping[str, Any]] = (),
    clients: int = 2,
    share_samples: bool = True,
    samples: int | None = None,
    model: str | None = None,
    data_seed: int = 0,
    data_root: str | None = None,
) -> Scenario:
    """Build a custom scenario from digits, mnist, cifar10 or pacs, with so many ``clients`` per group.

    ``partition`` lists shifts in the order they are applied, and at most one division. With ``share_samples`` every group gets all samples,
    shuffled independently (as in the paper); otherwise groups divide them. ``samples`` is the most that are used of the source. The network
    is by default chosen by the size of the images.
    """
    if samples is not None and samples < 1:
        raise ConfigError(f"custom: expected samples >= 1, got {samples}; leave it out to use them all")
    origin = sources.load(source, data_root=data_root)
    rows = keys.generator(data_seed, source, 0, "draw").permutation(len(origin))[:samples]
    pool = SamplePool("", origin.images, origin.labels, origin.columns).take(np.sort(rows))
    shifts = [spec for spec in partition if _kind(spec) in SHIFTS]
    dealing = [spec for spec in partition if _kind(spec) in DIVISIONS]
    if len(dealing) > 1:
        raise ConfigError(f"custom: at most one division among {', '.join(DIVISIONS)}, got {len(dealing)}")
    pools = _shifted(pool, shifts, origin, share_samples=share_samples, data_seed=data_seed)
    sites, truth = [], {}
    for group in pools:
        for name, members in _dealt(group, dealing[0] if dealing else {"kind": "iid"}, clients, data_seed):
            sites.append(_site(name, group, members, data_seed))
            truth[name] = group.name
    model = model or ("resnet18" if pools[0].images.shape[-1] > 64 else None)
    images = [site.train.x.numpy() for site in sites]
    return Scenario(
        name="custom",
        sites=tuple(sites),
        classes=origin.classes,
        preprocess=replace(defaults.image_preprocess(images, model), size=224 if defaults.is_pretrained(model) else None),
        model=defaults.recipe(model, shape=pools[0].images.shape[1:], classes=len(origin.classes)),
        groups=truth,
        k=len(pools),
        defaults=defaults.training(model),
    )


def _shifted(
    pool: SamplePool, shifts: Sequence[Mapping[str, Any]], origin: sources.LabelledImages, *, share_samples: bool, data_seed: int
) -> list[SamplePool]:
    """Apply every combination of the shifts' settings, to all samples or each to its own piece of them."""
    combinations = list(itertools.product(*(_settings(spec, origin, data_seed) for spec in shifts)))
    if not combinations:
        raise ConfigError("custom: a shift needs at least one setting")
    pieces = [pool] * len(combinations)
    if not share_samples:
        # Groups that select different samples need not divide them.
        rivals = [tuple(setting.suffix for setting in settings if not setting.chooses) for settings in combinations]
        distinct = list(dict.fromkeys(rivals))
        shares = division.iid(pool.labels, len(distinct), keys.generator(data_seed, "groups", 0, "divide"))
        pieces = [pool.take(shares[distinct.index(rival)]) for rival in rivals]
    pools = []
    for piece, settings in zip(pieces, combinations, strict=True):
        for setting in settings:
            piece = replace(setting.change(piece), name=f"{piece.name}+{setting.suffix}".strip("+"))
        pools.append(replace(piece, name=piece.name or "all"))
    if len({p.name for p in pools}) < len(pools):
        raise ConfigError(f"custom: two groups have the same name ({', '.join(p.name for p in pools)}): give each shift distinct settings")
    if len({p.images.shape[1:] for p in pools}) > 1:
        raise ConfigError("custom: the groups' images differ in size; with rotation use expand = false")
    return pools


def _dealt(group: SamplePool, spec: Mapping[str, Any], clients: int, data_seed: int) -> list[tuple[str, Indices]]:
    divide = DIVISIONS[_kind(spec)]
    options = _options(spec, divide, given=("labels", "clients", "rng"))
    shares = divide(group.labels, clients, keys.generator(data_seed, group.name, 0, "deal"), **options)
    return [(f"{group.name}-{i}", share) for i, share in enumerate(shares, start=1)]


def _site(name: str, group: SamplePool, members: Indices, data_seed: int) -> Site:
    if len(members) < MIN_SAMPLES:
        raise ConfigError(
            f"custom: client {name!r} has {len(members)} samples; at least {MIN_SAMPLES} are needed (fewer clients or groups)"
        )
    parts = split_indices(len(members), FRACTIONS, keys.generator(data_seed, name, 0, "split"))
    train, val, test = (
        Split(torch.from_numpy(np.ascontiguousarray(group.images[members[p]])), torch.from_numpy(group.labels[members[p]])) for p in parts
    )
    return Site(name, train, val, {"test": test})


def _settings(spec: Mapping[str, Any], origin: sources.LabelledImages, data_seed: int) -> list[ShiftSetting]:
    kind = _kind(spec)
    given: dict[str, Any] = {}
    if kind in ("noise", "permutation"):
        given["data_seed"] = data_seed
    if kind in ("classes", "permutation"):
        given["number_of_classes"] = len(origin.classes)
    if kind == "domain":
        column = spec.get("column", "domain")
        if column not in origin.vocabularies:
            raise ConfigError(f"custom: the source has no column {column!r} (it has: {', '.join(origin.vocabularies) or 'none'})")
        given["vocabulary"] = origin.vocabularies[column]
        spec = {"values": list(origin.vocabularies[column]), **spec}
    return SHIFTS[kind](**_options(spec, SHIFTS[kind], given=tuple(given)), **given)


def _options(spec: Mapping[str, Any], function: Callable[..., Any], *, given: Sequence[str]) -> dict[str, Any]:
    """Return the options of a shift or division, after a look at their names and types; ``given`` comes from elsewhere."""
    options = {key: value for key, value in spec.items() if key != "kind"}
    parameters = {n: p for n, p in inspect.signature(function).parameters.items() if n not in given}
    for key in options:
        if key not in parameters:
            raise ConfigError(f"custom: {spec['kind']} has no option {key!r}: {nearest(key, parameters)}")
    for key, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and key not in options:
            raise ConfigError(f"custom: {spec['kind']} needs {key}")
    check_options(function, options, f"custom: {spec['kind']}")
    return options


def _kind(spec: Mapping[str, Any]) -> str:
    known = [*SHIFTS, *DIVISIONS]
    kind = spec.get("kind")
    if kind not in known:
        raise ConfigError(f"custom: unknown kind {kind!r} in partition: {nearest(str(kind), known)}")
    return str(kind)
