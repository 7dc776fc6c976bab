"""A scripted server tries everything on a default node; what it learns is compared with what ``emdcfl node check`` prints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.attacks.hostile import HostileServer, digits, settings
from tests.attacks.test_crafted_models import crafted
from tests.attacks.test_forward_secrecy import B_RUN, B
from tests.attacks.test_policy import omega, states
from tests.engines.flower.test_privacy import leaves
from torch import Tensor
from typer.testing import CliRunner

from emdcfl.cli.app import app
from emdcfl.cli.node import report
from emdcfl.core.client import TASKS
from emdcfl.core.params import Network
from emdcfl.core.tasks import Training
from emdcfl.engines.flower.node import log as node_log
from emdcfl.engines.flower.node.home import read_config
from emdcfl.engines.flower.node.releases import Releases
from emdcfl.privacy.exchange import announced_key, fingerprint, load_secret, public_key
from emdcfl.transport import projected_width, projection

pytestmark = pytest.mark.slow

TRAINING = Training(local_epochs=1, batch_size=64, lr=0.01).as_dict()
ROUNDS = 2


def script() -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests, each a task and its arguments: honest ones, and every way to ask for more."""
    partners = {"partner": announced_key(B, B_RUN)}
    reference = {"partners": partners, "sizes": [16]}
    column = {"boxes": {}, "size": 16, "held_out": True, "keys": partners, "rows": ["partner"]}
    for task in TASKS:
        yield task, {}
    for round in range(1, ROUNDS + 1):
        yield "describe", {"round": round}
        yield "train", {"round": round, "theta": states(1)[0], "training": TRAINING}
        yield "train", {"round": round, "theta": states(1)[0], "training": TRAINING, "sample_weights": torch.zeros(1)}
        for reduction in ("mean", "argmin_counts", "per_batch", "per_sample"):
            for models in (2, 64):
                yield "evaluate", {"round": round, "models": states(models), "reduction": reduction, "split": "train"}
        for model in (omega() * round, omega() * -round, crafted("one bias"), crafted("dense biases")):
            for changed in ({}, {"projection": "none"}, {"projection_ratio": 1.0}, {"cost": "label-aware"}, {"exchange": "server-samples"}):
                yield "reference", {"round": round, "omega": model, "settings": settings(**changed), **reference}
            yield "project", {"round": round, "omegas": {"partner": model}, "settings": settings(projection="pair"), **column}
        yield "embed", {"round": round, "theta": omega(), "split": "train"}
        yield "deposit", {"round": round, "size": 8, "held_out": True, "settings": settings(exchange="server-samples")}
        yield "data_subspace", {"round": round, "split": "train", "vectors": 3, "flatten": "sample"}
    yield "reference", {"round": ROUNDS + 1, "omega": crafted("one bias"), "settings": settings(), **reference}
    for model in ("os:system", "builtins:eval", "no such model"):
        yield "describe", {"job": {"model": {"name": model, "options": {"command": "touch owned"}}}}
    for data in ({"scenario": "folder", "options": {"path": "/"}}, {"encoding": {}, "classes": [], "seed": 1}):
        yield "describe", {"job": {"data": data}}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[HostileServer, list[tuple[str, dict[str, Any]]]]:
    """The server after its script, and the transcript: task and answer."""
    server = HostileServer(tmp_path_factory.mktemp("hostile") / "home")
    (server.home / "partners.toml").write_text(f'partner = "{fingerprint(public_key(B))}"')
    return server, [(task, server.ask(task, **request)) for task, request in script()]


Played = tuple[HostileServer, list[tuple[str, dict[str, Any]]]]


def test_only_what_node_check_prints_was_answered(played: Played) -> None:
    server, transcript = played
    printed = {line.split()[0] for line in report(read_config(server.home / "node.toml"), server.home) if line.startswith("  ")}
    answered = {task for task, said in transcript if "reply" in said}
    assert {"describe", "train", "evaluate", "reference", "project"} <= answered <= printed


def test_embeddings_left_projected_and_under_few_models(played: Played) -> None:
    server, transcript = played
    policy = read_config(server.home / "node.toml").policy
    narrow = projected_width(policy.projection_ratio, 64)
    for task in ("reference", "project"):
        sent = {z.numpy().tobytes(): z for t, said in transcript if t == task for z in said.get("reply", {}).get("samples", {}).values()}
        assert 0 < len(sent) <= policy.models_per_round * ROUNDS
        assert all(z.shape[1] == narrow and len(z) <= policy.samples for z in sent.values())
    losses = [said["reply"]["table"] for task, said in transcript if task == "evaluate" and "reply" in said]
    assert losses and all(table.shape[0] <= policy.models_at_once and table.numel() <= policy.models_at_once for table in losses)


def test_no_sample_label_secret_row_of_r_or_raw_embedding_is_in_the_transcript(played: Played) -> None:
    server, transcript = played
    told = [leaf for _, said in transcript for leaf in leaves(said)]
    everything = b"".join(t.numpy().tobytes() if isinstance(t, Tensor) else t if isinstance(t, bytes) else str(t).encode() for t in told)
    secret, session = load_secret(server.home / "secret.key"), Releases(server.home / "state", "run").session()
    seed = session.derive("projection", "run", server.name)
    hidden = [secret._secret, session._secret, seed, *(row.tobytes() for row in projection(seed, 64, projected_width(0.9, 64)))]
    site, network = digits().sites[0], Network(digits().model)
    for split in (site.train, site.val):
        inputs = digits().preprocess(split.x)
        hidden += [sample.numpy().tobytes() for part in (split.x, inputs) for sample in part]
        hidden += [split.y.numpy().tobytes()]
        for model in (omega(), omega() * 2):
            network.load(model)
            with torch.no_grad():
                hidden += [z.numpy().tobytes() for z in network.embed(inputs).contiguous() if z.abs().sum() > 0]
    assert len(hidden) > 500
    assert [part for part in hidden if part in everything] == []


def test_the_owners_log_has_every_request_in_words_and_none_of_the_data(played: Played) -> None:
    server, transcript = played
    entries = list(node_log.read(server.home / "state"))
    assert len(entries) == len(transcript)
    for entry, (task, said) in zip(entries, transcript, strict=True):
        assert entry["text"].startswith(f"{task}: ")
        assert (entry["what"] == "released") == ("reply" in said)
    shown = CliRunner().invoke(app, ["node", "log", str(server.home), "--refused", "--last", "1000"]).output
    assert "policy.tasks in node.toml" in shown and "made to show the projection" in shown and "os:system" in shown
    assert "released" not in {line[21:30].strip() for line in shown.splitlines()}


def test_the_log_is_bounded_and_harmless_to_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_log, "MAX_BYTES", 2000)
    for i in range(200):
        request = {"job": {"run": f"\x1b[2J{i}"}, "round": "\n" * 50}
        node_log.note(tmp_path, "describe", request, {"failure": "\x1b]0;title\x07" + "x" * 10**5}, refused=True)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 3 * 2000
    (tmp_path / "log.jsonl").open("a").write("{damaged\n[]\n")
    entries = list(node_log.read(tmp_path))
    assert entries and all(text.isprintable() for entry in entries for text in entry.values())


def test_refusals_without_end_hide_no_release_from_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal quotes the server, so that some hundred requests fill the log; each may be eight at once, under names of any run."""
    monkeypatch.setattr(node_log, "MAX_BYTES", 20_000)
    server = HostileServer(tmp_path / "home", toml='trust = "relay"')
    for _ in range(2):
        assert "reply" in server.ask("reference", omega=omega(), partners={}, sizes=[16], settings=settings())
    for i in range(30):
        server.ask("describe", job={"run": f"{i}", "model": {"name": "\U0001f600" * 400, "options": {}}})
        server.send("hello", {"challenge": public_key(B), "nonce": bytes(16), "job": {}, "along": [{"task": "\U0001f600" * 40}] * 8})
        server.send("survey", {"question": "describe", "job": {"run": f"{i}"}})
    assert not any(entry["text"].startswith("reference") for entry in node_log.read(server.home / "state"))
    (count,) = (one for one in node_log.counts(server.home / "state") if one["what"] == "released")
    assert (count["task"], count["run"], count["count"]) == ("reference", "run", 2)
    assert len(node_log.counts(server.home / "state")) <= 3
    shown = CliRunner().invoke(app, ["node", "log", str(server.home), "--last", "1"]).output
    assert "released  run run: reference, 2 times since" in shown
    assert "reference" not in CliRunner().invoke(app, ["node", "log", str(server.home), "--refused"]).output


def test_requests_at_the_same_time_all_get_into_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that is full is put aside by one of them, not by each in turn; an entry that is lost would also refuse its answer."""
    monkeypatch.setattr(node_log, "MAX_BYTES", 20_000)
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda old, new: (time.sleep(0.05), replace(old, new))[1])

    def write(number: int) -> None:
        node_log.note(tmp_path, f"task-{number}", {}, {"reply": {}}, refused=False)

    with ThreadPoolExecutor(8) as several:
        list(several.map(write, range(300)))
    assert len({entry["text"] for entry in node_log.read(tmp_path)}) == 300
