"""The README's Python example runs and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_python_example(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert code is not None
    namespace: dict[str, object] = {}
    exec(compile(code.group(1), "README.md", "exec"), namespace)
    lines = capsys.readouterr().out.splitlines()
    said = re.search(r"print\(result.clusters\)  # (.*)", code.group(1))
    assert said is not None
    assert lines[0] == said.group(1)
    assert 0.9 < float(lines[1].split(",")[0]) <= 1.0
