"""``python .ci/files.py FILE …``: what a commit should not bring in. Prints one line per problem, and fails if there is one."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml

LARGEST = 1_000_000
"""Bytes of a file."""

HOSTILE = ("<" * 7 + " ", ">" * 7 + " ")
"""What a merge leaves."""


class Loader(yaml.SafeLoader):
    """YAML with the tags that mkdocs knows."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def problems(path: Path) -> Iterator[str]:
    """Yield what is wrong with a file."""
    content = path.read_bytes()
    if len(content) > LARGEST:
        yield f"{len(content)} bytes, at most {LARGEST}"
    if b"\0" in content:
        return
    text = content.decode("utf-8")
    if text and not text.endswith("\n"):
        yield "no newline at the end"
    if "\r" in text:
        yield "carriage returns"
    for number, line in enumerate(text.splitlines(), start=1):
        if line.rstrip() != line:
            yield f"line {number}: space at the end"
        if line.startswith(HOSTILE):
            yield f"line {number}: an unfinished merge"
    try:
        if path.suffix in (".yml", ".yaml", ".cff"):
            yaml.load(text, Loader)  # a SafeLoader
        elif path.suffix == ".toml":
            tomllib.loads(text)
        elif path.suffix in (".json", ".ipynb"):
            found = json.loads(text)
            if path.suffix == ".ipynb" and any(cell.get("outputs") for cell in found["cells"]):
                yield "a notebook with outputs; clear them"
    except ValueError as error:
        yield str(error).splitlines()[0]
    except yaml.YAMLError as error:
        yield str(error).replace("\n", " ")


if __name__ == "__main__":
    found = [f"{name}: {problem}" for name in sys.argv[1:] if Path(name).is_file() for problem in problems(Path(name))]
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))
