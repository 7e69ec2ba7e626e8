"""Conversion of BERT checkpoints with absolute positions to relative ones, and of relative ones to ours."""

from ..families.errors import ConversionError, PoorConversionWarning
from .back import export_checkpoint
from .checkpoint import convert
from .context import ConversionContext, Method
from .export import ExportReport, export_tables, resize_tables
from .methods import METHODS
from .quality import QUALITIES, Quality
from .report import ConversionReport, Step
from .trained_card import merge_card


__all__ = [
    "METHODS",
    "QUALITIES",
    "ConversionContext",
    "ConversionError",
    "ConversionReport",
    "ExportReport",
    "Method",
    "PoorConversionWarning",
    "Quality",
    "Step",
    "convert",
    "export_checkpoint",
    "export_tables",
    "merge_card",
    "resize_tables",
]
