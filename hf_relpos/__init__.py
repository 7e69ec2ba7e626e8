"""BERT with relative positions for Hugging Face Transformers.

Importing this package registers `RelPosBertConfig` and its models with the Auto classes, and with PEFT where that is
installed: at once where the program has imported the Auto classes, else when it does. No other checkpoint loads
differently, and no file is read; a stock class that leaves out the relative positions of a checkpoint gives a
warning. With the environment variable HF_RELPOS_OPTIMIZE=1 (or a dtype) each model that is loaded from then on is
optimized. Names of this package are imported on first use.
"""

import importlib
import os
from typing import TYPE_CHECKING

from .deferred import when_auto_classes_are_imported
from .deprecation import old_names
from .version import __version__


if TYPE_CHECKING:
    from .conversion import (
        ConversionError as ConversionError,
        ConversionReport as ConversionReport,
        convert as convert,
        export_checkpoint as export_checkpoint,
    )
    from .live import Optimized as Optimized, optimize as optimize, undo_optimize as undo_optimize
    from .loaded.buffers import (
        initialize_buffers as initialize_buffers,
        uninitialized_buffers as uninitialized_buffers,
    )
    from .loaded.check import verify_weights as verify_weights
    from .machine import self_check as self_check
    from .models.capabilities import explain_backend as explain_backend
    from .models.configuration_relpos_bert import RelPosBertConfig as RelPosBertConfig
    from .models.modeling_relpos_bert import (
        RelPosBertForMaskedLM as RelPosBertForMaskedLM,
        RelPosBertForMultipleChoice as RelPosBertForMultipleChoice,
        RelPosBertForNextSentencePrediction as RelPosBertForNextSentencePrediction,
        RelPosBertForPreTraining as RelPosBertForPreTraining,
        RelPosBertForQuestionAnswering as RelPosBertForQuestionAnswering,
        RelPosBertForSequenceClassification as RelPosBertForSequenceClassification,
        RelPosBertForTokenClassification as RelPosBertForTokenClassification,
        RelPosBertLMHeadModel as RelPosBertLMHeadModel,
        RelPosBertModel as RelPosBertModel,
        RelPosBertPreTrainedModel as RelPosBertPreTrainedModel,
    )
    from .models.patch import patch_transformers as patch_transformers
    from .models.recurrence import SegmentMemory as SegmentMemory
    from .training import DistillationReport as DistillationReport, distil as distil


_NAMES = {
    ".conversion": "ConversionError ConversionReport convert export_checkpoint",
    ".loaded.buffers": "initialize_buffers uninitialized_buffers",
    ".loaded.check": "verify_weights",
    ".live": "Optimized optimize undo_optimize",
    ".machine": "self_check",
    ".models.capabilities": "explain_backend",
    ".models.configuration_relpos_bert": "RelPosBertConfig",
    ".models.modeling_relpos_bert": "RelPosBertForMaskedLM RelPosBertForMultipleChoice RelPosBertForPreTraining "
    "RelPosBertForNextSentencePrediction RelPosBertForQuestionAnswering RelPosBertForSequenceClassification "
    "RelPosBertForTokenClassification RelPosBertLMHeadModel RelPosBertModel RelPosBertPreTrainedModel",
    ".models.patch": "patch_transformers",
    ".models.recurrence": "SegmentMemory",
    ".training": "DistillationReport distil",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
_OLD_NAMES = {
    "check_loaded": "verify_weights",
    "fill_buffers": "initialize_buffers",
    "restore_attention": "undo_optimize",
    "unfilled_buffers": "uninitialized_buffers",
}
_OLD_NAMES |= {name: f"schemes.{name}" for name in "AttentionContext Option SCHEMES Scheme Table Terms attend".split()}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name], __name__), name)
        globals()[name] = value
        return value
    if name in _OLD_NAMES:
        return old_names(__name__, _OLD_NAMES, 4)(name)
    if not name.startswith("_"):
        try:
            return importlib.import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


def _register() -> None:
    from .registration import register

    register()


when_auto_classes_are_imported(_register)

if os.environ.get("HF_RELPOS_OPTIMIZE", "0") not in ("", "0"):
    from .autoload import start

    start()
