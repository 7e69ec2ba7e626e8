"""Training: distillation."""

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .distillation import DistillationReport, DistillationSettings, distil


# Imported on first use, since most of these import the Trainer.
_LAZY = {"DistillationReport": "distillation", "DistillationSettings": "distillation", "distil": "distillation"}

__all__ = ["DistillationReport", "DistillationSettings", "distil"]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
