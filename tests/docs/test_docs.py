"""The documentation builds: links lead somewhere, commands and config keys exist, tables list what is registered."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import click
import pytest
import typer
import yaml

import emdcfl
import emdcfl.cli
from emdcfl.cli.app import app
from emdcfl.data import scenarios
from emdcfl.methods import METHODS
from emdcfl.privacy import noise
from emdcfl.runs import config

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/README.md", ROOT / "examples/README.md"])


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_images_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose(page)):
        path, _, anchor = unquote("".join(target)).partition("#")
        if path.startswith(("http://", "https://")):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name(page)}: {path} does not exist"
        assert not anchor or anchor in anchors(file), f"{name(page)}: {path}#{anchor} is no heading"


def test_every_page_can_be_reached_from_the_readme_and_every_picture_is_used() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        if page.suffix == ".md":
            found = re.findall(r"\]\(([^)#\s]+)|src=\"([^\"]+)\"", prose(page))
            files = [(page.parent / unquote("".join(target))).resolve() for target in found if not "".join(target).startswith("http")]
            waiting += [file for file in files if file.is_file()]
    wanted = {*ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/img/*")}
    assert {name(file) for file in wanted - reached} == set()


def test_source_names_pages_that_exist() -> None:
    for file in [*ROOT.glob("src/**/*.py"), *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("fuzz/**/*.py"), ROOT / "Makefile"]:
        for page in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8")):
            assert (ROOT / page).exists(), f"{name(file)} names {page}"


def test_pages_name_tests_that_exist() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    named = [found for page in PAGES for found in re.findall(r"(test_\w+\.py)::(\w+)", page.read_text(encoding="utf-8"))]
    assert named
    for name_of_file, function in named:
        texts = [file.read_text(encoding="utf-8") for file in files if file.name == name_of_file]
        assert any(f"def {function}(" in text for text in texts), f"{name_of_file} has no {function}"


def test_the_architecture_page_names_files_and_functions_that_exist() -> None:
    page, source = (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), ROOT / "src/emdcfl"
    for path in re.findall(r"`([\w./]+/)`|`([\w/]+\.py)[`:]", page):
        where = "".join(path)
        assert (source / where).exists() or (ROOT / where).exists(), where
    steps = re.findall(r"`([\w/]+\.py): ([\w.]+)`", page)
    assert steps and len(re.findall(r"^\d+\. `", page, flags=re.M)) <= 15
    for path, function in steps:
        text = (source / path).read_text(encoding="utf-8")
        for part in function.split("."):
            assert re.search(rf"^\s*(?:def|class) {part}\b", text, flags=re.M), f"{path} has no {part}"


def test_the_picture_of_the_architecture_names_modules_of_core_that_exist() -> None:
    named = re.findall(r'class="m">(\w+)<', (ROOT / "docs/img/architecture.svg").read_text(encoding="utf-8"))
    assert named and [name for name in named if not (ROOT / f"src/emdcfl/core/{name}.py").exists()] == []


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every ``emdcfl …`` command of a block of shell code, and where it stands."""
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                if words and words[0].rpartition("/")[2] == "emdcfl":
                    yield name(page), words[1:]


def test_commands_name_existing_options() -> None:
    for module in pkgutil.iter_modules(emdcfl.cli.__path__):
        importlib.import_module(f"emdcfl.cli.{module.name}")  # each adds its commands
    whole: click.Command = typer.main.get_command(app)
    named = list(commands())
    assert named
    for page, words in named:
        command = whole
        context, left = click.Context(command, info_name="emdcfl"), words
        while isinstance(command, click.Group):
            found = command.get_command(context, left[0])
            assert found is not None, f"{page}: there is no command 'emdcfl {' '.join(words)}'"
            command, left = found, left[1:]
            context = click.Context(command, parent=context)
        try:
            command.make_parser(context).parse_args(left)
        except click.UsageError as error:
            pytest.fail(f"{page}: emdcfl {' '.join(words)}: {error.format_message()}")


def test_the_config_page_is_what_init_writes() -> None:
    page = (ROOT / "docs/reference/config.md").read_text(encoding="utf-8")
    block = re.search(r"^```toml\n(.*?)^```", page, flags=re.M | re.S)
    assert block is not None and block[1] == config.template()


@pytest.mark.parametrize("page", ["README.md", "docs/reference/methods.md"])
def test_tables_of_methods_are_complete(page: str) -> None:
    rows = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert set(METHODS) <= set(re.findall(r"`([a-z]+)`", "\n".join(rows)))


def test_the_table_of_scenarios_is_complete() -> None:
    page = (ROOT / "docs/reference/scenarios.md").read_text(encoding="utf-8").partition("\n## ")[0]
    other = {"folder", "nodes", "tiny"}  # own files, the nodes of a federation; tests register the last
    assert set(re.findall(r"^\| `([a-z0-9-]+)` \|", page, flags=re.M)) == set(scenarios.names()) - other


def test_numbers_of_the_readme_are_those_of_the_generated_table() -> None:
    table = (ROOT / "docs/results/tables/comparison.md").read_text(encoding="utf-8").replace("*", "")
    for page, number in (("README.md", 3), ("docs/results/README.md", 9)):
        lines = re.findall(r"^\| `[a-z-]+`, .* true ones? .*$", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)
        assert len(lines) == number
        for cell in (cell for line in lines for cell in re.findall(r"\d\d\.\d\d(?: ± \d\.\d\d)?", line)):
            assert f"| {cell} |" in table, f"{page}: {cell}"


def test_the_table_of_noise_is_what_the_accounting_computes() -> None:
    page = (ROOT / "docs/explanation/noise.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.partition("\n## How much noise\n")[2].splitlines() if line.startswith("| ")]
    epsilons, shown = [float(cell) for cell in rows[0][1:]], {row[0].strip(): [float(cell) for cell in row[1:]] for row in rows[2:5]}
    sigmas = [noise.gaussian_sigma(epsilon, 1e-5) for epsilon in epsilons]
    assert shown.pop("σ per entry (an embedding has length 1)") == [round(sigma, 2) for sigma in sigmas]
    for head, totals in shown.items():
        found = [noise.total_epsilon(epsilon, 1e-5, int(head.split()[-2])) for epsilon in epsilons]
        assert totals == [round(total, 1 if total < 10 else None) for total in found]


def test_hashes_are_of_the_pinned_versions() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.M))
    entries = re.split(r"\n(?=\w)", (ROOT / "hashes.txt").read_text(encoding="utf-8").strip())
    hashed = {}
    for entry in entries:
        found = re.match(r"([\w.-]+)==([^\s;]+)", entry)
        assert found is not None and "--hash=sha256:" in entry, entry[:60]
        hashed[found[1]] = found[2]
    assert {name: pinned.get(name, version) for name, version in hashed.items()} == hashed, "run make hashes"
    direct = re.findall(
        r'^    "([\w-]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.scripts]")[0], flags=re.M
    )
    wanted = {name.lower() for name in direct} & set(pinned) - {"torch"}
    assert wanted - set(hashed) == set()


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.M)
    assert cited is not None and cited[1] == project["version"]
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert not re.search(r"\d", emdcfl.__version__.replace(project["version"], ""))


def test_the_core_needs_no_tables_plots_or_cryptography() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not {"pyarrow", "matplotlib", "cryptography"} & {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}


def test_workflows_run_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for file in sorted((ROOT / ".github/workflows").glob("*.yml")):
        workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
        for job in workflow["jobs"].values():
            choices = [str(one).split()[0] for one in job.get("strategy", {}).get("matrix", {}).get("target", [])]
            for line in (step["run"] for step in job["steps"] if "run" in step):
                program, target, *_ = line.split()
                assert program == "gh" or (program == "make" and {target, *choices} - {"${{"} <= targets), f"{file.name}: {line}"


def test_the_site_has_every_page_and_the_gallery_its_examples() -> None:
    nav = re.findall(r"([\w/-]+)\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.M)
    made = {"index", "pages", "contributing", "conduct", "changelog", "security", "benchmarks", "gallery", "reference/python", "examples"}
    made |= {f"examples/{path.stem}" for path in (ROOT / "examples").glob("*.ipynb")}
    there = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    shown = {page for page in there if not page.startswith("results/tables/") and page != "README"}
    assert set(nav) == made | shown


def test_the_menu_of_versions_has_the_newest_on_top() -> None:
    for needed in ("mkdocs", "latex2mathml"):
        pytest.importorskip(needed, reason="needs the extra emdcfl[docs]")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / ".ci" / "site.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    assert hooks.newest_first(["0.9", "latest", "0.10", "1.0"]) == ["latest", "1.0", "0.10", "0.9"]
