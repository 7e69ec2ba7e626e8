"""Conversion of checkpoints with absolute or relative positions to models of this package.

`pipeline` has `convert`. It hands one record, the `Conversion` of `plan`, from module to module: `build` makes the
model in memory, `exact` or `learn` fit its positions, `verify` and `held_out` compare it with the source, `report` and
`card` say what was done. `methods` has the choices, `folder` the files.
"""

from ..checkpoints.errors import ConversionError, PoorConversionWarning
from .export import export_checkpoint
from .methods import METHODS, Method
from .pipeline import convert
from .report import ConversionReport, Step


__all__ = ["METHODS", "ConversionError", "ConversionReport", "Method", "PoorConversionWarning", "Step"]
__all__ += ["convert", "export_checkpoint"]
