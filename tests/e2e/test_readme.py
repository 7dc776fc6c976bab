"""The README's Python examples run and print what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("number", [0, 1])
def test_python_example(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)[number]
    namespace: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), namespace)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == re.search(r"print\(.*clusters_?\)  # (.*)", code).group(1)
    assert 0.9 < float(lines[1].split(",")[0]) <= 1.0
