from .attention.context import AttentionContext as AttentionContext
from .attention.formula import Table as Table, Terms as Terms, attend as attend
from .conversion import convert as convert, export_checkpoint as export_checkpoint
from .live import optimize as optimize, restore_attention as restore_attention
from .loaded.buffers import fill_buffers as fill_buffers, unfilled_buffers as unfilled_buffers
from .loaded.check import check_loaded as check_loaded
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
from .schemes.registry import SCHEMES as SCHEMES
from .schemes.scheme import Option as Option, Scheme as Scheme

__version__: str
