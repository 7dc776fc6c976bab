"""The Python of the guide runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import sklearn

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "python.md"


@pytest.mark.slow
def test_the_guide_runs() -> None:
    pytest.importorskip("pandas", reason="the extra emdcfl[tables] is not installed")
    namespace: dict[str, object] = {}
    with sklearn.config_context():
        for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S):
            exec(compile(block, GUIDE.name, "exec"), namespace)
    result, found = namespace["result"], namespace["found"]
    assert result.clusters == {"bergen": 0, "milan": 1, "oslo": 0, "rome": 1}
    assert np.isfinite(found.frame["accuracy"]).all()
