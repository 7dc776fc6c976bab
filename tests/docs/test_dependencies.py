"""The list of installed software, and what an audit says where no advisories can be read."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def dependencies() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dependencies", Path(__file__).parents[2] / ".ci" / "dependencies.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bill_of_materials_names_what_is_installed_and_what_needs_it(dependencies: ModuleType) -> None:
    found = dependencies.sbom()
    names = {component["name"].lower() for component in found["components"]}
    assert {"torch", "numpy", "cryptography"} <= names
    known = {entry["ref"]: entry["dependsOn"] for entry in found["dependencies"]}
    assert set(known) == {c["bom-ref"] for c in [*found["components"], found["metadata"]["component"]]}
    assert all(ref in known for refs in known.values() for ref in refs)
    assert any(ref.startswith("pkg:pypi/torch@") for ref in known[found["metadata"]["component"]["bom-ref"]])
    assert dependencies.sbom() == found


VULNERABLE = {"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}
CLEAN = {"name": "b", "version": "1", "vulns": []}
SKIPPED = {"name": "c", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ([VULNERABLE, CLEAN], 1, "a 1: X-1, fixed in 2"),
        ([CLEAN, SKIPPED], 0, "1 versions audited, not found: c"),
        ([SKIPPED], 0, "not audited"),
        (None, 0, "not audited"),
    ],
)
def test_an_audit_fails_for_known_vulnerabilities_and_says_where_it_saw_none(
    dependencies: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: Any, code: int, said: str
) -> None:
    text = "" if answer is None else json.dumps({"dependencies": answer})
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=text))
    assert dependencies.audit() == code
    assert said in capsys.readouterr().out
