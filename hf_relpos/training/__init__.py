"""Training: distillation."""

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .distillation import DistillationReport, distil


__all__ = ["DistillationReport", "distil"]


def __getattr__(name: str) -> object:
    if name in __all__:  # which imports the Trainer
        return getattr(importlib.import_module(".distillation", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
