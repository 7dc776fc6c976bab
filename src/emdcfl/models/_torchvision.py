"""Import torchvision, also beside a build of torch that its compiled operators do not fit.

torchvision's compiled operators (``nms`` and friends, for object detection) are built against one build of torch. Next to a CPU-only torch
the library does not load, and importing torchvision fails because it registers shape functions for two operators that do not exist. None
of the networks here uses them. Only when the compiled library cannot be loaded, this module declares their names without an
implementation: the import then succeeds, and calling one of them is still an error.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from emdcfl.core.errors import ModelError

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None  # the declarations live as long as this object


def torchvision_models() -> Any:
    """Import and return ``torchvision.models``."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModelError("this network needs torchvision: install the extra with  pip install 'emdcfl[vision]'")
    if not _compiled_operators_load(Path(spec.origin).parent):
        _declare_missing_operators()
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:
        raise ModelError(f"torchvision does not fit torch {torch.__version__}: {str(error).splitlines()[0]}") from error


def _compiled_operators_load(folder: Path) -> bool:
    if hasattr(torch.ops.torchvision, "nms"):
        return True
    for file in sorted(folder.glob("_C*.so")) + sorted(folder.glob("_C*.pyd")):
        try:
            torch.ops.load_library(str(file))
        except (OSError, ImportError):
            continue
        return True
    return False


def _declare_missing_operators() -> None:
    global _library
    if _library is None:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            _library.define(schema)
