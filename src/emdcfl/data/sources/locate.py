"""Which files hold a data set: a local folder first, then earlier downloads, then the hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from emdcfl.core.errors import DataError
from emdcfl.data.sources import hub
from emdcfl.data.sources.cache import cache_dir


def parquet_files(name: str, repo: str, split: str, data_root: str | Path | None = None) -> list[Path]:
    """Return the Parquet files of one split.

    Looked for, in this order: ``data_root`` or ``$EMDCFL_DATA`` (``NAME/SPLIT.parquet``, or the hub's own layout below ``NAME``), the
    download folder of the cache, the hub. A ``data_root`` that was named but lacks the file is an error, not a reason to download.
    """
    root = Path(data_root).expanduser() if data_root else Path(os.environ["EMDCFL_DATA"]) if os.environ.get("EMDCFL_DATA") else None
    if root is not None:
        found = list(_search(root / name, split))
        if found:
            return found
        if data_root:
            raise DataError(f"no {name} data under {root}: put the {split} table at {root / name / f'{split}.parquet'}")
    downloads = cache_dir() / "hub" / name
    found = list(_search(downloads, split))
    if found:
        return found
    try:
        return hub.download(repo, split, downloads)
    except DataError as error:
        place = (root or Path("FOLDER")) / name / f"{split}.parquet"
        raise DataError(
            f"the {name} data are not here and {error}: put {repo}'s {split} Parquet file at {place}"
            + ("" if root else " and set EMDCFL_DATA=FOLDER")
        ) from error


def _search(folder: Path, split: str) -> Iterator[Path]:
    if not folder.is_dir():
        return
    # Hidden folders hold the hub library's own bookkeeping, unfinished downloads among it.
    for path in sorted(folder.rglob("*.parquet")):
        if path.name.startswith(split) and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path
