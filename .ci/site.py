"""Hooks of ``mkdocs.yml``: join docs/, the Markdown of the root, pages made from docstrings, and the executed examples.

Nothing of the package is imported: docstrings are read from the source. Formulas become MathML: pages need no script from elsewhere.
"""

from __future__ import annotations

import ast
import base64
import html
import json
import posixpath
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "emdcfl"
LATEST = "latest"
EXECUTED = ROOT / "runs" / "examples"

# where a file of the repository is on the site; everything below docs/ keeps its path
PLACES = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
    "LICENSE": "LICENSE.txt",
    "CITATION.cff": "CITATION.cff.txt",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the parts of the navigation that are folders."""
    folders = {"methods/": [f"methods/{name}.md" for name in methods()], "results/tables/": [f"results/tables/{p.name}" for p in tables()]}

    def expanded(entry: Any) -> Any:
        if isinstance(entry, dict):
            return {title: folders.get(value, value) if isinstance(value, str) else expanded(value) for title, value in entry.items()}
        return [expanded(one) for one in entry] if isinstance(entry, list) else entry

    config.nav = expanded(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie below docs/."""
    home = files.get_file_from_path("README.md")
    if home is not None:
        files.remove(home)
    for source, place in PLACES.items():
        if (ROOT / source).is_file():
            text = (ROOT / source).read_text(encoding="utf-8")
            content = relinked(text, source, place) if place.endswith(".md") else text
            files.append(File.generated(config, place, content=content))
    for place, content in [*method_pages(), ("reference/python.md", python_page()), *example_pages(), *gallery()]:
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Correct the links that lead out of docs/."""
    place = page.file.src_uri
    return markdown if page.file.generated_by else relinked(markdown, f"docs/{place}", place)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn what is left of reStructuredText in docstrings into HTML."""
    content = re.sub(r":math:<code>(.*?)</code>", lambda m: mathml(html.unescape(m[1])), content, flags=re.S)
    return re.sub(r":(?:func|class|mod|meth|attr|data):<code>", "<code>", content)


def on_post_build(config: MkDocsConfig) -> None:
    """Write the list of versions that the menu reads, and send the front page to the newest."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    built = Path(config.site_dir)
    names = newest_first(path.name for path in built.parent.iterdir() if path.is_dir())
    listed = [{"version": name, "title": f"{version} ({LATEST})" if name == LATEST else name, "aliases": []} for name in names]
    (built.parent / "versions.json").write_text(json.dumps(listed), encoding="utf-8")
    (built.parent / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={names[0]}/index.html">\n', encoding="utf-8")


def newest_first(names: Iterable[str]) -> list[str]:
    """Sort versions as numbers, so that 0.10 is above 0.9; the latest is above all."""
    return sorted(names, key=lambda name: (name == LATEST, [int(n) for n in re.findall(r"\d+", name)], name), reverse=True)


def relinked(text: str, source: str, place: str) -> str:
    """Return Markdown whose links, written for the repository, fit the site; links to files the site does not have become text."""

    def on_site(target: str) -> str | None:
        path, hash_, anchor = target.partition("#")
        if not path or path.startswith(("http://", "https://", "mailto:")):
            return target
        here = posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(path)))
        if here in PLACES:
            there = PLACES[here]
        elif here.startswith("docs/") and (ROOT / here).is_file():
            there = here.removeprefix("docs/")
        elif here.startswith("examples/") and here.endswith(".ipynb"):
            there = here.replace(".ipynb", ".md")
        else:
            return None
        return posixpath.relpath(there, posixpath.dirname(place) or ".") + hash_ + anchor

    def link(found: re.Match[str]) -> str:
        there = on_site(found[2])
        return found[1] if there is None else f"[{found[1]}]({there})"

    def source_of(found: re.Match[str]) -> str:
        there = on_site(found[1])
        return found[0] if there is None else f'src="{there}"'

    parts = re.split(r"(^```.*?^```)", text, flags=re.M | re.S)
    parts[::2] = [re.sub(r"\[((?:[^\[\]]|`[^`]*`)*)\]\(([^)\s]+)\)", link, part) for part in parts[::2]]
    parts[::2] = [re.sub(r'src="([^"]+)"', source_of, part) for part in parts[::2]]
    return "".join(parts)


def docstring(path: Path) -> tuple[ast.Module, str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tree, ast.get_docstring(tree) or ""


def methods() -> dict[str, tuple[str, Path, ast.ClassDef]]:
    """Return name → (import path, file, class) of every registered method, from the source."""
    found = {}
    for path in sorted(SOURCE.glob("methods/**/*.py")):
        for node in docstring(path)[0].body:
            if isinstance(node, ast.ClassDef) and any(isinstance(d, ast.Name) and d.id == "register" for d in node.decorator_list):
                found[str(constant(node, "name"))] = f"{module(path)}.{node.name}", path, node
    return dict(sorted(found.items(), key=lambda item: (item[0] != "emdcfl", item[0])))


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)


def bases(node: ast.ClassDef) -> dict[str, ast.ClassDef]:
    """Return the classes of this package that a class inherits from directly, by import path."""
    names = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return {path: found for path, found in classes().items() if found.name in names}


def declared(node: ast.ClassDef, name: str) -> ast.AnnAssign | None:
    """Return the line that gives a field or class variable its value, of the class or of one it inherits."""
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == name and line.value is not None:
            return line
    for base in bases(node).values():
        if (found := declared(base, name)) is not None:
            return found
    return None


def constant(node: ast.ClassDef, name: str) -> object:
    """Return a class variable."""
    line = declared(node, name)
    return None if line is None or line.value is None else ast.literal_eval(line.value)


@lru_cache
def classes() -> dict[str, ast.ClassDef]:
    """Return the classes of all methods by import path."""
    trees = {module(path): docstring(path)[0] for path in SOURCE.glob("methods/**/*.py")}
    return {f"{path}.{node.name}": node for path, tree in trees.items() for node in tree.body if isinstance(node, ast.ClassDef)}


FAMILIES = {
    "global": "one model for all",
    "hard": "hard clusters",
    "soft": "soft clusters",
    "personal": "a model per client",
    "alone": "every client alone",
}


def method_pages() -> Iterator[tuple[str, str]]:
    """Make one page per method: its module docstring, facts, and options."""
    for name, (path, file, node) in methods().items():
        title, _, text = docstring(file)[1].partition("\n")
        heading, _, idea = title.partition(":")
        facts = [
            f"- Family: {FAMILIES[str(constant(node, 'family'))]}",
            f"- Must be told the number of groups: {'yes' if declared(node, 'k') else 'no'}",
            f"- Paper: {constant(node, 'citation')}",
            f"- Command: `emdcfl run --scenario rotated-digits --method {name}`",
        ]
        shared = [base for base in bases(node) if base.endswith("Options")]
        options = shared if name == "emdcfl" else [path, *shared]
        shown = ["show_root_heading: false", "show_root_toc_entry: false", "members: false"]
        described = [text for one in options for text in (f"::: {one}", "    options:", *(f"      {line}" for line in shown), "")]
        idea = idea.strip()[:1].upper() + idea.strip()[1:]
        lines = [f"# {heading}", "", idea, "", *facts, "", from_rst(text), "", "## Options", "", *described, ""]
        yield f"methods/{name}.md", "\n".join(lines)


def from_rst(text: str) -> str:
    """Turn the little reStructuredText that docstrings hold into Markdown with MathML."""

    def block(found: re.Match[str]) -> str:
        formula = mathml(" ".join(textwrap.dedent(found[1]).split()), display="block")
        return f'\n<div style="overflow-x: auto">{formula}</div>\n'

    text = re.sub(r"^\.\. math::[ \n](.*?)(?=\n\s*\n|\Z)", block, text, flags=re.M | re.S)
    text = re.sub(r":math:`([^`]+)`", lambda m: f"<span>{mathml(m[1])}</span>", text)  # a line that begins with <math> is no paragraph
    text = re.sub(r":(?:func|class|mod|meth|attr|data):`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"^(.*)::$", r"\1:", text, flags=re.M)


def mathml(formula: str, display: str = "inline") -> str:
    """Return a formula as MathML; what the converter does not know is an error."""
    text = re.sub(r"\\Big[lr]\\\|", r"\\|", re.sub(r"\\arg\b", r"\\operatorname{arg}", formula))
    made = convert(text, display=display)
    if "\\" in made:
        raise PluginError(f"cannot write this formula as MathML: {formula}")
    return made


def python_page() -> str:
    """Make the reference of what ``import emdcfl`` offers."""
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    homes: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_HOMES":
            homes = ast.literal_eval(node.value)
    first = [f"{home}.{name}" for name, home in homes.items() if name not in ("methods", "scenarios")]
    lines = [
        "# Python",
        "",
        "What `import emdcfl` offers. Names are imported when first used, so the import itself takes milliseconds.",
        "",
    ]
    for path in sorted(first, key=lambda path: (not path.startswith("emdcfl.api"), path.rpartition(".")[2].istitle(), path)):
        lines += [f"::: {path}", ""]
    return "\n".join(lines)


def tables() -> list[Path]:
    return sorted((ROOT / "docs/results/tables").glob("*.md"))


def example_pages() -> Iterator[tuple[str, str | bytes]]:
    """Turn executed notebooks into pages, with their pictures."""
    for source in sorted((ROOT / "examples").glob("*.ipynb")):
        done = EXECUTED / source.name
        if not done.is_file():
            raise PluginError(f"{done.relative_to(ROOT)} is missing: run 'make examples' first")
        parts, pictures = [], 0
        for cell in json.loads(done.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                parts.append(relinked(text, f"examples/{source.name}", f"examples/{source.stem}.md"))
                continue
            parts.append(f"```python\n{text}\n```")
            for output in joined(cell["outputs"]):
                data = output.get("data", {})
                if "image/png" in data:
                    pictures += 1
                    name = f"{source.stem}-{pictures}.png"
                    yield f"examples/{name}", base64.b64decode("".join(data["image/png"]))
                    parts.append(f"![Picture {pictures} of this notebook]({name})")
                elif "text/html" in data:
                    shown = "".join(data["text/html"])
                    parts.append(f'<div style="overflow-x: auto">{shown}</div>')
                elif said := "".join(output.get("text", data.get("text/plain", ""))):
                    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
                    parts.append(f"```text\n{plain.rstrip()}\n```")
        parts.append(f"This page is the notebook `examples/{source.name}`, as `make docs` ran it.")
        yield f"examples/{source.stem}.md", "\n\n".join(parts) + "\n"


def joined(outputs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the outputs of a cell, what was printed in one go as one."""
    for is_text, some in groupby(outputs, key=lambda output: output["output_type"] == "stream"):
        found = list(some)
        yield from [{"text": "".join("".join(output["text"]) for output in found)}] if is_text else found


def example_title(name: str) -> str:
    """Return the heading of a notebook, or the first line of a script's docstring."""
    script = ROOT / "examples" / f"{name}.py"
    if script.is_file():
        return docstring(script)[1].partition("\n")[0].rstrip(".")
    cells = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return "".join(cells[0]["source"]).partition("\n")[0].removeprefix("# ")


FRAME = "width: 100%; height: 32rem; border: 1px solid #8888"


def gallery() -> Iterator[tuple[str, str]]:
    """Show the report pages that the examples left."""
    parts = [
        "# Gallery of reports",
        "",
        "Every run and comparison ends with one page that needs no network. These are the pages of the examples.",
        "",
    ]
    for page in sorted(EXECUTED.glob("*/report.html")):
        text = page.read_text(encoding="utf-8")
        name = page.parent.name
        if not list((ROOT / "examples").glob(f"{name}.*")):
            continue  # a run beside another
        heading = example_title(name)
        yield f"gallery/{name}.html", text
        frame = f'<iframe src="gallery/{name}.html" title="{html.escape(heading)}" loading="lazy" style="{FRAME}"></iframe>'
        parts += [f"## {heading}", "", f"[Open the page](gallery/{name}.html)" + "{: target=_blank }", "", frame, ""]
    yield "gallery.md", "\n".join(parts)
