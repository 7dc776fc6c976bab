"""The ``ClientApp``: one client's node. The node's config gives its name and its home folder, where ``node.toml`` says what it serves.

``emdcfl node serve`` starts it in a fork for every message (``supernode.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import emdcfl.methods  # noqa: F401  registers the tasks that methods bring
from emdcfl.core.errors import ConfigError
from emdcfl.engines.flower.node.home import HomeNode
from emdcfl.engines.flower.node.serve import make_app
from emdcfl.engines.flower.node.survey import answer_survey

if TYPE_CHECKING:
    from flwr.app import Context


def open_node(context: Context) -> HomeNode:
    """Return the node of this process."""
    name, home = context.node_config.get("name"), context.node_config.get("home")
    if not isinstance(name, str) or not name or not isinstance(home, str):
        raise ConfigError("expected name and home in the node's config; start it with emdcfl node serve HOME")
    return HomeNode(name, home)


app = make_app(open_node, survey=answer_survey)
