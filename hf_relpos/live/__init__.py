"""Live models of Transformers, in place: `optimize`, and how to undo it."""

from .levels import restore_attention
from .optimize import Optimized, optimize


__all__ = ["Optimized", "optimize", "restore_attention"]
