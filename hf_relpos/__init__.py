"""BERT with relative positions for Hugging Face Transformers.

Importing this package registers `RelPosBertConfig` and its models with the Auto classes. Nothing else happens: no
other checkpoint loads differently, no file is read, no kernel compiled.
"""

import importlib

from .anneal import AnnealAbsolutePositions, drop_absolute_positions
from .backend import explain_backend
from .kernels import register as _register_kernels
from .model.configuration_relpos_bert import RelPosBertConfig
from .model.formula import Table, Terms, attend
from .model.memory import SegmentMemory
from .model.modeling_relpos_bert import (
    RelPosBertForMaskedLM,
    RelPosBertForMultipleChoice,
    RelPosBertForNextSentencePrediction,
    RelPosBertForPreTraining,
    RelPosBertForQuestionAnswering,
    RelPosBertForSequenceClassification,
    RelPosBertForTokenClassification,
    RelPosBertLMHeadModel,
    RelPosBertModel,
    RelPosBertPreTrainedModel,
)
from .model.offsets import Offsets
from .model.scheme import Option, Scheme
from .model.schemes import SCHEMES
from .patch import patch_transformers
from .registration import register as _register
from .version import __version__


__all__ = [
    "SCHEMES",
    "AnnealAbsolutePositions",
    "Offsets",
    "Option",
    "RelPosBertConfig",
    "RelPosBertForMaskedLM",
    "RelPosBertForMultipleChoice",
    "RelPosBertForNextSentencePrediction",
    "RelPosBertForPreTraining",
    "RelPosBertForQuestionAnswering",
    "RelPosBertForSequenceClassification",
    "RelPosBertForTokenClassification",
    "RelPosBertLMHeadModel",
    "RelPosBertModel",
    "RelPosBertPreTrainedModel",
    "Scheme",
    "SegmentDataset",
    "SegmentMemory",
    "StreamTrainer",
    "Table",
    "Terms",
    "__version__",
    "attend",
    "convert",
    "drop_absolute_positions",
    "explain_backend",
    "patch_transformers",
]


_LATER = {"SegmentDataset": ".recurrence", "StreamTrainer": ".recurrence"}  # which bring the Trainer


def __getattr__(name: str):
    """What is imported on first use: `hf_relpos.convert`, which can be called as the function in it, and `_LATER`."""
    if name == "convert":
        return importlib.import_module(".convert", __name__)
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_register()
_register_kernels()
