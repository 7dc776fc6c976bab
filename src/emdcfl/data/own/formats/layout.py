"""The layout of a data folder: its clients, images or tables, with or without splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from emdcfl.core.errors import DataError
from emdcfl.data.own.parts import MIXED
from emdcfl.data.own.splitting import SPLIT_NAMES, by_split

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm", ".dcm", ".dicom"})
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What an image may hold, whatever its name is. Pillow knows more, and hands EPS to another program, which would run it."""
EXCEL_SUFFIXES = frozenset({".xlsx", ".xlsm"})
TABLE_SUFFIXES = frozenset({".csv", ".tsv", ".parquet"}) | EXCEL_SUFFIXES

_TABLES = (".xls", ".ods", ".numbers", ".sav", ".dta", ".sas7bdat", ".rds", ".feather", ".arrow")
_ARCHIVES = (".zip", ".gz", ".tar", ".7z", ".rar", ".bz2", ".xz")
_IMAGES = (".nii", ".mha", ".svs", ".heic", ".npy")
UNREAD = {
    **dict.fromkeys(_TABLES, "save the table as CSV"),
    **dict.fromkeys(_ARCHIVES, "unpack the files"),
    **dict.fromkeys(_IMAGES, "export the images as PNG"),
}
"""Files that hold data and are not read, and what to do."""

NO_DATA = frozenset({"thumbs.db", "desktop.ini"})


@dataclass(frozen=True)
class ClientFiles:
    """One client's files: split (or ``"all"``) → folder of class folders, or table."""

    name: str
    parts: dict[str, Path]


@dataclass(frozen=True)
class FolderLayout:
    """``kind`` is ``"images"``, ``"tables"`` (one per client) or ``"table"`` (one for all, with a client column)."""

    kind: str
    clients: list[ClientFiles] = field(default_factory=list)
    table: Path | None = None
    ignored: tuple[Path, ...] = ()
    """Files beside the clients that are not read."""


def discover(path: Path, *, client_column: str | None = None) -> FolderLayout:
    """Tell the layout of a folder from the names in it."""
    if not path.exists():
        raise DataError(f"no such file or folder: {path}")
    if path.is_file():
        if path.suffix.lower() not in TABLE_SUFFIXES:
            remedy = f"; {UNREAD[path.suffix.lower()]}" if path.suffix.lower() in UNREAD else ""
            raise DataError(f"{path} is neither a folder nor a table ({', '.join(sorted(TABLE_SUFFIXES))}){remedy}")
        if client_column is None:
            raise DataError(f"{path} is one table for all clients: name the column that says which client a row is of (--client COLUMN)")
        return FolderLayout("table", table=path)
    entries = visible(path)
    tables = [entry for entry in entries if entry.suffix.lower() in TABLE_SUFFIXES and entry.is_file()]
    folders = [entry for entry in entries if entry.is_dir() and not _holds_runs(entry)]
    ignored = tuple(entry for entry in entries if entry.is_file() and entry.suffix.lower() not in TABLE_SUFFIXES)
    if not folders:
        _refuse_unread(ignored)
    if tables and folders:
        raise DataError(f"{path} holds both tables ({tables[0].name}, …) and sub-folders ({folders[0].name}, …): keep one kind")
    if client_column is not None:
        if len(tables) != 1:
            raise DataError(f"--client {client_column} needs one table, but {path} holds {len(tables)}")
        return FolderLayout("table", table=tables[0], ignored=ignored)
    if tables:
        stems = [table.stem for table in tables]
        if twice := [stem for stem, times in Counter(stems).items() if times > 1]:
            raise DataError(f"{path} holds two tables for client {min(twice)!r}: keep one")
        _refuse_splits(stems, path)
        return FolderLayout("tables", [ClientFiles(table.stem, {MIXED: table}) for table in tables], ignored=ignored)
    if not folders:
        raise DataError(f"{path} holds no clients: expected one sub-folder or one table ({', '.join(sorted(TABLE_SUFFIXES))}) per client")
    _refuse_splits([folder.name for folder in folders], path)
    clients = [client_folder(folder) for folder in folders]
    kinds = {kind for kind, _ in clients}
    if len(kinds) > 1:
        raise DataError(f"{path} holds clients with images and clients with tables: keep one kind")
    return FolderLayout(kinds.pop(), [files for _, files in clients], ignored=ignored)


def client_folder(folder: Path) -> tuple[str, ClientFiles]:
    """Return the kind and files of one client's folder."""
    entries = visible(folder)
    tables = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in TABLE_SUFFIXES]
    folders = [entry for entry in entries if entry.is_dir()]
    if not folders:
        _refuse_unread([entry for entry in entries if entry not in tables])
    if tables:
        parts = {SPLIT_NAMES.get(table.stem.lower(), MIXED): table for table in tables}
        if len(parts) != len(tables) or (MIXED in parts and len(parts) > 1):
            raise DataError(
                f"client {folder.name!r} ({folder}): expected one table, or train/val/test tables, got {len(tables)}; "
                f"if each is a client, run with --data {folder}, or place them one by one"
            )
        return "tables", ClientFiles(folder.name, parts)
    if not folders:
        stray = next((entry.name for entry in entries), None)
        what = f"only files outside class folders ({stray}, …)" if stray else "nothing"
        raise DataError(f"client {folder.name!r} ({folder}) holds {what}: expected one sub-folder of images per class")
    named = {SPLIT_NAMES.get(entry.name.lower()) for entry in folders}
    if None not in named and "train" in named:
        return "images", ClientFiles(folder.name, by_split({entry.name: entry for entry in folders}, f"client {folder.name!r} ({folder})"))
    return "images", ClientFiles(folder.name, {MIXED: folder})


def site_files(path: Path, name: str | None = None) -> tuple[str, ClientFiles]:
    """Return the kind and files of one site, a folder or a table; it is called ``name``, or as its files are."""
    if not path.exists():
        raise DataError(f"no such file or folder: {path}")
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        raise DataError(f"{path} is one image: expected a folder with one sub-folder of images per class, or a table")
    kind, files = ("tables", ClientFiles(path.stem, {MIXED: path})) if path.is_file() else client_folder(path)
    return kind, ClientFiles(name or files.name, files.parts)


def visible(folder: Path) -> list[Path]:
    """Entries of a folder in sorted order, without hidden ones."""
    found = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith((".", "__")) and entry.name.lower() not in NO_DATA]
    odd = next((entry for entry in found if not entry.is_file() and not entry.is_dir() and entry.exists()), None)
    if odd is not None:  # whoever reads a pipe waits for ever
        raise DataError(f"{odd} is a pipe, socket or device, expected files and folders; remove it")
    return found


def _refuse_unread(files: Sequence[Path]) -> None:
    """Refuse files that may be a client's data and would be left out."""
    for file in files:
        if file.suffix.lower() in UNREAD:
            remedy = f"{UNREAD[file.suffix.lower()]}, or move it elsewhere if it is no client's data"
            raise DataError(f"{file} cannot be read as it is: {remedy}")


def _holds_runs(folder: Path) -> bool:
    """Whether a folder is a run directory or holds only such: runs inside the data folder are ignored."""
    inside = [entry for entry in visible(folder) if entry.is_dir()]
    return _is_run(folder) or (bool(inside) and all(map(_is_run, inside)))


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file() and (folder / "state").is_dir()


def _refuse_splits(names: list[str], path: Path) -> None:
    """Refuse the splits of one data set, which would be taken for sites."""
    splits = {SPLIT_NAMES.get(name.lower()) for name in names}
    if len(names) > 1 and None not in splits and "train" in splits:
        raise DataError(
            f"{path} holds {' and '.join(sorted(names))}, which look like splits of one data set: expected sites; put each site's into a "
            "folder of its own (SITE/train, SITE/test), or use one table with a site column (--client COLUMN)"
        )
