"""Data sets from the Hugging Face hub, when the ``[hub]`` extra is installed.

The hub library resumes or discards partial downloads and shows progress; this module picks the files and checks their hashes.
"""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path, PurePosixPath
from typing import Any

from emdcfl.core.errors import DataError


def download(repo: str, split: str, folder: Path) -> list[Path]:
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
    if expected is not None and _sha256(path) != expected:
        path.unlink()
        raise DataError(f"{file} of {repo} arrived damaged (its SHA-256 is not the one the hub reports) and was deleted: run again")
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
