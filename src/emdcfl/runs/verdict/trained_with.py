"""Whose updates went into which model: what ``summary.json``, model files, terminal and report say of it.

A site may forbid that others profit from its data, or must name whose models it uses, so this follows the averages that were made
(``methods.base.average_sets``), not the clusters: a cluster's model may be averaged over linked neighbours in other clusters, a member
trains from a model that holds earlier updates of others, and a small site may be served a model without going into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from emdcfl.core.units import names, plural
from emdcfl.methods.base import Serving

Origin = dict[str, Any]


def origins(serving: Serving, clients: Sequence[str], models: Sequence[str]) -> list[Origin] | None:
    """Return, for every model, who is served it, whose updates it holds, and their weights in its last average.

    None where the method does not say: every site that took part may have contributed then.
    """
    if serving.reached is None:
        return None
    found = []
    for k, name in enumerate(models):
        served = [clients[i] for i in torch.nonzero(serving.weights[:, k] > 0).flatten().tolist()]
        sites = [clients[i] for i in torch.nonzero(serving.reached[k]).flatten().tolist()]
        one: Origin = {"model": name, "serves": served, "sites": sites}
        if serving.shares is not None:
            one["shares"] = {clients[i]: float(serving.shares[k, i]) for i in torch.nonzero(serving.shares[k]).flatten().tolist()}
        found.append(one)
    return found


def untrained(summary: Mapping[str, Any]) -> list[str]:
    """Return the clients whose model nobody trained while others trained theirs: nothing is known of their group."""
    found = summary.get("trained_with") or []
    none = {client for one in found if not one["sites"] for client in one["serves"]}
    return [client for client in summary["clients"] if client in none] if any(one["sites"] for one in found) else []


def trained(summary: Mapping[str, Any]) -> int:
    """Return the number of sites that any group could hold: those that never trained are in none."""
    return len(summary["clients"]) - len(untrained(summary))


def in_words(summary: Mapping[str, Any]) -> list[str]:
    """Say whose updates went into the models: once where it is as the groups say, else for every model where it is not."""
    found = summary.get("trained_with")
    if found is None:
        return ["every site that took part may have contributed to every model; this method does not record whose updates went where"]
    used = [one for one in found if one["serves"]]
    odd = [one for one in used if set(one["sites"]) != set(one["serves"])]
    own = "every model holds updates of the sites that it serves, and of no others"
    if not odd:
        return [own]
    as_said = len(used) - len(odd)
    rest = [f"the other {plural(as_said, 'model')}: updates of the sites served, and of no others"] if as_said else []
    return [*(origin_in_words(one) for one in odd), *rest]


def origin_in_words(one: Origin) -> str:
    """Say whose updates one model holds."""
    served, sites, shares = set(one["serves"]), one["sites"], one.get("shares")
    if not sites:
        return f"the model of {names(one['serves'])} is the first one, which nobody trained; do not use it"
    parts = []
    inside = [c for c in sites if c in served]
    if inside:
        parts.append(f"updates of {names(inside)}")
    direct = [c for c in sites if c not in served and (shares is None or c in shares)]
    if direct:
        parts.append(f"{'also ' if inside else 'updates '}of {names(direct)}, whom it does not serve")
    indirect = [c for c in sites if c not in served and shares is not None and c not in shares]
    if indirect:
        parts.append(f"and, from earlier rounds or through others, of {names(indirect)}")
    without = [c for c in one["serves"] if c not in sites]
    if without:
        parts.append(f"none of {names(without)}, which only use{'s' if len(without) == 1 else ''} it")
    return f"the model of {names(one['serves'])} holds {', '.join(parts)}"
