"""Files that are either whole or not there: written beside their place, flushed to the disk, then moved in one step.

Also the two binary formats of a run directory, both with the same bytes for the same content: safetensors for tensors, npz for arrays.
Nothing is pickled.

Imports errors, torch, numpy and safetensors only.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from emdcfl.errors import StoreError

TEMPORARY = ".tmp-"
"""How the names of files begin that were not finished; what a kill leaves behind is removed when the directory is opened next."""

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The types a tensor in a file may have, and their names in the safetensors format."""


def write_file(path: Path, chunks: Iterable[bytes | memoryview], *, sync_folder: bool = True) -> None:
    """Replace the file in one step. ``sync_folder=False`` leaves it to the caller to flush the folder entry (once for many files)."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105 (one name to intercept in the tests of interrupted writes)
        if sync_folder:
            fsync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(
            f"{path}: cannot write: {error.strerror}; the last complete round is safe, free the cause and use --resume"
        ) from error


def fsync_folder(folder: Path) -> None:
    """Make new and renamed entries of the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_text(value: Any, where: str, *, indent: int | None = None) -> str:
    """JSON in the order given, without NaN and infinities (they are not JSON, and other readers fail on them)."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent, separators=None if indent else (",", ":"))
    except ValueError as error:
        raise StoreError(
            f"{where}: a number is NaN or infinite, which JSON cannot hold; keep such values in tensors or write null"
        ) from error
    except TypeError as error:
        raise StoreError(f"{where}: not made of JSON values: {error}") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise StoreError(f"{path}: missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path}: truncated or damaged: {error}") from error


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements of a contiguous CPU tensor in order, without a copy."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def plain_tensor(tensor: Tensor, where: str) -> Tensor:
    """The tensor as it goes into a file: detached, on the CPU, contiguous, of a type the file format has."""
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        raise StoreError(f"{where}: expected a dense tensor of type {', '.join(DTYPES.values())}, got {tensor.layout} {tensor.dtype}")
    return tensor.detach().to("cpu").resolve_neg().contiguous()


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 (hex) over type, shape and elements of a plain tensor."""
    h = hashlib.sha256(f"{DTYPES[tensor.dtype]}{list(tensor.shape)}\n".encode())
    h.update(tensor_bytes(tensor))
    return h.hexdigest()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, sync_folder: bool = True
) -> None:
    """Write a safetensors file, streaming: the library's own writer would copy every tensor first.

    The format: length of the header (8 bytes, little-endian), the header (JSON, padded with spaces to a multiple of 8), the elements. Wider
    types come first, so that every tensor is aligned.
    """
    plain = {name: plain_tensor(tensor, f"{path}: {name}") for name, tensor in tensors.items()}
    order = sorted(plain, key=lambda name: (-plain[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in order:
        end = offset + plain[name].numel() * plain[name].element_size()
        header[name] = {"dtype": DTYPES[plain[name].dtype], "shape": list(plain[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = json_text(header, str(path)).encode()
    text += b" " * (-len(text) % 8)
    write_file(path, [len(text).to_bytes(8, "little"), text, *(tensor_bytes(plain[name]) for name in order)], sync_folder=sync_folder)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file. Tensors from 1 MiB up are mapped from the file; writing to them does not change it."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = dict(file.metadata() or {})
    except (OSError, SafetensorError, ValueError) as error:
        raise StoreError(f"{path}: truncated or damaged: {' '.join(str(error).split())}") from error
    return {name: t if t.numel() * t.element_size() >= 1 << 20 else t.clone() for name, t in tensors.items()}, metadata


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
    """All arrays of an npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise StoreError(f"{path}: missing, truncated or damaged: {' '.join(str(error).split())}") from error
