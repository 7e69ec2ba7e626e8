"""Conversion of BERT checkpoints with absolute positions to relative ones, and of relative ones to ours."""

import sys
from types import ModuleType

from .checkpoint import convert
from .export import ExportReport, export_tables
from .layers import attention_config, attention_weights
from .methods import METHODS, Method, Work
from .report import ConversionReport, Step
from .source import ConversionError


__all__ = [
    "METHODS",
    "ConversionError",
    "ConversionReport",
    "ExportReport",
    "Method",
    "Step",
    "Work",
    "attention_config",
    "attention_weights",
    "convert",
    "export_tables",
]


class _CallableModule(ModuleType):
    """`hf_relpos.convert` is this module and the function in it: whichever was imported first, both uses work."""

    __call__ = staticmethod(convert)


sys.modules[__name__].__class__ = _CallableModule
