"""Files that are either whole or not there: written beside their place, flushed to the disk, then moved in one step.

Also the two binary formats of a run directory, both with the same bytes for the same content: safetensors for tensors, npz for arrays.
Nothing is pickled. A seal (``sealed``, ``write_tensors(seal=True)``) is a checksum inside the file it belongs to. ``Lock`` keeps a folder
for one process.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from torch import Tensor

from emdcfl.core.codec import on_host, raw
from emdcfl.core.errors import StoreError
from emdcfl.runs import signals

SEAL = "sha256"
"""Key of the checksum in a sealed file."""

TEMPORARY = ".tmp-"
"""How the names of files begin that were not finished; what a kill leaves behind is removed when the directory is opened next."""

MAPPED = 1 << 20
"""Bytes from which a tensor that is read stays in its file until it is used."""

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The types a tensor in a file may have, and their names in the safetensors format."""


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Finish before a signal is obeyed, and say which place cannot be written, and that nothing is lost."""
    with signals.defer_signals():
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"{path}: cannot write: {error.strerror}; the last complete round is safe, fix the problem and use --resume"
            ) from error


def write_file(path: Path, chunks: Iterable[bytes | memoryview], *, sync: bool = True) -> None:
    """Replace the file in one step. ``sync=False`` leaves it to the caller to flush the folder entry (once for many files)."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    with _writing(path):
        try:
            _flushed(temporary, "wb", chunks)
            os.replace(temporary, path)  # noqa: PTH105 (one name to intercept in the tests of interrupted writes)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        if sync:
            sync_folder(path.parent)


def append_file(path: Path, content: bytes) -> None:
    """Add to the end of a file, flushed to the disk before this returns; whoever reads it must expect a last line that was cut off."""
    with _writing(path):
        _flushed(path, "ab", [content])


def _flushed(path: Path, mode: str, chunks: Iterable[bytes | memoryview]) -> None:
    # Path.open has no opener
    with open(path, mode, opener=_no_link) as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())


def _no_link(path: str, flags: int) -> int:
    """Open a file of this directory, not one elsewhere that a symbolic link names."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def refuse_links(folder: Path) -> None:
    """Refuse a directory with symbolic links, through which other files would be read, written or deleted, or with pipes or devices."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise StoreError(f"{path}: is a symbolic link, expected a file or folder of the run; put its content in its place")
        if not (path.is_file() or path.is_dir()):
            raise StoreError(f"{path}: is a pipe, socket or device, expected files and folders in a run directory; remove it")


def make_folder(path: Path) -> None:
    """Make the folder and those above it, where they are missing."""
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Make new and renamed entries of the folder survive a power cut."""
    if os.name == "nt":  # Windows does not open folders
        return
    with _writing(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file that is no longer needed, if it is there."""
    with _writing(path):
        path.unlink(missing_ok=True)


def json_text(value: Any, where: str, *, indent: int | None = None) -> str:
    """Return JSON in the order given, without NaN and infinities (they are not JSON, and other readers fail on them)."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent, separators=None if indent else (",", ":"))
    except ValueError as error:
        raise StoreError(f"{where}: a number is NaN or infinite, which JSON cannot hold; write null instead") from error
    except (TypeError, RecursionError) as error:
        raise StoreError(f"{where}: not made of JSON values: {error}") from error


def sealed(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the object with a checksum over its other keys as the last one.

    Examples
    --------
    >>> unsealed(sealed({"k": 4}, "summary.json"), "summary.json")
    {'k': 4}
    """
    plain = {key: item for key, item in value.items() if key != SEAL}
    return {**plain, SEAL: hashlib.sha256(json_text(plain, where).encode()).hexdigest()}


def unsealed(value: Any, where: str) -> dict[str, Any]:
    """Return the object without its checksum, which must fit; one without a checksum is taken as it is."""
    if not isinstance(value, Mapping):
        raise StoreError(f"{where}: expected an object, got {type(value).__name__}")
    plain = {key: item for key, item in value.items() if key != SEAL}
    if SEAL in value and sealed(plain, where)[SEAL] != value[SEAL]:
        raise StoreError(f"{where}: changed or damaged since it was written (its checksum does not fit)")
    return plain


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object with its checksum, indented for people."""
    write_file(path, [json_text(sealed(value, path.name), path.name, indent=2).encode() + b"\n"])


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise StoreError(f"{path}: missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path}: truncated or damaged: {error}") from error


def read_sealed(path: Path) -> dict[str, Any]:
    """Return what ``write_json`` wrote; a file that has lost its checksum is damaged."""
    value = read_json(path)
    found = unsealed(value, str(path))
    if SEAL not in value:
        raise StoreError(f"{path}: truncated or damaged (it has no checksum)")
    return found


def tensor_hash(tensor: Tensor) -> str:
    """Return the SHA-256 (hex) over type, shape and elements of a tensor."""
    h = hashlib.sha256(f"{CODES[tensor.dtype]}{list(tensor.shape)}\n".encode())
    h.update(raw(tensor))
    return h.hexdigest()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, seal: bool = False, sync: bool = True
) -> None:
    """Write a safetensors file, streaming: the library's own writer would copy every tensor first.

    The format: length of the header (8 bytes, little-endian), the header (JSON, padded with spaces to a multiple of 8), the elements. Wider
    types come first, so that every tensor is aligned. With ``seal`` the metadata hold a checksum of tensors and metadata.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES or tensor.layout != torch.strided:
            raise StoreError(f"{path}: {name}: expected a dense tensor of {', '.join(CODES.values())}, got {tensor.layout} {tensor.dtype}")
    plain = {name: on_host(tensor) for name, tensor in tensors.items()}
    if seal:
        metadata = {**(metadata or {}), SEAL: _tensors_seal(plain, metadata or {})}
    order = sorted(plain, key=lambda name: (-plain[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in order:
        end = offset + plain[name].numel() * plain[name].element_size()
        header[name] = {"dtype": CODES[plain[name].dtype], "shape": list(plain[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = json_text(header, str(path)).encode()
    text += b" " * (-len(text) % 8)
    write_file(path, [len(text).to_bytes(8, "little"), text, *(raw(plain[name]) for name in order)], sync=sync)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and metadata of a safetensors file. Large tensors are mapped from the file; writing to them does not change it."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = dict(file.metadata() or {})
    except Exception as error:  # the library's own errors, and whatever a forged header makes torch raise
        state = "truncated or damaged" if path.exists() else "missing"
        raise StoreError(f"{path}: {state}: {' '.join(str(error).split())}") from error
    if any(tensor.dtype not in CODES for tensor in tensors.values()):
        raise StoreError(f"{path}: damaged, or not written by emdcfl: expected tensors of type {', '.join(CODES.values())}")
    seal = metadata.pop(SEAL, None)
    if seal is not None and seal != _tensors_seal(tensors, metadata):
        raise StoreError(f"{path}: truncated or damaged (its checksum does not fit)")
    return {name: t if t.numel() * t.element_size() >= MAPPED else t.clone() for name, t in tensors.items()}, metadata


def _tensors_seal(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    parts = {name: tensor_hash(tensors[name]) for name in sorted(tensors)}
    return hashlib.sha256(json.dumps([parts, dict(sorted(metadata.items()))]).encode()).hexdigest()


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write an npz file without compression and without the time of day, so that equal arrays give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(arrays):
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            content = io.BytesIO()
            try:
                np.lib.format.write_array(content, np.asarray(arrays[name]), allow_pickle=False)
            except ValueError as error:
                raise StoreError(f"{path}: {name} holds Python objects; expected numbers, booleans or strings") from error
            archive.writestr(entry, content.getvalue())
    write_file(path, [buffer.getvalue()])


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return all arrays of an npz file; the format has a checksum for each."""
    try:
        _check_sizes(path)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except StoreError:
        raise
    except Exception as error:  # zip, npy header and array have a dozen ways each to be broken
        raise StoreError(f"{path}: missing, truncated or damaged: {' '.join(str(error).split())}") from error


def _check_sizes(path: Path) -> None:
    """Refuse an npz file that unpacks to more than it holds: ``write_arrays`` does not compress, so memory is bounded by the file."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        unpacked = sum(entry.file_size for entry in entries)
        if unpacked > size:
            raise StoreError(f"{path}: unpacks to {unpacked} bytes from {size}; expected arrays without compression, as emdcfl writes them")
        for entry in entries:
            with archive.open(entry) as file:
                version = np.lib.format.read_magic(file)
                header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = header(file)
            if math.prod(shape) * dtype.itemsize > entry.file_size:
                raise StoreError(f"{path}: damaged: {entry.filename} names an array of shape {shape} but holds {entry.file_size} bytes")


class Lock:
    """An exclusive lock on a file, held until ``release`` or the end of the process, however it ends.

    A forked worker does not keep it: ``filelock`` closes the worker's copy of the descriptor.
    """

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise StoreError(
                f"{path.parent}: in use by another emdcfl run{_owner(path)}; wait for it to end, or choose another --out"
            ) from error
        with contextlib.suppress(OSError):  # the number is for the error message only; a full disk must not stop whoever frees it
            path.write_text(f"{os.getpid()}\n", encoding="ascii")

    def release(self) -> None:
        """Give the lock back. Doing it twice does no harm."""
        self._lock.release(force=True)


def _owner(path: Path) -> str:
    try:
        owner = path.read_text(encoding="ascii", errors="replace")[:20].strip()
    except OSError:  # Windows does not let others read a locked file
        owner = ""
    return f" (process {owner})" if owner.isdigit() else ""
