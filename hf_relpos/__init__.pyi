from .conversion import (
    ConversionError as ConversionError,
    ConversionReport as ConversionReport,
    convert as convert,
    export_checkpoint as export_checkpoint,
)
from .live import Optimized as Optimized, optimize as optimize, undo_optimize as undo_optimize
from .loaded.buffers import initialize_buffers as initialize_buffers, uninitialized_buffers as uninitialized_buffers
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

__version__: str
