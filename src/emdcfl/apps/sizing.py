r"""How many bytes a run of EMD-CFL moves, before it is run.

With C clients, :math:`P` parameters of which :math:`|\omega|` belong to the embedding, projected width p, n train and m validation
samples a side, four bytes each, the server sends and receives over T rounds, of which E are tested:

.. math::

    \text{sent} &= 4C\bigl[(T + E)P + |\omega| + (C-1)|\omega|\bigr] \\
    \text{received} &= 4C\bigl[TP + np + (C-1)mp\bigr]

The terms are: a model to train from and one to test in each round; in round 1, the client's own :math:`\omega` and its partners'; back,
a trained model, the projected train sample, and the projected validation sample under every partner's model. What is left out (names,
keys, losses, Flower's own headers) is a few kilobytes a message.

Imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bytes:
    """Bytes between the server and all nodes together."""

    sent: int
    received: int


def bytes_of_run(
    *,
    clients: int,
    parameters: int,
    embedding: int,
    width: int,
    train: int = 512,
    validation: int = 512,
    rounds: int = 10,
    tests: int | None = None,
) -> Bytes:
    """Return what a run with full participation and ``projection = "row"`` moves; every round is tested unless ``tests`` says how many.

    Examples
    --------
    >>> bytes_of_run(clients=4, parameters=1_000_000, embedding=900_000, width=57, rounds=10)
    Bytes(sent=377600000, received=161867776)
    """
    scored = rounds if tests is None else tests
    sent = (rounds + scored) * parameters + embedding + (clients - 1) * embedding
    received = rounds * parameters + train * width + (clients - 1) * validation * width
    return Bytes(4 * clients * sent, 4 * clients * received)
