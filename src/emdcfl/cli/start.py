"""``emdcfl init`` and ``emdcfl methods``: a commented config to start from, and what to choose from."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import unicodedata
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from emdcfl.cli.app import AsJson, answer, app, print_json
from emdcfl.cli.show import draw_table
from emdcfl.core.checks import describe
from emdcfl.core.errors import ConfigError
from emdcfl.methods import METHODS, Method, find
from emdcfl.methods.base import PRESETS, preset_values
from emdcfl.runs.config import template
from emdcfl.runs.watching.progress import terminal

MATH = ".. math:: "
SIGNS = {
    "sum": "Σ", "in": "∈", "wedge": "∧", "le": "≤", "ge": "≥", "ne": "≠", "propto": "∝", "cdot": "·", "leftarrow": "←", "Rightarrow": "⇒",
    "ell": "ℓ", "varphi": "φ", "lambda": "λ", "top": "T", "tilde": "~", "langle": "⟨", "rangle": "⟩", "lfloor": "⌊", "rfloor": "⌋",
    "lVert": "‖", "rVert": "‖", "|": "‖", "{": "{", "}": "}", "quad": "   ", "qquad": "   ", ",": "", ";": "", " ": " ",
    "big": "", "Big": "", "bigl": "", "bigr": "", "Bigl": "", "Bigr": "",
}  # fmt: skip
"""What stands for a command of LaTeX on a terminal; Greek letters have their Unicode names, functions their own."""
GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
FULL = 60
"""Characters from which on a line of a docstring is taken to go on in the next."""


def about(cls: type[Method]) -> dict[str, Any]:
    """Return a method's family, fields with type and default, and docstrings."""
    hints = get_type_hints(cls)
    return {
        "name": cls.name,
        "family": cls.family,
        "needs_k": "k" in hints,
        "citation": cls.citation,
        "fields": {
            f.name: {"type": describe(hints[f.name]), "default": None if f.default is MISSING else f.default}
            for f in fields(cls)  # type: ignore[arg-type]
        },
        **{preset: dict(preset_values(cls, preset)) for preset in PRESETS},
        "description": inspect.getdoc(inspect.getmodule(cls)) or "",
        "parameters": "\n\n".join(inspect.cleandoc(c.__doc__) for c in cls.__mro__ if is_dataclass(c) and c.__doc__),
    }


def refill(text: str, width: int) -> str:
    r"""Break the lines of a docstring anew, each with its indent; a line goes on only where the one before is long.

    Examples
    --------
    >>> print(refill("A client sends its state, :math:`\\tau_c`, and what follows from it,\nand no more.\n\nx : int\n    Some.", 40))
    A client sends its state, τ_c, and what
    follows from it, and no more.
    <BLANKLINE>
    x : int
        Some.
    """
    lines: list[str] = []
    goes_on = False
    for line in plain(text).splitlines():
        if goes_on and line and _indent(line) == _indent(lines[-1]):
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
        goes_on = len(line) > FULL
    filler = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    for i, line in enumerate(lines):
        filler.subsequent_indent = _indent(line)
        lines[i] = filler.fill(line)
    return "\n".join(lines)


def plain(text: str) -> str:
    r"""Return a docstring without the marks of reStructuredText and LaTeX.

    Examples
    --------
    >>> print(plain(".. math:: \\theta = \\frac{n_{c}}{n} \\Delta_c,\n          \\text{if } ``k`` \\ge \\lambda"))
        θ = (n_{c})/(n) Δ_c,
        if  k ≥ λ
    """

    def sign(found: re.Match[str]) -> str:
        name = found[1]
        letter = f"GREEK {'CAPITAL' if name[0].isupper() else 'SMALL'} LETTER {name.upper()}"
        try:
            return SIGNS[name] if name in SIGNS else unicodedata.lookup(letter)
        except KeyError:
            return name  # a function, as in \min

    text = re.sub(rf"^{re.escape(MATH)}|^ {{{len(MATH)}}}(?=\S)", "    ", text, flags=re.M)
    text = re.sub(r":math:`([^`]*)`", r"\1", text).replace("``", "")
    text = re.sub(rf"\\t?frac1{GROUP}", r"1/(\1)", text)
    text = re.sub(r"\\t?frac(\\[a-z]+|\w)(\w)", r"\1/\2", text)
    text = re.sub(rf"\\t?frac{GROUP}{GROUP}", r"(\1)/(\2)", text)
    text = re.sub(r"\\(?:text|mathrm|mathrel|operatorname)\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\\([A-Za-z]+|[^A-Za-z0-9\s]| )", sign, text)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method, for its fields and formulas.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or describe one."""
    chosen = [find(name)] if name is not None else [METHODS[key] for key in sorted(METHODS)]
    known = [about(cls) for cls in chosen]
    if as_json:
        print_json(known[0] if name is not None else known)
        return
    console = terminal()
    if name is None:
        rows = [(m["name"], m["family"], "yes" if m["needs_k"] else "no", m["citation"]) for m in known]
        console.print(draw_table(("method", "family", "needs K", "source"), rows))
        console.print("'emdcfl methods NAME' shows a method's fields and formulas.")
        return
    typer.echo(refill(f"{known[0]['description']}\n\n{known[0]['parameters']}", console.width))
    if own := known[0]["fields"]:
        lines = [(key, value["type"], "–" if value["default"] is None else str(value["default"])) for key, value in own.items()]
        console.print()
        console.print(draw_table(("field", "type", "default"), lines, title="Set with --set method.FIELD=VALUE"))
    for preset in PRESETS:
        said = ", ".join(f"{key} = {value}" for key, value in known[0][preset].items())
        console.print(f'preset = "{preset}" {"sets " + said if said else "is the default"}', markup=False, highlight=False)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("emdcfl.toml"),
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of configs, for editors, and write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented config to start from."""
    if schema:
        from emdcfl.runs.config_schema import config_schema

        typer.echo(json.dumps(config_schema(), indent=1, sort_keys=True, allow_nan=False))
        return
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another name")
    try:
        path.write_text(template(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another place") from error
    answer({"config": str(path)}, [f"wrote {path}; edit it, then: emdcfl run {path}"], as_json=as_json)
