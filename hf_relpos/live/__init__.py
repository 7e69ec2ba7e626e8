"""Live stock models, in place: `optimize`, and for their attention alone `accelerate_attention`."""

from .accelerate import AcceleratedAttention, accelerate_attention, restore_attention
from .optimize import Optimized, optimize


__all__ = ["AcceleratedAttention", "Optimized", "accelerate_attention", "optimize", "restore_attention"]
