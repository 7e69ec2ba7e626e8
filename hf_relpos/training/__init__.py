"""Training: distillation."""

from .distillation import DistillationReport, distil


__all__ = ["DistillationReport", "distil"]
