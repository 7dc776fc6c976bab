"""The run directory (``RunStore``), and files that are written in one step (``files``)."""

from emdcfl.runs.store.run_store import RunStore

__all__ = ["RunStore"]
