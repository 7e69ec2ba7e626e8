"""Conversion of checkpoints with absolute or relative positions to models of this package.

`pipeline` has `convert`, which writes the folder and calls the other modules: `plan` (choices and checks), `build`
(the model in memory), a method of `methods` (`absolute_tables`, `exact` or `learn`), `agreement`
and `verify` (checks of the result). `options` and `presets` declare the settings.
"""

from ..families.errors import ConversionError, PoorConversionWarning
from .checkpoint_export import export_checkpoint
from .methods import METHODS, Method
from .pipeline import convert
from .presets import QUALITIES, Quality
from .report import ConversionReport, Step
from .run import ConversionRun


__all__ = [
    "METHODS",
    "QUALITIES",
    "ConversionError",
    "ConversionReport",
    "ConversionRun",
    "Method",
    "PoorConversionWarning",
    "Quality",
    "Step",
    "convert",
    "export_checkpoint",
]
