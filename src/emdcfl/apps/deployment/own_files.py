"""Own files in a trial: what ``node.toml`` of every site says of them, and what ``run.toml`` says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emdcfl.core.checks import check_options, read_toml
from emdcfl.core.errors import ConfigError
from emdcfl.data.own.folder import FolderOptions, read_folder
from emdcfl.data.own.formats.dates import read_dates
from emdcfl.data.own.formats.layout import discover
from emdcfl.data.own.tables import read_list
from emdcfl.data.scenarios.folder import folder
from emdcfl.engines.flower.node.home import NodeConfig
from emdcfl.runs.config import AT_NODES, own_files

AT_SERVER = ("data_seed", "size", "model")
"""Options of own files that the server decides; nodes have the others."""


def trial_files(data: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Divide a folder of sites, or a config that names one and its repairs ('emdcfl data check --fix').

    Returns site → options of its ``node.toml``, and the tables of ``run.toml``.
    """
    place = data
    options: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    if data.suffix == ".toml" and data.is_file():
        checked = check_options(folder, own_files(data), f"{data}: scenario")
        options = {name: value for name, value in checked.items() if value is not None}
        place, tables = Path(options.pop("path")), read_toml(data.read_text(encoding="utf-8"))
    if tables.get("run", {}).get("hold_out"):
        raise ConfigError(
            f"{data}: run.hold_out needs the data of all sites on one machine; take it out, or leave these sites out (scenario.leave_out)"
        )
    if place.is_file() or "client" in options:
        raise ConfigError(f"{data}: every node reads files of its own, got one table for all sites; save the rows of each site as a table")
    how, layout = FolderOptions.of(options), discover(place)
    server = {name: options.pop(name) for name in AT_SERVER if name in options}
    options.pop("leave_out", None)
    for name in {"drop", "only", "date", "missing"} & options.keys():
        options[name] = list(read_list(options[name], name))
    NodeConfig(**options)  # says what nodes cannot do
    clients = {client.name: {"data": str(_source(client.parts).resolve())} for client in how.chosen(place, layout.clients)}
    if options and layout.kind == "images":
        how.cleaning.columns((), None)
    columns = read_folder(place, how).columns if options and layout.kind != "images" else {}
    for site, said in clients.items():
        absent = {name for name, column in columns.items() if site not in column.sites}
        said.update(_of_site(options, absent))
    return clients, {**tables, "scenario": {"name": AT_NODES, **server}}


def _of_site(options: Mapping[str, Any], absent: set[str]) -> dict[str, Any]:
    """Return the options without columns that other sites have: a node refuses to repair what it has not."""
    drop = [name for name in options.get("drop", ()) if name not in absent]
    date = [entry for entry in options.get("date", ()) if read_dates([entry])[0][0] not in absent]
    return {name: value for name, value in {**options, "drop": drop, "date": date}.items() if value != []}


def _source(parts: Mapping[str, Path]) -> Path:
    """A client's folder or table, from its parts."""
    first = next(iter(parts.values()))
    return first if len(parts) == 1 else first.parent
