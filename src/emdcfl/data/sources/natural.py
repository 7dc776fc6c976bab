"""Tables of natural sites: ``natural/NAME.parquet`` in the data folder. They are not on the hub and never downloaded."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from emdcfl.core.errors import DataError


def natural_table(name: str, data_root: str | Path | None = None) -> pa.Table:
    """Read one table from ``data_root`` or ``$EMDCFL_DATA``."""
    root = data_root or os.environ.get("EMDCFL_DATA")
    if not root:
        raise DataError(f"scenario {name!r} reads natural/{name}.parquet: set EMDCFL_DATA to the folder that holds natural/")
    path = Path(root).expanduser() / "natural" / f"{name}.parquet"
    if not path.is_file():
        raise DataError(f"no {name} data at {path}: set EMDCFL_DATA to the folder that holds natural/{name}.parquet")
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
