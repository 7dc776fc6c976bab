"""The folder of a federation, its certificates, and what the server app makes of its options; no process is started."""

from __future__ import annotations

import importlib
import json
import os
import re
import ssl
import stat
import subprocess
import threading
import tomllib
import zipfile
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

import emdcfl
from emdcfl.apps import deployment, options, superlink
from emdcfl.apps.deployment import check, control
from emdcfl.apps.deployment.folder import clients_of_runs, create_operator, fingerprints
from emdcfl.apps.deployment.processes import LINK, process_ids, record, start_time
from emdcfl.apps.deployment.report import lines, metrics, metrics_server
from emdcfl.apps.deployment.submit import new_events, stop
from emdcfl.apps.options import Options
from emdcfl.apps.server import Journal, read_config
from emdcfl.cli import main
from emdcfl.core.errors import ConfigError, EmdcflError
from emdcfl.data import scenarios
from emdcfl.engines.flower.node.home import read_config as read_node
from emdcfl.runs.config import dump, load

ROOT = Path(emdcfl.__file__).parents[2]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> deployment.Deployment:
    return deployment.create(tmp_path_factory.mktemp("trial") / "federation", nodes=4)


def test_the_certificate_is_valid_for_loopback_and_signed_by_the_authority(four: deployment.Deployment) -> None:
    folder = four.path / "certificates"
    authority, server = (x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in ("ca.crt", "server.pem"))
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    ssl.create_default_context(cafile=str(folder / "ca.crt"))


def test_private_files_are_readable_by_their_owner_alone(four: deployment.Deployment) -> None:
    private = [four.path / "certificates" / "ca.key", four.path / "certificates" / "server.key"]
    private += [four.path / name for name in ("certificates/publisher.key", "server/operator.token", "flwr/credentials.yaml")]
    private += [four.home(node) / name for node in four.nodes for name in ("auth.key", "secret.key")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    folders = [four.path / name for name in ("certificates", "server", "logs", "jobs")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_every_node_has_keys_of_its_own(four: deployment.Deployment) -> None:
    publics = set()
    for node in four.nodes:
        key = load_ssh_private_key((four.home(node) / "auth.key").read_bytes(), None)
        public = load_ssh_public_key((four.home(node) / "auth.pub").read_bytes())
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert key.public_key() == public
        publics.add((four.home(node) / "auth.pub").read_bytes())
    assert len(publics) == len(set(fingerprints(four).values())) == 4


def test_the_run_config_fits_the_nodes(four: deployment.Deployment) -> None:
    chosen = load(four.path / "run.toml")
    built = scenarios.build(chosen.scenario.name, **chosen.scenario.options)
    assert [site.name for site in built.sites] == list(four.nodes) == ["rot0-1", "rot0-2", "rot90-1", "rot90-2"]
    assert (chosen.engine.name, chosen.engine.on_failure) == ("flower", "continue")


def test_the_script_starts_every_node(four: deployment.Deployment) -> None:
    script = (four.path / "start.sh").read_text()
    assert script.count("emdcfl node serve") == script.count("federation enrol") == 4
    assert "--enable-supernode-auth" in script
    assert "--insecure" not in script


def test_a_folder_of_own_data_gives_one_node_per_client_also_with_spaces_and_quotes(tmp_path: Path) -> None:
    from flwr.common.config import parse_config_args

    from emdcfl.apps.supernode import arguments

    data = tmp_path / 'my "own" data'
    for name in ("north", "south"):
        data.mkdir(exist_ok=True)
        (data / f"{name}.csv").write_text("x,label\n1,a\n")
    there = deployment.create(tmp_path / "a federation", data=data)
    assert list(there.nodes) == ["north", "south"] and load(there.path / "run.toml").scenario.name == "nodes"
    assert tomllib.loads((there.home("north") / "node.toml").read_text())["data"] == str((data / "north.csv").resolve())
    assert there.node_command("north")[-1] == str(there.home("north"))
    given = arguments(there.home("north"), "north", there.address, 9094)
    assert parse_config_args([given[-1]]) == {"name": "north", "home": str(there.home("north"))}
    assert {"--trusted-entities", "--auth-supernode-private-key", "--root-certificates"} <= set(given) and "--insecure" not in given


def _config_of_files(folder: Path, *more: str) -> Path:
    """The config of four sites: one has a column more, one is too small."""
    (folder / "data").mkdir()
    rows = ["age,visit,result", *(f"{i}.5,{i % 9 + 1}.1.2020,{'Yes' if i % 2 else 'No'}" for i in range(30))]
    for name in ("east", "north", "south", "tiny"):
        lines = [f"{'x' if i else 'note'},{row}" for i, row in enumerate(rows)] if name == "south" else rows
        (folder / "data" / f"{name}.csv").write_text("\n".join(lines), encoding="utf-8")
    lines = ["[scenario]", 'name = "folder"', f"path = {json.dumps(str(folder / 'data'))}", *more]
    (folder / "fix.toml").write_text("\n".join(lines), encoding="utf-8")
    return folder / "fix.toml"


def test_the_repairs_of_a_config_reach_the_nodes_and_what_the_server_decides_its_run(tmp_path: Path) -> None:
    repairs = ['label = "result"', "merge_labels = true", 'drop = "note"', 'date = ["visit:%d.%m.%Y"]', 'missing = ["-9"]', 'gaps = "none"']
    more = ['leave_out = ["tiny"]', "data_seed = 3", 'model = "mlp"', "[run]", "rounds = 7", "[engine]", "quorum = 0.7"]
    there = deployment.create(tmp_path / "fed", data=_config_of_files(tmp_path, *repairs, *more))
    assert list(there.nodes) == ["east", "north", "south"], "a site that is left out has no node"
    found = {name: read_node(there.home(name) / "node.toml") for name in there.nodes}
    assert {node.cleaning.drop for name, node in found.items() if name != "south"} == {()}, "a node cannot drop what it has not"
    for name, node in found.items():
        assert (node.label, node.merge_labels, node.date, node.missing, node.gaps) == ("result", True, ["visit:%d.%m.%Y"], ["-9"], None)
        assert node.policy.split_seed == 3 and node.data == str((tmp_path / "data" / f"{name}.csv").resolve())
    assert found["south"].cleaning.drop == ("note",)
    run = load(there.path / "run.toml")
    assert (run.scenario.name, run.scenario.options, run.run.rounds) == ("nodes", {"data_seed": 3, "model": "mlp"}, 7)
    assert (run.engine.name, run.engine.on_failure, run.engine.quorum) == ("flower", "continue", 0.7)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('task = "regression"', "a federation of nodes predicts classes"),
        ('client = "site"', "one table for all sites"),
        ('drop = ["notes"]', "did you mean 'note'"),
        ("dorp = []", "did you mean 'drop'"),
    ],
)
def test_what_a_federation_cannot_do_with_own_files_is_told_before_anything_is_made(tmp_path: Path, line: str, told: str) -> None:
    config = _config_of_files(tmp_path, 'label = "result"', line)
    with pytest.raises(EmdcflError, match=told):
        deployment.create(tmp_path / "fed", data=config)
    with pytest.raises(EmdcflError, match="one table for all sites"):
        deployment.create(tmp_path / "fed", data=tmp_path / "data" / "east.csv")
    assert not (tmp_path / "fed").exists()


@pytest.mark.parametrize(
    ("outcome", "state"),
    [({"ok": True, "rounds": 5}, "finished"), ({"ok": False, "error": "no"}, "failed"), (None, "unknown")],
)
def test_the_metrics_tell_how_the_latest_run_ended(tmp_path: Path, outcome: dict[str, object] | None, state: str) -> None:
    """A finished run that was resumed began no round, and is finished all the same."""
    there = deployment.create(tmp_path / "fed", nodes=2)
    assert 'emdcfl_run_state{state="failed"} 0' in metrics(deployment.report(there)), "no run yet"
    job = there.path / "jobs" / "1"
    job.mkdir()
    (job / "run-config.toml").write_text('out = "runs/one"')
    (job / "run.json").write_text('{"run": 1, "link": null}')
    if outcome is not None:
        (job / "outcome.json").write_text(json.dumps(outcome))
    told = dict(re.findall(r'^emdcfl_run_state{state="(.*)"} ([01])$', metrics(deployment.report(there)), re.M))
    assert [name for name, value in told.items() if value == "1"] == [state] and len(told) == 5
    told_to_people = list(lines(deployment.report(there)))[-1 if state != "failed" else -2]
    assert ("finished, 5 of 5 rounds complete" in told_to_people) == (state == "finished")


def test_rounds_before_a_run_was_resumed_count_and_those_of_baselines_do_not(tmp_path: Path) -> None:
    there = deployment.create(tmp_path / "fed", nodes=2)
    job = there.path / "jobs" / "1"
    job.mkdir()
    (job / "run-config.toml").write_text('out = "runs/one"')
    (job / "run.json").write_text('{"run": 1, "link": null}')
    found = []
    for event in (
        {"event": "log", "level": "INFO", "text": "run directory"},
        {"event": "begin", "round": 4, "total": 5},
        {"event": "end", "round": 4, "total": 5},
        {"event": "baselines", "rounds": 5},
        {"event": "begin", "round": 1, "total": 5},
    ):
        with (job / "progress.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")
        run = deployment.report(there)["run"]
        found.append((run["round"], run["rounds"]))
    assert found == [(0, 0), (3, 5), (4, 5), (5, 5), (5, 5)]


def test_a_port_of_the_metrics_that_is_taken_is_told(four: deployment.Deployment) -> None:
    with metrics_server(four, 0) as server, pytest.raises(ConfigError, match=f"{server.server_port}.*--port"):
        metrics_server(four, server.server_port)
    with pytest.raises(SystemExit) as done:
        main(["federation", "metrics", str(four.path), "--port", "65536"])
    assert done.value.code == 2


def test_mistakes_are_told(four: deployment.Deployment, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not empty"):
        deployment.create(four.path, nodes=4)
    for seconds in (0.0, float("nan")):
        with pytest.raises(ConfigError, match="deadline must be at least 1"):
            deployment.create(tmp_path / "late", nodes=2, deadline=seconds)
    assert not (tmp_path / "late").exists()
    with pytest.raises(ConfigError, match="between 2 and 64"):
        deployment.create(tmp_path / "one", nodes=1)
    with pytest.raises(ConfigError, match="emdcfl federation init"):
        deployment.Deployment.read(tmp_path / "nothing")


def test_a_process_number_that_was_given_to_another_is_not_taken_for_ours(four: deployment.Deployment) -> None:
    record(four, {"superlink": {"pid": os.getpid(), "started": "1"}, "rot0-1": {"pid": os.getpid(), "started": start_time(os.getpid())}})
    try:
        assert process_ids(four) == {"superlink": None, "rot0-1": os.getpid()}
        found = deployment.report(four)
        assert (found["superlink"]["state"], found["nodes"]["rot0-1"]["process"]) == ("ended by itself", "running")
    finally:
        record(four, {})
    assert {node["process"] for node in deployment.report(four)["nodes"].values()} == {"stopped"}


def test_a_node_is_online_if_its_own_process_connected(four: deployment.Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a minute after a kill, the SuperLink takes the process that was started in its place for it."""
    seen = []
    record(four, {"rot0-1": {"pid": os.getpid(), "started": start_time(os.getpid())}})
    try:
        for age in (timedelta(days=1), timedelta(0)):
            since = (datetime.now(UTC) - age).isoformat()
            monkeypatch.setattr(control, "enrolled", lambda there, since=since: [control.Enrolled("rot0-1", 1, b"", True, since)])
            node = deployment.report(four)["nodes"]["rot0-1"]
            seen.append((node["process"], node["online"], node["since"] == since))
    finally:
        record(four, {})
    assert seen == [("running", False, False), ("running", True, True)]


def test_down_ends_what_outlives_the_process_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = deployment.create(tmp_path / "federation", nodes=2)
    monkeypatch.setattr("emdcfl.apps.deployment.processes.GRACE", 0.5)
    deaf = "trap 'exit 0' TERM; (trap '' TERM; echo; sleep 300) & wait"
    with subprocess.Popen(["sh", "-c", deaf], start_new_session=True, stdout=subprocess.PIPE) as link:
        assert link.stdout is not None and link.stdout.readline()
        record(there, {LINK: {"pid": link.pid, "started": start_time(link.pid)}})
        assert deployment.down(there) == [LINK]
        assert link.stdout.read() == b"", "the child holds the other end, and is gone"


def test_a_superlink_that_dies_as_soon_as_it_has_taken_the_run_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = deployment.create(tmp_path / "federation", nodes=2)
    with subprocess.Popen(["sleep", "300"]) as link:
        record(there, {LINK: {"pid": link.pid, "started": start_time(link.pid)}})

        def taken(*_: object) -> int:
            link.kill()
            return 1

        monkeypatch.setattr(control, "start_run", taken)
        with pytest.raises(EmdcflError, match="the SuperLink ended during the run; start it again"):
            deployment.submit(there, load(there.path / "run.toml"), tmp_path / "run")


def test_the_server_reads_a_config_as_text_or_file_and_runs_it_over_flower(four: deployment.Deployment) -> None:
    from_file = read_config(str(four.path / "run.toml"))
    from_text = read_config(dump(from_file))
    assert from_file == from_text
    assert read_config("").engine.name == "flower"


def test_the_journal_is_read_line_by_line_as_it_grows(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(1, 2, ("a",))
    events, position = new_events(tmp_path / "progress.jsonl", 0)
    assert [e["event"] for e in events] == ["begin"]
    journal.reply("train", "a", {"loss": 0.5, "theta": "not written"})
    with (tmp_path / "progress.jsonl").open("a") as file:
        file.write('{"event": "half')
    events, position = new_events(tmp_path / "progress.jsonl", position)
    assert [(e["event"], e["loss"]) for e in events] == [("reply", 0.5)]
    assert new_events(tmp_path / "progress.jsonl", position)[0] == []
    journal.outcome(ok=True)
    assert json.loads((tmp_path / "outcome.json").read_text()) == {"ok": True}


def test_the_app_takes_the_options_of_the_code(four: deployment.Deployment) -> None:
    app = tomllib.loads((four.path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["config"] == Options().as_dict()
    assert Options.read(app["config"]) == Options()
    for where in app["components"].values():
        module, _, name = where.partition(":")
        assert hasattr(importlib.import_module(module), name)
    assert re.findall(r"^``([\w-]+)``", options.__doc__ or "", re.M) == list(app["config"])
    with zipfile.ZipFile(four.operator / superlink.BUNDLE) as bundle:
        assert not [name for name in bundle.namelist() if name.endswith(".py")], "the bundle holds no code"


def test_flowers_own_command_ends_at_once_and_names_ours() -> None:
    from flwr.common.config import validate_config

    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("not run from a source tree")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["version"] == emdcfl.__version__
    valid, errors, _ = validate_config(project, check_module=False)
    assert not valid and "emdcfl run" in errors[0]


def test_a_server_program_may_start_slowly_and_a_dead_one_is_noticed_as_early_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore.corestate import sql_corestate

    state: Any = sql_corestate
    before = state.HEARTBEAT_PATIENCE * state.HEARTBEAT_DEFAULT_INTERVAL
    for name in ("HEARTBEAT_PATIENCE", "HEARTBEAT_DEFAULT_INTERVAL"):
        monkeypatch.setattr(state, name, getattr(state, name))  # put back afterwards
    superlink.allow_slow_starts()
    assert state.HEARTBEAT_PATIENCE * state.HEARTBEAT_DEFAULT_INTERVAL == before < state.HEARTBEAT_DEFAULT_INTERVAL
    claim = state.SqlCoreState.claim_task.__code__.co_names
    assert "HEARTBEAT_DEFAULT_INTERVAL" in claim and "HEARTBEAT_PATIENCE" not in claim


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dedline": 5.0}, "no key 'dedline': did you mean 'deadline'"),
        ({"deadline": "5"}, "deadline must be float, got '5'"),
        ({"resume": 1}, "resume must be bool, got 1"),
        ({"deadline": 0}, "deadline must be at least 1, got 0.0"),
        ({"deadline": float("nan")}, "deadline must be finite, got nan"),
        ({"wait": -1}, "wait must be at least 0"),
        ({"out": ""}, "out must name a run directory"),
    ],
)
def test_a_mistake_in_the_run_config_is_told(given: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        Options.read(given)


def test_the_sites_that_a_run_asks_are_read_from_its_config(four: deployment.Deployment, tmp_path: Path) -> None:
    there = create_operator(tmp_path / "fed", ["north", "south"], host="fl.example.org")
    assert clients_of_runs(there) == ["north", "south"]
    assert clients_of_runs(four) is None, "a built-in scenario has its own"
    (there.path / "run.toml").write_text('[scenario]\nname = "nodes"\n')
    assert clients_of_runs(there) is None


def test_the_certificate_holds_for_the_nodes_and_for_the_server_program_beside_the_superlink(tmp_path: Path) -> None:
    there = create_operator(tmp_path / "fed", ["a", "b"], host="fl.example.org")
    found = x509.load_pem_x509_certificate((there.authority.parent / "server.pem").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"fl.example.org", "localhost"}
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


def test_stop_waits_for_the_server_of_a_run_also_where_a_service_runs_the_superlink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, outcome = deployment.Deployment(tmp_path, 1, [], 600.0, 60.0), tmp_path / "outcome.json"
    monkeypatch.setattr(control, "stop_run", lambda *_: threading.Timer(0.2, outcome.touch).start())
    stop(there, tmp_path, 1)
    assert outcome.exists(), "else --resume finds the run directory in use"
    outcome.unlink()
    monkeypatch.setattr(control, "stop_run", Mock(side_effect=control.ControlError("nobody answers")))
    stop(there, tmp_path, 1)  # there is nothing to wait for


def test_pages_for_developers_are_asked_for_as_a_browser_does(four: deployment.Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_link(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if (request.method, request.url.path) == ("GET", "/docs") else 403)

    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=httpx.MockTransport(open_link)))
    monkeypatch.setattr(control, "ask", Mock(side_effect=control.ControlError("refused", 403)))
    monkeypatch.setattr(check, "_foreign_bundle", lambda _: check.Attack("bundle", True, ""))
    broken = [attack.name for attack in check.attacks(four) if attack.held is not True]
    assert broken == ["read the SuperLink's pages for developers"]
