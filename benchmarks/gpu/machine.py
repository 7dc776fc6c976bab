"""The machine that the GPU parts measure on, and how a failed measurement is reported."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from emdcfl.core.tasks import Training
from emdcfl.data.types import Scenario
from emdcfl.engines import make_federation
from watch import refusing_fallbacks

Line = dict[str, Any]
Emit = Callable[[Line], None]


@dataclass(frozen=True)
class Machine:
    """A CUDA device; without one (``tiny``), the batched engine on the CPU takes its place."""

    device: str
    engine: str
    tiny: bool

    @classmethod
    def here(cls, *, tiny: bool) -> Machine:
        if torch.cuda.is_available():
            return cls("cuda", "cuda", tiny)
        if not tiny:
            raise SystemExit("the gpu parts need a CUDA device")
        return cls("cpu", "batched", tiny)

    @property
    def real(self) -> bool:
        return self.device == "cuda"

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.real:
            torch.cuda.synchronize()

    def tidy(self) -> None:
        """Free the device memory of the last measurement, and reset the peak."""
        if self.real:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float | None:
        """Return the most GiB of device memory in use since ``tidy``."""
        return round(torch.cuda.max_memory_allocated() / 2**30, 2) if self.real else None

    def federation(self, world: Scenario, training: Training, *, precision: str = "bf16", **options: Any) -> Any:
        """Start the engine; only the CUDA engine takes ``options``."""
        own = {"precision": precision, "gpu": options} if self.real else {}
        return make_federation(world, engine=self.engine, training=training, device=self.device, **own)


class Box:
    """A time limit, after which no measurement begins."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def open(self) -> bool:
        return time.monotonic() < self._end


def attempt(measure: Callable[[], Line], about: Line, emit: Emit) -> Line | None:
    """Measure; an error, or a fallback of the engine, is printed as a line of its own, and other measurements go on."""
    try:
        with refusing_fallbacks():
            return measure()
    except Exception as error:
        emit({**about, "failed": f"{type(error).__name__}: {' '.join(str(error).split())}", "where": traceback.format_exc(limit=-3)})
        return None
