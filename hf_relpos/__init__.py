"""BERT with relative positions for Hugging Face Transformers.

Importing this package registers `RelPosBertConfig` and its models with the Auto classes, and with PEFT where that is
installed. Nothing else happens: no other checkpoint loads differently, no file is read, no kernel compiled.
"""

import importlib

from .explain import explain_backend
from .kernels import register as _register_kernels
from .model.configuration_relpos_bert import RelPosBertConfig
from .model.context import AttentionContext
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
from .model.scheme import Option, Scheme
from .model.schemes import SCHEMES
from .patch import patch_transformers
from .registration import register as _register
from .training.anneal import AnnealAbsolutePositions, drop_absolute_positions
from .version import __version__


__all__ = [
    "SCHEMES",
    "AnnealAbsolutePositions",
    "AttentionContext",
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
    "accelerate_attention",
    "attend",
    "convert",
    "drop_absolute_positions",
    "explain_backend",
    "export_checkpoint",
    "patch_transformers",
    "restore_attention",
]


# Imported on first use: these bring the Trainer, all of the converter, or stock models beside BERT.
_LAZY = {
    "accelerate_attention": ".live",
    "convert": ".conversion",
    "export_checkpoint": ".conversion",
    "restore_attention": ".live",
    "SegmentDataset": ".training.stream",
    "StreamTrainer": ".training.stream",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_register()
_register_kernels()
