"""``fit`` needs the core alone: without pyarrow, matplotlib, cryptography and fcntl it gives the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in {names!r} else real(name, package)
"""
NAMES = ("fcntl", "cryptography", "pyarrow", "matplotlib", "pandas", "flwr")


FIT = """
import numpy, emdcfl
x = numpy.random.default_rng(0).normal(size=(4, 80, 4)).astype("float32")
sites = {{f"s{{i}}": (x[i], (x[i, :, 0] > 0).astype(int)) for i in range(4)}}
settings = {{"method.projection": {projection!r}, "method.grouping": "neighbourhoods"}}
emdcfl.fit(sites, rounds=1, local_epochs=1, out={out!r}, settings=settings)
"""


@pytest.mark.slow
@pytest.mark.parametrize("projection", ["row", "fresh"])
def test_fit_without_optional_packages(tmp_path: Path, projection: str) -> None:
    code = WITHOUT.format(names=NAMES) + FIT.format(out=str(tmp_path / "without"), projection=projection)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    exec(FIT.format(out=str(tmp_path / "with"), projection=projection), {})
    files = [p.relative_to(tmp_path / "without") for p in (tmp_path / "without").rglob("*.safetensors")]
    assert files
    for file in [*files, Path("distances.npz"), Path("metrics.jsonl"), Path("config.toml")]:
        assert (tmp_path / "without" / file).read_bytes() == (tmp_path / "with" / file).read_bytes(), file


def test_what_is_missing_is_named_with_its_extra(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,label\n1,a\n", encoding="utf-8")
    (tmp_path / "b.csv").write_text("x,label\n1,a\n", encoding="utf-8")
    code = WITHOUT.format(names=("pyarrow",)) + f"import emdcfl.cli; emdcfl.cli.main(['data', 'check', {str(tmp_path)!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "emdcfl[tables]" in done.stderr and len(done.stderr.splitlines()) == 1
