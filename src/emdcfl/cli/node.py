"""``emdcfl node …``: a site's node: its keys and partners, its program, what it releases, in words its owner understands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emdcfl.cli.app import AsJson, answer, app, needs_flower
from emdcfl.core.errors import ConfigError

if TYPE_CHECKING:
    from emdcfl.engines.flower.node.home import NodeConfig
    from emdcfl.engines.flower.node.policy import Policy

node = typer.Typer(help="Set up and run the node of one site in a federation.", no_args_is_help=True, add_completion=False)
app.add_typer(node, name="node")

Home = Annotated[Path, typer.Argument(help="The node's home folder, with node.toml.", show_default=False)]


@node.command()
def init(
    home: Annotated[Path, typer.Argument(help="The node's home folder, which this command makes.", show_default=False)],
    data: Annotated[Path, typer.Option(help="This site's folder of images or its table.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="The client's name in every run.", show_default=False)] = None,
    superlink: Annotated[
        str | None, typer.Option(help="Address of the SuperLink, for example fl.example.org:8000.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a node's keys and its node.toml, and print what to send to the federation's operator."""
    import json

    from emdcfl.apps.deployment.certificates import make_node_key
    from emdcfl.apps.deployment.folder import check_address, check_names

    check_names([] if name is None else [name])
    if superlink is not None:
        check_address(superlink)
    if (home / "node.toml").exists():
        raise ConfigError(f"{home}/node.toml exists; choose another folder, or edit it")
    if not data.exists():
        raise ConfigError(f"{data}: no such file or folder; give this site's data")
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    make_node_key(home)
    about = {"name": name, "superlink": superlink, "data": str(data.resolve())}
    lines = [
        *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in about.items() if value is not None),
        'trust = "pinned"  # fingerprints of the others in partners.toml',
    ]
    (home / "node.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _tell_keys(
        home,
        f"next: put ca.crt and trusted.yaml of the operator into {home},",
        f"      add every partner: emdcfl node trust {home} PARTNER FINGERPRINT",
        f"      check its files: emdcfl node data {home}",
        f"      and read what it would release: emdcfl node check {home}",
        as_json=as_json,
    )


@node.command("fingerprint")
def show_fingerprint(home: Home, as_json: AsJson = False) -> None:
    """Print the fingerprint of the node's key, to be compared by telephone."""
    found = _fingerprint(_existing(home))
    answer({"fingerprint": found}, [found], as_json=as_json)


@node.command()
def rotate(home: Home, as_json: AsJson = False) -> None:
    """Draw new keys, and keep the old ones beside them (auth.key.1, …). Do this between runs: messages sealed for the old key are lost."""
    from emdcfl.apps.deployment.certificates import make_node_key, put_aside

    _existing(home)
    for name in ("auth.key", "auth.pub", "secret.key"):
        if (home / name).exists():
            put_aside(home / name)
    make_node_key(home)
    _tell_keys(
        home,
        "next: the operator runs emdcfl federation enrol FOLDER NAME KEY FINGERPRINT --replace,",
        "      every partner emdcfl node trust HOME NAME FINGERPRINT --replace, and this node is restarted",
        as_json=as_json,
    )


@node.command()
def trust(
    home: Home,
    name: Annotated[str, typer.Argument(help="The partner's name.", show_default=False)],
    fingerprint: Annotated[str, typer.Argument(help="Its fingerprint, SHA256:…, compared by telephone.", show_default=False)],
    replace: Annotated[bool, typer.Option("--replace", help="The partner has rotated its keys.")] = False,
    as_json: AsJson = False,
) -> None:
    """Add a partner's fingerprint to partners.toml: this node compares its data with that partner's."""
    from emdcfl.apps.deployment.folder import check_names
    from emdcfl.privacy.keylist import KeyList, add_name

    check_names([name])
    path = _existing(home) / "partners.toml"
    add_name(path, name, fingerprint, replace=replace)
    known = KeyList(path).known
    answer({"file": str(path), "partners": list(known)}, [f"{path} knows {len(known)} partners"], as_json=as_json)


def _existing(home: Path) -> Path:
    if not (home / "node.toml").exists():
        raise ConfigError(f"{home}: no node.toml here; give the node's home, or make one with: emdcfl node init")
    return home


def _fingerprint(home: Path) -> str:
    from emdcfl.privacy.exchange import fingerprint, load_secret, public_key

    return fingerprint(public_key(load_secret(home / "secret.key")))


def _tell_keys(home: Path, *then: str, as_json: bool) -> None:
    found = _fingerprint(home)
    lines = [f"public key    {home}/auth.pub, for the operator", f"fingerprint   {found}, for the operator and all partners", *then]
    answer({"home": str(home), "public_key": str(home / "auth.pub"), "fingerprint": found}, lines, as_json=as_json)


RELEASES = {
    "describe": "how many train and validation samples it has; its public key",
    "train": "a model trained on its data in batches of {batch_size} or more (an epoch's last: any size), the loss, the number of samples",
    "test": "accuracy (balanced accuracy and AUC where classes are unbalanced) and loss of a model on its test data, the number of samples",
    "personalize": "the model it is served, fine-tuned on its data, and what that gains in validation loss, with its standard error",
    "evaluate": "accuracy and losses of up to {models_at_once} models at once, as {reductions}",
    "profile": "mean and spread of every column, or of seven features of its images; the share of each class; no noise",
    "loss_moments": "means and covariances of the losses and hits of up to {averages_at_once} models, over blocks of validation samples",
    "reference": "up to {samples} embeddings of train samples{noise}, projected to {projection_ratio:g} of their width; distances",
    "recalibrate": "distances within its own data, at the class counts it has in common with partners; how many samples these are",
    "project": "up to {samples} embeddings of its samples under each partner's model{noise}, projected in the same way",
    "em_step": "models, their shares of its data, label shares (FedEM, FedRC)",
    "soft_train": "a model, and how many samples fit each cluster best (FedSoft)",
    "train_and_basis": "a model, and main directions of its embeddings, not projected (FedSaC)",
    "data_subspace": "main directions of its raw samples, by class (PACFL)",
    "embed": "RAW EMBEDDINGS of its samples, not projected",
    "deposit": "RAW SAMPLES",
}
"""What the answer to each task tells the server."""

SURVEY = (
    "classes; number, sizes and colour of images, sums of their pixels and squares; "
    "or column names; unit, number, mean and spread of numbers; words of text (200 at most)"
)
"""What a node with files of its own tells before round 1."""


@node.command()
def check(home: Home, as_json: AsJson = False) -> None:
    """Print what the node would release to a server, and what it refuses."""
    config = _config(home)
    answer(released(config), report(config, home), as_json=as_json)


def released(config: NodeConfig) -> dict[str, Any]:
    """Return the node's settings, and each task with what its answer tells the server, or nothing where it is refused."""
    from dataclasses import asdict

    from emdcfl.core.client import TASKS

    tasks = {task: _release(task, config) if task in config.policy.answered else None for task in TASKS}
    survey = None if config.data == "scenario" else SURVEY
    return {**asdict(config), "releases": {"survey": survey, **tasks}, "warnings": list(_warnings(config.policy, set(TASKS)))}


def _config(home: Path) -> NodeConfig:
    path = _folder(home) / "node.toml"
    import emdcfl.methods  # noqa: F401  registers tasks, and what a method that the policy names needs
    from emdcfl.engines.flower.node.home import read_config

    return read_config(path)


def _folder(home: Path) -> Path:
    if not home.is_dir():
        raise ConfigError(f"{home}: no such folder; give the node's home, or make one with: emdcfl node init")
    return home


@node.command()
def data(
    home: Home,
    html: Annotated[Path | None, typer.Option(help="Also write the page as HTML, to print and sign.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Check the node's own files, as its node.toml reads them: the page of 'emdcfl data check'. Nothing is sent."""
    from emdcfl.cli.data import show_report
    from emdcfl.data.own.checking.check import check_site

    own = _config(home)
    if own.data == "scenario":
        raise ConfigError(f"{home}: expected a node with files of its own (data in node.toml), got none; see 'emdcfl node init'")
    how: dict[str, Any] = {"label": own.label, "seed": own.policy.split_seed, "rule": own.rule, "cleaning": own.cleaning}
    hint = f'options such as --label and --drop are lines of {home / "node.toml"} here: label = "COLUMN", drop = ["COLUMN"]'
    show_report(check_site(home / own.data, own.name or home.resolve().name, **how), html, hint, as_json=as_json)


@node.command()
def serve(
    home: Home,
    name: Annotated[str | None, typer.Option(help="The client's name, instead of the name in node.toml.", show_default=False)] = None,
    superlink: Annotated[
        str | None, typer.Option(help="Address of the SuperLink, instead of the address in node.toml.", show_default=False)
    ] = None,
) -> None:
    """Connect to the SuperLink and answer its requests until stopped."""
    needs_flower()
    from emdcfl.apps.deployment.folder import check_address, check_names
    from emdcfl.apps.supernode import serve as serve_node

    config = _config(home)
    name, superlink = name or config.name, superlink or config.superlink
    if not name or not superlink:
        raise ConfigError(f"{home}/node.toml: expected name and superlink; add them, or give --name and --superlink")
    check_names([name])
    check_address(superlink)
    raise typer.Exit(serve_node(home.resolve(), name=name, superlink=superlink))


@node.command("log")
def show_log(
    home: Home,
    refused: Annotated[bool, typer.Option("--refused", help="Show only what was refused or failed.")] = False,
    last: Annotated[int, typer.Option(help="Show this many entries.", min=1, metavar="N")] = 50,
    as_json: AsJson = False,
) -> None:
    """Print what the node released to the server and what it refused, newest last."""
    from emdcfl.engines.flower.node.log import counts, read

    state = _folder(home) / "state"
    old, entries = ([e for e in found if not refused or e.get("what") != "released"] for found in (counts(state), read(state)))
    lines = []
    for e in old:
        where = f"run {e['run']}" if e["run"] else "before a run" if e["task"] else "in all"
        lines.append(
            f"{e['time']}  {e['what']:<9} {where}: {e['task'] or 'requests'}, {e['count']} times since {e['first']}, no longer listed"
        )
    for e in entries[-last:]:
        where = f"run {e['run']} round {e['round']}" if "run" in e else "before a run"
        lines.append(f"{e.get('time')}  {e.get('what'):<9} {where}: {e.get('text')}")
    answer([*old, *entries[-last:]], lines or ["nothing yet"], as_json=as_json)


def report(config: NodeConfig, home: Path) -> Iterator[str]:
    """Yield the lines that say what a node releases."""
    from emdcfl.core.client import TASKS
    from emdcfl.models import BUILDERS

    policy = config.policy
    yield f"{home / 'node.toml'}" + ("" if (home / "node.toml").exists() else " does not exist: the defaults hold")
    yield f"data        {config.data}"
    yield f"methods     {', '.join(policy.methods) or 'all that need no more than this'}"
    yield ""
    yield "The server receives, if it asks:"
    if config.data != "scenario":
        yield f"  survey          {SURVEY}"
    for task in TASKS:
        if task in policy.answered:
            yield f"  {task:<15} {_release(task, config)}"
    yield f"It never receives: {', '.join(sorted(set(TASKS) - set(policy.answered))) or 'every task is allowed'}"
    yield ""
    yield f"networks    {', '.join(BUILDERS)}" + (f"; code of {', '.join(policy.models)}" if policy.models else "; no other code")
    yield f"sizes       {policy.parameters} parameters at most; images of {policy.image_size} × {policy.image_size} at most"
    yield f"costs       {', '.join(policy.costs)}" + ("; LABELS are sent" if "label-aware" in policy.costs else "; no labels are sent")
    label = f"the label column {config.label!r}" if config.label else "the label column that was asked for first"
    yield f"splits      seed {policy.split_seed} and {label} only"
    yield f"columns     {', '.join(policy.columns) or 'all'}"
    yield (
        f"models      embeds with {policy.models_per_round} of each client in a round and {policy.models_per_run} in a run, "
        f"{policy.partners_per_round} of all partners in a round; {policy.models_in_all} in all"
    )
    yield f"crafted     models that look made to show the projection are {'ALLOWED' if policy.crafted_models else 'refused'}"
    yield (
        f"runs        {', '.join(policy.run_names) or 'any'}; {policy.runs} in all, {policy.requests_per_run} requests each; "
        f"one is over after {policy.run_days} days without a request"
    )
    yield f"noise       {'none required' if config.privacy_epsilon is None else f'epsilon {config.privacy_epsilon:g} or less per release'}"
    yield f"partners    {_partners(config, home)}"
    yield f"errors      {'full texts, which may quote data' if config.details else 'kinds only; their text stays in the log'}"
    yield from _warnings(policy, set(TASKS))


def _release(task: str, config: NodeConfig) -> str:
    policy = config.policy
    noise = "" if config.privacy_epsilon is None else " with noise"
    shown = {name: getattr(policy, name) for name in ("models_at_once", "averages_at_once", "samples", "projection_ratio", "batch_size")}
    text = RELEASES.get(task, "the answer of a method of your own")
    return text.format(**shown, reductions=", ".join(policy.reductions), noise=noise)


def _partners(config: NodeConfig, home: Path) -> str:
    from emdcfl.privacy.keylist import KeyList

    if config.trust == "relay":
        return "any key that the server relays: it can read what partners seal for each other"
    known = len(KeyList(home / "partners.toml").known)
    if config.trust == "first-use" and config.enrol:
        return f"{known} known; new names are taken (enrol = true): set it to false once all have joined"
    return f"{known} known; new names are refused"


def _warnings(policy: Policy, tasks: set[str]) -> Iterator[str]:
    for task in sorted(set(policy.tasks) - tasks):
        yield f"warning: policy.tasks names {task!r}, which does not exist"
