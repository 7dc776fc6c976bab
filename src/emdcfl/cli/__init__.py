"""The command line: ``emdcfl init | run | methods | predict | place | data``."""

from emdcfl.cli.app import main

__all__ = ["main"]
