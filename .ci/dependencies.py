"""``python .ci/dependencies.py sbom FILE | audit``: what this environment holds, as CycloneDX, and whether it has known vulnerabilities."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

AUDITOR = "pip-audit==2.10.1"
ROOT = Path(__file__).parents[1]


def canonical(name: str) -> str:
    """Return a distribution's name as the package index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def sbom() -> dict[str, Any]:
    """Return the installed distributions as a CycloneDX document; equal environments give equal documents."""
    found = {canonical(d.metadata["Name"]): d for d in distributions()}
    names = {name: f"pkg:pypi/{name}@{d.version}" for name, d in sorted(found.items())}
    components = [component(found[name], purl) for name, purl in names.items() if name != "emdcfl"]
    graph = [{"ref": purl, "dependsOn": sorted(names[n] for n in needs(found[name]) if n in names)} for name, purl in names.items()]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(components))}",
        "version": 1,
        "metadata": {"component": {**component(found["emdcfl"], names["emdcfl"]), "type": "application"}},
        "components": components,
        "dependencies": graph,
    }


def component(d: Distribution, purl: str) -> dict[str, Any]:
    """Describe one distribution."""
    about: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": d.metadata["Name"], "version": d.version, "purl": purl}
    if expression := d.metadata.get("License-Expression"):
        about["licenses"] = [{"expression": expression}]
    return about


def needs(d: Distribution) -> set[str]:
    """Return the names a distribution requires, of extras too."""
    return {canonical(m[0]) for line in d.requires or () if (m := re.match(r"[A-Za-z0-9._-]+", line))}


def audit() -> int:
    """Look the versions of ``constraints.txt`` up in the advisory database; 1 if one has a known vulnerability."""
    ours = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "--requirement", str(ROOT / "constraints.txt")]
    auditor = [str(Path(sys.executable).parent / "uv"), "tool", "run", "--quiet", "--from", AUDITOR, "pip-audit"]
    try:
        ended = subprocess.run([*auditor, *ours], capture_output=True, text=True, check=False, timeout=300)
        entries = json.loads(ended.stdout)["dependencies"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError):  # no uv, no index, no advisories
        entries = []
    looked_up = [entry for entry in entries if "skip_reason" not in entry]
    if not looked_up:
        print("not audited: no source of advisories can be reached from here")
        return 0
    for entry in looked_up:
        for known in entry["vulns"]:
            print(f"{entry['name']} {entry['version']}: {known['id']}, fixed in {', '.join(known['fix_versions']) or 'no version'}")
    skipped = [entry["name"] for entry in entries if "skip_reason" in entry]
    print(f"{len(looked_up)} versions audited" + (f", not found: {', '.join(skipped)}" if skipped else ""))
    return int(any(entry["vulns"] for entry in looked_up))


if __name__ == "__main__":
    if sys.argv[1:] == ["audit"]:
        sys.exit(audit())
    path = Path(sys.argv[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document := sbom(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}: {len(document['components'])} components")
