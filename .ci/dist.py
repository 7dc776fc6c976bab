"""``python .ci/dist.py``: build sdist and wheel, look into them, install each into an empty environment and run the README there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from email.parser import BytesParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
NEEDED = ("py.typed", "report/templates/run.html", "report/templates/card.md", "report/templates/predict.py", "runs/template.toml")


def run(*command: object, cwd: Path) -> str:
    """Run a command without our source on its path; end with its output where it fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build() -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the sdist."""
    for old in DIST.glob("emdcfl-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT, cwd=ROOT)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, sdist


def check(wheel: Path, sdist: Path) -> None:
    """Look for what must be inside, and for what must not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = BytesParser().parsebytes(archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))))
    missing = [name for name in NEEDED if f"emdcfl/{name}" not in names]
    foreign = [name for name in names if not name.startswith(("emdcfl/", "emdcfl-"))]
    sources = {f"emdcfl/{path.relative_to(ROOT / 'src/emdcfl')}" for path in (ROOT / "src/emdcfl").rglob("*.py")}
    missing += sorted(sources - set(names))
    if missing or foreign:
        sys.exit(f"{wheel.name}: lacks {missing}, has {foreign}")
    if about["Version"] != project["version"] or about["License-Expression"] != project["license"]:
        sys.exit(f"{wheel.name}: version {about['Version']}, licence {about['License-Expression']}")
    with tarfile.open(sdist) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    wanted = {
        "LICENSE",
        "CITATION.cff",
        "CHANGELOG.md",
        "Makefile",
        "constraints.txt",
        "tests/conftest.py",
        "examples/README.md",
        "mkdocs.yml",
    }
    if wanted - inside:
        sys.exit(f"{sdist.name}: lacks {sorted(wanted - inside)}")


def try_out(archives: tuple[Path, Path]) -> None:
    """Install each archive into an empty environment, with the core's dependencies alone, and run the README's Python there."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "env", with_pip=True)
        python = place / "env" / "bin" / "python"
        for archive in archives:
            again = ["--force-reinstall", "--no-deps", "--no-build-isolation"] if archive.suffix == ".gz" else []
            if again:
                run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", "hatchling", cwd=place)
            run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", *again, archive, cwd=place)
            said = [run(python, "-c", block, cwd=place).splitlines()[0] for block in blocks]
            promised = re.findall(r"clusters_?\)  # (.*)", "\n".join(blocks))
            if said != promised:
                sys.exit(f"{archive.name}: README promises {promised}, got {said}")
            version = run(place / "env" / "bin" / "emdcfl", "--version", cwd=place).strip()
            run(place / "env" / "bin" / "emdcfl", "--help", cwd=place)
            extra = run(python, "-m", "pip", "list", "--format", "freeze", cwd=place).lower()
            unwanted = [name for name in ("cryptography", "pyarrow", "matplotlib", "pandas", "flwr") if f"\n{name}==" in extra]
            if unwanted:
                sys.exit(f"{archive.name}: the core pulls in {unwanted}")
            print(f"{archive.name}: installed alone as {version}; {len(blocks)} Python examples of the README ran")


def release(tag: str) -> None:
    """Check that a tag may be released."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    heading = re.search(rf"^## \[{re.escape(version)}\] – (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    if tag != f"v{version}":
        sys.exit(f"expected the tag v{version}, the version of pyproject.toml, got {tag!r}")
    if heading is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        sys.exit(f"expected '## [{version}] – YEAR-MONTH-DAY' in CHANGELOG.md, got {heading[0] if heading else 'no such heading'!r}")
    print(f"{tag} may be released")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tag"]:
        release(sys.argv[2])
        sys.exit(0)
    built = build()
    check(*built)
    try_out(built)
