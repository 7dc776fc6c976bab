"""Config files and ``--set``: any text is read, or refused with a ``ConfigError`` of one line; what was read survives its own file."""

from __future__ import annotations

from emdcfl.core.errors import ConfigError
from emdcfl.runs.config import Config, config_hash, dump, loads, override, template
from fuzz.feed import Feed, one_line

KEYS = ("run.rounds", "method", "method.tolerance", "training.lr", "engine.device", "scenario.a.b", "model.name", "x", "run", "run..a", "")


def seeds() -> list[bytes]:
    """The template and small files of every kind."""
    texts = [
        template(),
        dump(Config()),
        '[method]\nname = "fedavg"\nx = [1, {a = 2}]\n',
        "[run]\nrounds = 1e400\n",
        "a = 1979-05-27T07:32:00Z",
    ]
    return [b"\x00" + text.encode() for text in texts] + [b"\x01\x03\x050.1\x02", b"\x01\x02\x0a[1, 2, nan]", b"\x01\x05\x03cuda:0"]


def one(data: bytes) -> None:
    """Read the bytes as a file, or spend them on settings."""
    feed = Feed(data)
    try:
        if feed.number(2) == 0:
            config = loads(feed.rest().decode("utf-8", errors="replace"))
        else:
            settings = {}
            for _ in range(1 + feed.number(3)):
                key = feed.choice(KEYS)
                settings[key] = feed.piece(1 + feed.number(40)).decode("utf-8", errors="replace")
            config = override(Config(), settings)
    except ConfigError as error:
        one_line(error)
        return
    text = dump(config)
    assert config_hash(loads(text)) == config_hash(config), text
