"""``emdcfl predict``, ``emdcfl place``, ``emdcfl report`` and ``emdcfl export``: what a finished run is good for."""

from __future__ import annotations

import csv
import io
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emdcfl.cli.app import USER_ERROR, AsJson, TrustModel, answer, app, print_json, say_error
from emdcfl.cli.show import draw_table, tell
from emdcfl.core.errors import ConfigError, DataError, EmdcflError, StoreError
from emdcfl.core.units import escaped, names, plural, spreadsheet_text
from emdcfl.runs.watching.progress import terminal

if TYPE_CHECKING:
    from torch import Tensor

    from emdcfl.runs.new_sites.nearest import NearestCluster
    from emdcfl.runs.served import ModelInfo


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    files: Annotated[list[Path], typer.Argument(help="Images, or tables with the run's columns.")],
    client: Annotated[str | None, typer.Option(help="The client of the run whose model to use.")] = None,
    new_site: Annotated[
        bool,
        typer.Option(
            "--new-site", help="The files are of one site that took no part in the run: mix the models of the groups nearest to it."
        ),
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Use the model before fine-tuning, even if the client kept the fine-tuned one.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write a table (CSV) with the probabilities of all classes.", show_default=False)] = None,
    trust_model: TrustModel = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the probabilities of all classes, and nothing else.")] = False,
) -> None:
    """Predict the classes (or numbers) of files, with the model of a client or for a new site."""
    from emdcfl.runs.new_sites.nearest import nearest_cluster
    from emdcfl.runs.outputs import load_served
    from emdcfl.runs.result import load

    if new_site == (client is not None):
        raise ConfigError(f"expected --client or --new-site, got {'both' if new_site else 'neither'}; say whose files these are")
    if out is not None and out.exists():
        raise StoreError(f"{out} exists already; remove it, or choose another --out")
    if client is not None:
        served = load_served(run, client, plain=plain, trust_model=trust_model)
        x, inputs, errors = _read_each(files, served.about.encoding)
    else:
        result = load(run, trust_model=trust_model)
        x, inputs, errors = _read_each(files, result.about.encoding)
        served = nearest_cluster(result, x, "new").model
    p, classes = served.probabilities(x), served.about.labels
    found: list[dict[str, Any]]
    if served.about.target is not None:
        found = [{"input": n, "value": value} for n, value in zip(inputs, p[:, 0].tolist(), strict=True)]
        rows = [[one["input"], f"{one['value']:.6g}"] for one in found]
    else:
        found = [
            {"input": n, "class": classes[k], "probabilities": dict(zip(map(str, classes), row, strict=True))}
            for n, k, row in zip(inputs, p.argmax(1).tolist(), p.tolist(), strict=True)
        ]
        rows = [[one["input"], str(one["class"]), f"{max(one['probabilities'].values()):.1%}"] for one in found]
    if out is not None:
        _write_csv(out, found, served.about)
    if as_json or out is None:
        answer(found, ["\t".join(map(escaped, row)) for row in rows], as_json=as_json)
    else:
        typer.echo(escaped(f"{plural(len(found), 'prediction')} in {out}"))
    for said in errors:
        say_error(said)
    if errors:
        raise typer.Exit(USER_ERROR)


def _read_each(files: list[Path], encoding: Mapping[str, Any]) -> tuple[Tensor, list[str], list[str]]:
    """Return the samples of all files that can be read, one name per sample, and an error for each other file."""
    import torch

    from emdcfl.data.own import read_inputs

    read: list[tuple[Tensor, list[str]]] = []
    errors: list[str] = []
    for file in files:
        try:
            read.append(read_inputs([file], encoding=encoding))
        except DataError as error:
            errors.append(str(error))
        except OSError as error:
            errors.append(f"{file}: {error.strerror or error}")
    errors = list(dict.fromkeys(errors))  # a run on arrays says the same of every file
    if not read:
        for said in errors[:-1]:
            say_error(said)
        raise DataError(errors[-1])
    return torch.cat([x for x, _ in read]), [name for _, names in read for name in names], errors


def _write_csv(out: Path, found: Sequence[Mapping[str, Any]], about: ModelInfo) -> None:
    """Write a line per prediction: the file, of tables the row, and the class with all probabilities, or the number."""
    tables = about.encoding["kind"] == "table"
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    answers = ["value"] if about.target is not None else ["class", *(f"probability of {name}" for name in about.classes)]
    writer.writerow(["file", *(["row"] if tables else []), *answers])
    for one in found:
        where = one["input"].rpartition(":")[::2] if tables else [one["input"]]
        told = [one["value"]] if about.target is not None else [one["class"], *one["probabilities"].values()]
        writer.writerow([spreadsheet_text(cell) if isinstance(cell, str) else cell for cell in (*where, *told)])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(buffer.getvalue().encode("utf-8-sig", "backslashreplace"))  # with the mark by which Excel knows UTF-8


@app.command()
def place(
    run: Annotated[Path, typer.Argument(help="Run directory with clusters.")],
    folder: Annotated[Path, typer.Argument(help="The new site: class sub-folders of images, or a table.")],
    name: Annotated[str | None, typer.Option(help="Name of the new site.", show_default="new:FOLDER")] = None,
    label: Annotated[str | None, typer.Option(help="Label column of a table.", show_default="the run's")] = None,
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="Use no labels: find the nearest clusters by embeddings alone.")] = False,
    trust_model: TrustModel = False,
    as_json: AsJson = False,
) -> None:
    """Say which group a new site belongs to, and how clear that is."""
    from emdcfl.runs.result import load

    if unlabelled:
        _show_nearest(load(run, trust_model=trust_model).place_unlabelled(folder, name=name), as_json=as_json)
        return
    placement = load(run, trust_model=trust_model).place(folder, name=name, label=label)
    if as_json:
        print_json(placement.as_dict())
        return
    console = terminal()
    for note in placement.notes:
        tell(console, f"note: {note}")
    rows = []
    for c in placement.candidates:
        distance = f"{c.ratio:.2f}" if isfinite(c.ratio) else "not compared"
        rows.append((str(c.cluster), names(c.members), distance, f"{c.linked} of {len(c.members)}", placement.metric.text(c.score)))
    heads = ("cluster", "members", "distance / tolerance", "linked with", f"its model's {placement.metric.label}")
    console.print(draw_table(heads, rows, left=("members",)))
    tell(console, placement.verdict())


def _show_nearest(found: NearestCluster, *, as_json: bool) -> None:
    if as_json:
        print_json(found.as_dict())
        return
    console = terminal()
    rows = [
        (str(k), names(who), f"{fit.distance:.4f}", f"{fit.entropy:.3f}", f"{fit.misfit:.2f}", f"{fit.weight:.2f}")
        for k, who, fit in found.candidates
    ]
    console.print(draw_table(("cluster", "members", "distance", "entropy", "misfit", "weight"), rows, left=("members",)))
    tell(console, found.verdict())


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Run directory, or folder of a comparison.")],
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="report.html in the folder")] = None,
    theory: Annotated[
        bool | None,
        typer.Option(help="For simulated runs, evaluate what merging clusters could cost.", show_default="where it takes seconds"),
    ] = None,
    trust_model: TrustModel = False,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the report as one self-contained page: verdict, map, heat map, margins, accuracy, cost."""
    from emdcfl.paper.merging import write_merging, write_quick_merging
    from emdcfl.report import write_report
    from emdcfl.runs.result import load

    if theory:
        write_merging(load(folder, trust_model=trust_model))
    elif theory is None and (folder / "summary.json").is_file():
        with suppress(EmdcflError):  # a page needs no models: those of an unfinished run may not be written yet
            write_quick_merging(load(folder, trust_model=trust_model))
    place = write_report(folder, out)
    answer({"report": str(place)}, [str(place)], as_json=as_json)
    if open_:
        webbrowser.open(place.resolve().as_uri())


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to.", show_default="export in the run directory")] = None,
    fine_tuned: Annotated[bool, typer.Option("--fine-tuned", help="Also write the models that sites fine-tuned at home and kept.")] = False,
    trust_model: TrustModel = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the folders as JSON and nothing else.")] = False,
) -> None:
    """Write one folder per group, which plain torch can load and a model hub can show."""
    from emdcfl.report.export import export as write

    written = write(run, out, fine_tuned=fine_tuned, trust_model=trust_model)
    folders = [str(place) for place in written]
    warning = "README.md and config.json name sites, classes and columns: read them before you publish"
    answer(folders, [*folders, warning], as_json=as_json)
