"""Training: distillation, streams with recurrence memory, and resumption."""

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .checkpoints import last_checkpoint
    from .distillation import DistillationReport, DistillationSettings, distil
    from .losses import Targets, row_targets


# Imported on first use, since most of these import the Trainer.
_LAZY = {
    "DistillationReport": "distillation",
    "DistillationSettings": "distillation",
    "Targets": "losses",
    "distil": "distillation",
    "last_checkpoint": "checkpoints",
    "row_targets": "losses",
}

__all__ = [
    "DistillationReport",
    "DistillationSettings",
    "Targets",
    "distil",
    "last_checkpoint",
    "row_targets",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
