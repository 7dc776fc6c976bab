"""Which files hold a data set: a local folder first, then earlier downloads, then the Hugging Face hub (extra ``[hub]``).

The hub library resumes or discards partial downloads and shows progress; this module picks the files and checks their hashes.
Tables of natural sites (``natural/NAME.parquet``) are not on the hub.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from emdcfl.core.errors import DataError
from emdcfl.core.optional import pa, pq
from emdcfl.data.sources.parquet import cache_dir


def parquet_files(name: str, repo: str, split: str, data_root: str | Path | None = None) -> list[Path]:
    """Return the Parquet files of one split.

    Looked for, in this order: ``data_root`` or ``$EMDCFL_DATA`` (``NAME/SPLIT.parquet``, or the hub's own layout below ``NAME``), the
    download folder of the cache, the hub. A ``data_root`` that was named but lacks the file is an error, not a reason to download.
    """
    root = _root(data_root)
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
        return _download(repo, split, downloads)
    except DataError as error:
        place = (root or Path("FOLDER")) / name / f"{split}.parquet"
        raise DataError(
            f"the {name} data are not here and {error}: put {repo}'s {split} Parquet file at {place}"
            + ("" if root else " and set EMDCFL_DATA=FOLDER")
        ) from error


def _root(data_root: str | Path | None) -> Path | None:
    named = data_root or os.environ.get("EMDCFL_DATA")
    return Path(named).expanduser() if named else None


def _search(folder: Path, split: str) -> Iterator[Path]:
    if not folder.is_dir():
        return
    if (whole := folder / f"{split}.parquet").is_file():  # beside the hub's own layout, it would be the same samples twice
        yield whole
        return
    # Hidden folders hold the hub library's own bookkeeping, unfinished downloads among it.
    for path in sorted(folder.rglob("*.parquet")):
        if path.name.startswith(split) and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _download(repo: str, split: str, folder: Path) -> list[Path]:
    """Download the Parquet files of one split into ``folder`` and verify them.

    Raises
    ------
    DataError
        With the reason in one line: the extra is missing, the hub cannot be reached, or a hash differs.
    """
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise DataError("the hub extra is not installed (pip install 'emdcfl[hub]')") from error
    try:
        api = hub.HfApi()
        listed = api.list_repo_files(repo, repo_type="dataset")
        wanted = [file for file in sorted(listed) if file.endswith(".parquet") and PurePosixPath(file).name.startswith(split)]
        if not wanted:
            raise DataError(f"the hub's {repo} has no {split} Parquet file")
        hashes = {info.path: info.lfs.sha256 for info in api.get_paths_info(repo, wanted, repo_type="dataset") if info.lfs is not None}
        return [_fetch(hub, repo, file, hashes.get(file), folder) for file in wanted]
    except DataError:
        raise
    except Exception as error:  # the hub library raises many kinds; they all mean that the file did not come
        reason = next(iter(str(error).strip().splitlines()), "no reason given")
        raise DataError(f"the hub cannot be reached ({type(error).__name__}: {reason})") from error


def _fetch(hub: Any, repo: str, file: str, expected: str | None, folder: Path) -> Path:
    path = Path(hub.hf_hub_download(repo, file, repo_type="dataset", local_dir=folder))
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if expected not in (None, found):
        path.unlink()
        raise DataError(f"{file} of {repo} arrived damaged (its SHA-256 is not the one the hub reports) and was deleted: run again")
    return path


def natural_table(name: str, data_root: str | Path | None = None) -> pa.Table:
    """Read one table from ``data_root`` or ``$EMDCFL_DATA``."""
    root = _root(data_root)
    if root is None:
        raise DataError(f"scenario {name!r} reads natural/{name}.parquet: set EMDCFL_DATA to the folder that holds natural/")
    path = root / "natural" / f"{name}.parquet"
    if not path.is_file():
        raise DataError(f"no {name} data at {path}: set EMDCFL_DATA to the folder that holds natural/{name}.parquet")
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
