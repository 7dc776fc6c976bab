"""Where samples come from: every source is a table of images with labels, kept as uint8."""

from __future__ import annotations

from emdcfl.data.sources.base import Source
from emdcfl.data.sources.digits import digits

__all__ = ["Source", "digits"]
