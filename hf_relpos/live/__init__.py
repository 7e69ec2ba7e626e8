"""Live stock models, in place: `optimize`, and how to undo it."""

from .accelerate import restore_attention
from .optimize import Optimized, optimize


__all__ = ["Optimized", "optimize", "restore_attention"]
