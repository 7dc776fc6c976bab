"""Everything the server receives in a run, recorded: no R, no seed, no raw embedding, no data; and R cannot be rebuilt from it."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.flower import loopback
from tests.methods import toy
from torch import Tensor

from emdcfl.engines.flower import codec
from emdcfl.engines.flower.connected import ALONG
from emdcfl.methods import make
from emdcfl.privacy.exchange import open_sealed, pair_seed, public_key
from emdcfl.transport import projected_width, projection

SCENARIO = toy.toy(groups=2, per_group=2, n=48)
TRAINING = toy.Training(local_epochs=1, batch_size=16, lr=0.05)
WIDTH = 8
NARROW = projected_width(0.9, WIDTH)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


def record(projection_mode: str) -> tuple[loopback.LoopbackGrid, list[tuple[str, str, Any]], list[bytes]]:
    """Run EMD-CFL and return the grid, what the server received (task, client, answer), and every message's raw bytes, both ways."""
    grid = loopback.loopback(SCENARIO)
    fed = loopback.federation(SCENARIO, grid, training=TRAINING)
    method = make("emdcfl", projection=projection_mode, distances="all")
    toy.history(fed, method, 2)
    received, raw = [], []
    for message, reply in grid.log:
        assert reply is not None
        said = codec.decode(reply.content)
        task = message.metadata.message_type.removeprefix("query.")
        client = said.get("client", said.get("name"))
        if task == "hello":
            received.append(("describe", client, *said.pop(ALONG)))
        received.append((task, client, said))
        for record_ in (message.content, reply.content):
            raw += [a.data for part in record_.array_records.values() for a in part.values()]
            raw += [v if isinstance(v, bytes) else str(v).encode() for part in record_.config_records.values() for v in part.values()]
    return grid, received, raw


def secrets(grid: loopback.LoopbackGrid, mode: str) -> dict[tuple[str, str], bytes]:
    """The seeds in use, from the nodes' own secrets: by row, or by pair."""
    clients = {node.name: node.held for node in grid.nodes.values()}
    if mode == "row":
        return {(n, n): c.secret.derive("projection", c.run, n) for n, c in clients.items()}
    pairs = combinations(sorted(clients), 2)
    return {(a, b): pair_seed(clients[a].secret, public_key(clients[b].secret), context=("run", a, b, "")) for a, b in pairs}


@pytest.mark.parametrize("mode", ["row", "pair"])
def test_neither_seed_nor_matrix_nor_key_is_ever_sent(mode: str) -> None:
    grid, _, raw = record(mode)
    everything = b"".join(raw)
    for seed in secrets(grid, mode).values():
        matrix = projection(seed, WIDTH, NARROW)
        for hidden in (seed, seed.hex().encode(), matrix.tobytes(), matrix.T.copy().tobytes(), matrix[0].tobytes(), matrix[:, 0].tobytes()):
            assert hidden not in everything
    for node in grid.nodes.values():
        assert node.secret._secret not in everything
        assert node.secret.derive("x25519 node key") not in everything


@pytest.mark.parametrize("mode", ["row", "pair"])
def test_no_sample_and_no_unprojected_embedding_is_ever_sent(mode: str) -> None:
    grid, received, raw = record(mode)
    everything = b"".join(raw)
    states = {c: said["reply"]["theta"] for task, c, said in received if task == "train"}
    for node in grid.nodes.values():
        client = node.held
        for split in (client.site.train, client.site.val, *client.site.tests.values()):
            for row in split.x[:20]:
                assert row.numpy().tobytes() not in everything
        for name, theta in states.items():
            for split in ("train", "val"):
                z = client.embeddings(theta, split, torch.arange(20))
                for row in z[z.abs().sum(1) > 0]:
                    assert row.numpy().tobytes() not in everything, f"an embedding of {client.name} under {name}'s model"


@pytest.mark.parametrize("mode", ["row", "pair"])
def test_the_server_receives_what_the_protocol_names_and_nothing_else(mode: str) -> None:
    _, received, _ = record(mode)
    fields = {task: set() for task, _, _ in received}
    for task, _, said in received:
        fields[task] |= set(said.get("reply", said))
    assert fields.pop("hello") == {"name", "key", "proof", "version"}
    matched = mode == "row"  # samples of equal class counts: the variance inside classes, and of how many blocks a sample consists
    assert fields == {
        "describe": {"n", "m", "key"},
        "train": {"theta", "n", "loss", "steps"},
        "reference": {"samples", "tau", "variance", "boxes", "refused"} | ({"within", "freedom"} if matched else set()),
        "project": {"samples", "refused"} | ({"matched", "offers"} if matched else set()),
    }
    for task, _, said in received:
        if task in ("reference", "project"):
            assert all(t.shape[1] == NARROW for t in leaves(said["reply"]["samples"]))
            assert said["reply"]["refused"] == {}  # names are in it only where a partner's key or box is unusable


@pytest.mark.parametrize("mode", ["row", "pair"])
def test_r_cannot_be_rebuilt_from_what_is_relayed(mode: str) -> None:
    """Try every value the server saw as a seed, and every public key and value as the key of every sealed box."""
    grid, received, raw = record(mode)
    true = {projection(seed, WIDTH, NARROW).tobytes() for seed in secrets(grid, mode).values()}
    small = {value for value in raw if len(value) <= 128}
    keys = {said["key"] for task, _, said in received if task == "hello"}
    assert len(keys) == 4
    for value in small | keys | {a + b for a in keys for b in keys}:
        assert projection(value, WIDTH, NARROW).tobytes() not in true
    from emdcfl.core.errors import ClientError
    from emdcfl.core.keys import NodeSecret

    boxes = [(c, to, box) for task, c, said in received if task == "reference" for to, box in said["reply"]["boxes"].items()]
    assert bool(boxes) == (mode == "row")
    guesses = [NodeSecret(value) for value in small if len(value) == 32]
    for sender, receiver, box in boxes:
        for guess in guesses:
            for key in keys:
                with pytest.raises(ClientError):
                    open_sealed(guess, key, box, context=("run", sender, receiver))
    for guess in guesses:
        for key in keys:
            for a, b in combinations(sorted(node.name for node in grid.nodes.values()), 2):
                assert projection(pair_seed(guess, key, context=("run", a, b, "")), WIDTH, NARROW).tobytes() not in true


def test_the_projected_sample_does_not_give_the_embedding_back_without_r() -> None:
    """With R the sample is what it should be; with anybody else's R, least squares recovers nothing like it."""
    grid, received, _ = record("row")
    client = grid.nodes[100].held
    theta = next(said["reply"]["theta"] for task, c, said in received if task == "train" and c == client.name)
    sent: Tensor = next(said["reply"]["samples"]["*"] for task, c, said in received if task == "reference" and c == client.name)
    z = client.embeddings(theta, "train", client.sample("train", 512))
    seeds = secrets(grid, "row")
    right, wrong = (torch.from_numpy(projection(seeds[n, n], WIDTH, NARROW)) for n in ("site-0", "site-1"))
    assert torch.allclose(z @ right, sent, atol=1e-5)

    def error(r: Tensor) -> float:
        back = sent.numpy() @ np.linalg.pinv(r.numpy())
        return float(np.linalg.norm(back - z.numpy()) / np.linalg.norm(z.numpy()))

    assert error(right) < 0.7 < error(wrong)
