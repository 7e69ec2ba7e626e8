"""In-place optimization of loaded models: `optimize`, and how to undo it."""

from ..deprecation import old_names
from .levels import undo_optimize
from .optimize import Optimized, optimize


__all__ = ["Optimized", "optimize", "undo_optimize"]
__getattr__ = old_names(__name__, {"restore_attention": "undo_optimize"})
