"""A federation of four nodes for a module's cases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from emdcfl.apps.deployment import Deployment


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    from tests.apps.trial_runs import federation  # which need Flower
    from tests.faults.cases import deadline

    with federation(tmp_path_factory.mktemp("faults") / "federation", deadline=deadline()) as running:
        yield running
