"""Pretrained weights: from ``TORCH_HOME``, from a file, or downloaded; never unpickled as code."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from emdcfl.core.errors import ModelError


def imagenet_file(url: str) -> Path:
    """Return the local file of published weights; download it when it is not in ``$TORCH_HOME/hub/checkpoints``."""
    name = url.rsplit("/", 1)[-1]
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), hash_prefix=_hash_in(name), progress=True)
        except (URLError, OSError, RuntimeError) as error:
            raise ModelError(
                f"the ImageNet weights {name} are not in {path.parent} and could not be downloaded ({error}): "
                f"put the file there, or pass weights=FILE, or weights=None for random weights"
            ) from error
    expected = _hash_in(name)
    if expected and not _sha256(path).startswith(expected):
        raise ModelError(f"{path} is damaged: its SHA-256 does not start with {expected}; delete it and run again")
    return path


def load(path: str | Path) -> dict[str, Tensor]:
    """Read a state dictionary from a ``.pth`` (tensors only) or ``.safetensors`` file."""
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"no such weights file: {path}")
    return dict(_load(str(path), path.stat().st_mtime_ns))


@functools.lru_cache(maxsize=1)  # a run builds the same network once per client and cluster
def _load(path: str, mtime_ns: int) -> dict[str, Tensor]:
    try:
        state: Any = load_file(path) if path.endswith(".safetensors") else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any reader error means the same to the user
        raise ModelError(f"cannot read weights from {path}: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ModelError(f"{path} holds no state dictionary of tensors: save it with torch.save(model.state_dict(), FILE)")
    return state


def load_backbone(module: nn.Module, state: dict[str, Tensor], *, ignore: str, origin: str) -> None:
    """Load all but the keys that start with ``ignore`` (the published head); anything else missing or of another shape is an error."""
    state = {key: value for key, value in state.items() if not key.startswith(ignore)}
    # Files from before torch 0.4.1 have no batch counters; ours then stay at zero.
    own = {key: value for key, value in module.state_dict().items() if key in state or not key.endswith("num_batches_tracked")}
    for key, value in own.items():
        if key not in state:
            raise ModelError(f"{origin} has no tensor {key!r}: these are not weights of this network")
        if state[key].shape != value.shape:
            raise ModelError(f"{origin}: {key!r} has shape {tuple(state[key].shape)}, the network needs {tuple(value.shape)}")
    module.load_state_dict({key: state[key] for key in own}, strict=False)


def _hash_in(name: str) -> str | None:
    match = re.search(r"-([0-9a-f]{8,})\.", name)
    return match.group(1) if match else None


@functools.lru_cache(maxsize=8)
def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
