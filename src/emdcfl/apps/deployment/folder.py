"""The folder of a federation. In a trial, everything that would lie on several machines side by side; else the operator's part.

::

    federation.toml           names, ports, deadlines
    run.toml                  a config for 'emdcfl run' that fits these nodes
    certificates/             ca.crt, server.pem, server.key; ca.key and publisher.key, to issue and sign more: keep them elsewhere
    app/pyproject.toml        the Flower app: where the code is, not the code itself
    flwr/                     address and token for Flower's own command (FLWR_HOME)
    server/                   operator.token, the signed app, the SuperLink's database, clients.toml: which key is whose
    nodes/<name>/             node.toml, ca.crt, auth.key, secret.key, partners.toml, trusted.yaml, state: what a node's machine would hold
    start.sh                  the commands that 'emdcfl federation up' runs, to read and to adapt
    logs/  jobs/              what the processes say; one folder per submitted run
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

import emdcfl
from emdcfl.apps import superlink
from emdcfl.apps.deployment.certificates import make_certificates, make_node_key, make_publisher_key, sign_bundle, write_private
from emdcfl.apps.supernode import HOST, QUIET, free_port
from emdcfl.core.checks import NODE_NAME, names_node
from emdcfl.core.errors import ConfigError

CONNECTION = "federation"
MAX_NODES = 64


@dataclass(frozen=True)
class Deployment:
    """A federation's folder, read. ``nodes`` are those of this machine."""

    path: Path
    port: int
    nodes: Sequence[str]
    deadline: float
    wait: float
    host: str = HOST

    @classmethod
    def read(cls, path: str | Path) -> Deployment:
        """Read ``federation.toml`` of a folder that ``create`` wrote."""
        folder = Path(path).resolve()
        try:
            raw = tomllib.loads((folder / "federation.toml").read_text(encoding="utf-8"))
            waits = float(raw["deadline"]), float(raw["wait"])
            return cls(folder, int(raw["port"]), list(raw["nodes"]), *waits, str(raw.get("host", HOST)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder}: not a federation ({error}); make one with: emdcfl federation init {path} --nodes 4") from error

    def home(self, node: str) -> Path:
        return self.path / "nodes" / node

    @property
    def address(self) -> str:
        """Where the SuperLink is."""
        return f"{self.host}:{self.port}"

    @property
    def authority(self) -> Path:
        return self.path / "certificates" / "ca.crt"

    @property
    def operator(self) -> Path:
        """The operator's folder: token, signed app, database."""
        return self.path / "server"

    def link_command(self) -> list[str]:
        c = self.path / "certificates"
        tls = ["--ssl-ca-certfile", f"{c}/ca.crt", "--ssl-certfile", f"{c}/server.pem", "--ssl-keyfile", f"{c}/server.key"]
        where = ["--host", HOST if self.host == HOST else "0.0.0.0", "--port", str(self.port), "--database", f"{self.operator}/link.db"]
        program = [sys.executable, "-m", superlink.__name__, "--operator", str(self.operator)]
        return [*program, *tls, *where, "--enable-supernode-auth", "--disable-runtime-dependency-installation"]

    def node_command(self, node: str) -> list[str]:
        return [sys.executable, "-m", "emdcfl", "node", "serve", str(self.home(node))]

    def environment(self) -> dict[str, str]:
        """Variables for a process of the federation."""
        # Flower finds its own helper programs by name, and looks for runs to start once a second unless told otherwise.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        more = {"PATH": path, "FLWR_HOME": str(self.path / "flwr"), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
        return {**QUIET, **more, "OMP_NUM_THREADS": "1"}


def create(path: str | Path, *, nodes: int | None = None, data: str | Path | None = None, deadline: float = 600.0) -> Deployment:
    """Write the folder of a federation of ``nodes`` clients of ``rotated-digits``, or one per client of ``data``: a folder, or a config."""
    from emdcfl.apps.deployment.own_files import trial_files  # not for every command: it loads torch
    from emdcfl.data import scenarios
    from emdcfl.privacy.exchange import load_secret

    folder = _empty(path)
    if data is None:
        options = _digits(4 if nodes is None else nodes)
        names = [site.name for site in scenarios.build("rotated-digits", **options).sites]
        run: dict[str, Any] = {"scenario": {"name": "rotated-digits", **options}}
        files: dict[str, dict[str, Any]] = {name: {"data": "scenario"} for name in names}
    else:
        files, run = trial_files(Path(data))
        names = list(files)
        if nodes not in (None, len(names)):
            raise ConfigError(f"{data} holds {len(names)} clients, got --nodes {nodes}; leave it out")
    check_names(names)
    deployment = _write_operator(folder, run, port=free_port(), deadline=deadline, nodes=names)
    for name in names:
        home = _made(deployment.home(name))
        make_node_key(home)
        load_secret(home / "secret.key")
        for file in ("ca.crt", "trusted.yaml"):
            shutil.copyfile(deployment.path / "certificates" / file, home / file)
        about = {"name": name, "superlink": deployment.address, **files[name]}
        seed = run["scenario"].get("data_seed", 0)
        (home / "node.toml").write_text(_NODE.format(about=tomli_w.dumps(about), home=home, seed=seed), encoding="utf-8")
    prints = fingerprints(deployment)
    for name in names:
        write_list(deployment.home(name) / "partners.toml", {other: prints[other] for other in names if other != name})
    write_list(deployment.operator / "clients.toml", prints)
    _write_start(deployment)
    return deployment


def create_operator(path: str | Path, sites: Sequence[str], *, host: str, deadline: float = 600.0) -> Deployment:
    """Write the operator's folder of a federation whose nodes are on other machines and reach it at ``host``."""
    folder = _empty(path)
    if len(set(sites)) < 2:
        raise ConfigError(f"expected at least two sites, got {', '.join(sites) or 'none'}; give --site once for each")
    check_names(sites)
    if len(set(sites)) < len(sites):
        raise ConfigError(f"expected each site once, got {', '.join(sites)}")
    run = {"scenario": {"name": "nodes", "clients": list(sites)}}
    return _write_operator(folder, run, host=host, port=8000, deadline=deadline, nodes=[])


def _write_operator(folder: Path, run: Mapping[str, Any], *, port: int, deadline: float, **about: Any) -> Deployment:
    """Write what the SuperLink and its operator need: certificates, token, signed app, configs."""
    from flwr.cli.build import build_fab_from_disk

    from emdcfl.apps.options import Options

    Options(deadline=deadline)  # a wrong one is refused before anything is written
    host = str(about.get("host", HOST))
    own = ["localhost", HOST]  # the server program, beside the SuperLink, reaches it there
    make_certificates(_made(folder / "certificates"), hosts=list(dict.fromkeys([host, *own])))
    make_publisher_key(folder / "certificates")
    numbers = {"port": port, "deadline": deadline, "wait": 60.0, **about}
    (folder / "federation.toml").write_text(tomli_w.dumps(numbers), encoding="utf-8")
    engine = {**run.get("engine", {}), "name": "flower", "on_failure": "continue"}
    (folder / "run.toml").write_text(tomli_w.dumps({**run, "engine": engine}), encoding="utf-8")
    app = _APP.format(version=emdcfl.__version__, config=tomli_w.dumps(Options().as_dict()))
    (_made(folder / "app") / "pyproject.toml").write_text(app, encoding="utf-8")
    for name in ("server", "logs", "jobs"):
        _made(folder / name)
    for name in ("server", "certificates", "logs", "jobs"):  # keys, messages, configs and names of sites
        (folder / name).chmod(0o700)
    deployment = Deployment.read(folder)
    token = secrets.token_urlsafe(32)
    write_private(deployment.operator / superlink.TOKEN, token.encode())
    bundle = build_fab_from_disk(folder / "app")
    (deployment.operator / superlink.BUNDLE).write_bytes(bundle)
    signed = sign_bundle(folder / "certificates", bundle)
    (deployment.operator / superlink.SIGNATURE).write_text(json.dumps(signed), encoding="utf-8")
    _write_connection(deployment, token)
    return deployment


def _write_connection(deployment: Deployment, token: str) -> None:
    """Write address and token for Flower's own command."""
    from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
    from flwr.common.constant import AuthnType
    from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

    home = _made(deployment.path / "flwr")
    there = {"address": deployment.address, "root-certificates": str(deployment.authority)}
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: there}}), encoding="utf-8")
    write_private(home / "credentials.yaml", b"{}")
    store = FileCredentialStore(home / "credentials.yaml")
    store.set(AUTHN_TYPE_STORE_KEY % deployment.address, AuthnType.OIDC.encode())  # the only kind of login that sends a token
    for key in (ACCESS_TOKEN_STORE_KEY, REFRESH_TOKEN_STORE_KEY):
        store.set(key % deployment.address, token.encode())


def write_list(path: Path, prints: Mapping[str, str]) -> None:
    path.write_text(tomli_w.dumps(dict(sorted(prints.items()))), encoding="utf-8")


def fingerprints(deployment: Deployment) -> dict[str, str]:
    from emdcfl.privacy.exchange import fingerprint, load_secret, public_key

    return {node: fingerprint(public_key(load_secret(deployment.home(node) / "secret.key"))) for node in deployment.nodes}


def clients_of_runs(deployment: Deployment) -> list[str] | None:
    """The sites that ``run.toml`` names; ``None`` if it names none (a run then asks all that are enrolled) or cannot be read."""
    try:
        listed = tomllib.loads((deployment.path / "run.toml").read_text(encoding="utf-8"))["scenario"]["clients"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return [str(name) for name in listed] if isinstance(listed, list) else None


def _empty(path: str | Path) -> Path:
    folder = Path(path).resolve()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{path}: exists and is not empty; choose another folder")
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _digits(nodes: int) -> dict[str, int]:
    """Rotations and clients per rotation that make so many clients; two or more per rotation where possible."""
    if not 2 <= nodes <= MAX_NODES:
        raise ConfigError(f"expected between 2 and {MAX_NODES} nodes on one machine, got {nodes}")
    groups = next((g for g in (4, 3, 2) if nodes % g == 0 and nodes // g >= 2), 1)
    return {"groups": groups, "clients_per_group": nodes // groups}


def check_names(names: Sequence[str]) -> None:
    """Raise ``ConfigError`` if a name cannot be a node's."""
    for name in names:
        if not names_node(name):
            raise ConfigError(f"client name {name!r} cannot name a node: {NODE_NAME}; rename its file or folder, or give another name")


def check_address(address: str) -> None:
    """Raise ``ConfigError`` if a text is not a SuperLink's name or address and its port."""
    known = re.fullmatch(r"(?:[^\s/:]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", address)
    if known is None or not 0 < int(known[1]) < 1 << 16:
        raise ConfigError(f"expected the SuperLink as NAME:PORT, such as fl.example.org:8000, got {address!r}; correct superlink")


def _write_start(deployment: Deployment) -> None:
    """Write the commands as a script to read, and to take apart for several machines."""
    lines = ["#!/bin/sh", "# What 'emdcfl federation up' does, command by command. On real machines each node runs its own line.", "set -e"]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in deployment.environment().items()]
    lines += [f"{shlex.join(deployment.link_command())} &", "sleep 5"]
    for node in deployment.nodes:
        key = str(deployment.home(node) / "auth.pub")
        lines.append(shlex.join([sys.executable, "-m", "emdcfl", "federation", "enrol", str(deployment.path), node, key]))
    for node in deployment.nodes:
        lines.append(f"{shlex.join(deployment.node_command(node))} &")
    lines.append("wait")
    path = deployment.path / "start.sh"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.chmod(0o755)


_NODE = """\
# What this node serves. See docs/guide/deploy.md.
# data: folder or table of this site; "scenario" for its share of a built-in scenario (trials)
{about}device = "auto"
trust = "pinned"       # partners' keys, relayed by the server, must be those in partners.toml
# privacy_epsilon = 64   # largest epsilon per record and release this node answers (docs/guide/privacy-settings.md)
details = false        # true: the server may read the text of unexpected errors, which may quote data

# What this node answers; everything else is refused. Read it with: emdcfl node check {home}
# This is a trial: wider than the defaults, so that every method runs, as often as you like. For real data, delete the table.
[policy]
tasks = ["describe", "train", "test", "evaluate", "reference", "recalibrate", "project", "loss_moments",
    "em_step", "soft_train", "train_and_basis", "data_subspace"]
models = []                # networks beside the built-in ones, "package.module:function"; this machine runs their code
reductions = ["mean", "argmin_counts", "per_batch"]
models_at_once = 256       # most models scored in one request
averages_at_once = 256     # the same, where losses decide about groups
batch_size = 1             # smallest batch size; an epoch's last batch may be smaller
local_epochs = 10000       # most epochs of one training
projection_ratio = 1.0     # widest projection of embeddings
costs = ["cosine", "euclidean", "label-aware"]
samples = 100000           # most samples a side in a comparison
split_seed = {seed}             # divides this site's files; requests with another seed are refused
models_per_round = 1000    # different models of one client that this node embeds its data with, in a round and in a run
models_per_run = 100000
partners_per_round = 100000
models_in_all = 100000000  # the same, in all runs
runs = 100000              # runs that this node takes part in
requests_per_run = 100000000
"""

_APP = """\
[project]
name = "emdcfl-app"
version = "{version}"
description = "emdcfl as a Flower app; the code is what is installed on the server and on the nodes"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "emdcfl"

[tool.flwr.app.components]
serverapp = "emdcfl.apps.server:app"
clientapp = "emdcfl.apps.client:app"

[tool.flwr.app.config]
{config}"""
