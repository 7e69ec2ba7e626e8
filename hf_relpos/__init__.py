"""BERT with relative positions for Hugging Face Transformers.

Importing this package registers `RelPosBertConfig` and its models with the Auto classes, and with PEFT where that is
installed: at once where the program has imported the Auto classes, else when it does. Nothing else happens: no other
checkpoint loads differently, no file is read, no kernel compiled. Its names are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING

from .deferred import when_auto_classes_are_imported
from .version import __version__


if TYPE_CHECKING:
    from .conversion import convert as convert
    from .conversion import export_checkpoint as export_checkpoint
    from .conversion import merge_card as merge_card
    from .explain import explain_backend as explain_backend
    from .live import accelerate_attention as accelerate_attention
    from .live import restore_attention as restore_attention
    from .model.configuration_relpos_bert import RelPosBertConfig as RelPosBertConfig
    from .model.context import AttentionContext as AttentionContext
    from .model.formula import Table as Table
    from .model.formula import Terms as Terms
    from .model.formula import attend as attend
    from .model.memory import SegmentMemory as SegmentMemory
    from .model.modeling_relpos_bert import (
        RelPosBertForMaskedLM as RelPosBertForMaskedLM,
    )
    from .model.modeling_relpos_bert import (
        RelPosBertForMultipleChoice as RelPosBertForMultipleChoice,
    )
    from .model.modeling_relpos_bert import (
        RelPosBertForNextSentencePrediction as RelPosBertForNextSentencePrediction,
    )
    from .model.modeling_relpos_bert import (
        RelPosBertForPreTraining as RelPosBertForPreTraining,
    )
    from .model.modeling_relpos_bert import (
        RelPosBertForQuestionAnswering as RelPosBertForQuestionAnswering,
    )
    from .model.modeling_relpos_bert import (
        RelPosBertForSequenceClassification as RelPosBertForSequenceClassification,
    )
    from .model.modeling_relpos_bert import (
        RelPosBertForTokenClassification as RelPosBertForTokenClassification,
    )
    from .model.modeling_relpos_bert import (
        RelPosBertLMHeadModel as RelPosBertLMHeadModel,
    )
    from .model.modeling_relpos_bert import (
        RelPosBertModel as RelPosBertModel,
    )
    from .model.modeling_relpos_bert import (
        RelPosBertPreTrainedModel as RelPosBertPreTrainedModel,
    )
    from .model.scheme import Option as Option
    from .model.scheme import Scheme as Scheme
    from .model.schemes import SCHEMES as SCHEMES
    from .patch import patch_transformers as patch_transformers
    from .training.anneal import (
        AnnealAbsolutePositions as AnnealAbsolutePositions,
    )
    from .training.anneal import (
        drop_absolute_positions as drop_absolute_positions,
    )
    from .training.stream import SegmentDataset as SegmentDataset
    from .training.stream import StreamTrainer as StreamTrainer


# Module of each name.
_MODULES = {
    "AnnealAbsolutePositions": ".training.anneal",
    "AttentionContext": ".model.context",
    "Option": ".model.scheme",
    "RelPosBertConfig": ".model.configuration_relpos_bert",
    "RelPosBertForMaskedLM": ".model.modeling_relpos_bert",
    "RelPosBertForMultipleChoice": ".model.modeling_relpos_bert",
    "RelPosBertForNextSentencePrediction": ".model.modeling_relpos_bert",
    "RelPosBertForPreTraining": ".model.modeling_relpos_bert",
    "RelPosBertForQuestionAnswering": ".model.modeling_relpos_bert",
    "RelPosBertForSequenceClassification": ".model.modeling_relpos_bert",
    "RelPosBertForTokenClassification": ".model.modeling_relpos_bert",
    "RelPosBertLMHeadModel": ".model.modeling_relpos_bert",
    "RelPosBertModel": ".model.modeling_relpos_bert",
    "RelPosBertPreTrainedModel": ".model.modeling_relpos_bert",
    "SCHEMES": ".model.schemes",
    "Scheme": ".model.scheme",
    "SegmentDataset": ".training.stream",
    "SegmentMemory": ".model.memory",
    "StreamTrainer": ".training.stream",
    "Table": ".model.formula",
    "Terms": ".model.formula",
    "accelerate_attention": ".live",
    "attend": ".model.formula",
    "convert": ".conversion",
    "drop_absolute_positions": ".training.anneal",
    "explain_backend": ".explain",
    "export_checkpoint": ".conversion",
    "merge_card": ".conversion",
    "patch_transformers": ".patch",
    "restore_attention": ".live",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name], __name__), name)
        globals()[name] = value
        return value
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
