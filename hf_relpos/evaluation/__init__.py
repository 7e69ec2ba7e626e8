"""Evaluation: agreement of a converted model with its source, similarity, retrieval, passkeys, masked tokens."""

from ..data.masking import mask_rows
from ..data.pairs import Pair, Query, read_documents, read_pairs, read_queries
from ..data.records import read_records
from ..data.windows import unknown_rate
from .attention_fidelity import attention_divergence, attention_weights
from .compare import CompareSettings, compare_models
from .encoder import Encoder, hidden_states, pool
from .evaluate import EvaluateSettings, evaluate_model
from .fidelity_report import Fidelity, LengthFidelity, MaskedAgreement, ShiftConsistency, verdict
from .hidden_state_fidelity import shift_consistency
from .inspection import model_max_length
from .loading import load_encoder, load_model, load_tokenizer, pooling_of
from .masked import (
    masked_accuracy,
    masked_accuracy_by_length,
    masked_agreement,
    masked_predictions,
    masked_windows,
    token_ids,
)
from .model_fidelity import FidelitySettings, default_lengths, fidelity
from .passages import passage_vectors
from .passkey import Passkey, passkey_by_mask, passkey_by_vector, passkeys
from .retrieval import Retrieval, difference, document_vectors, rank_documents, retrieve
from .similarity import pair_vectors, similarities, spearman_difference
from .sliding_windows import windowed_hidden_states
from .statistics import Difference, average_ranks, paired_bootstrap, rank_correlation


__all__ = [
    "CompareSettings",
    "Difference",
    "Encoder",
    "EvaluateSettings",
    "Fidelity",
    "FidelitySettings",
    "LengthFidelity",
    "MaskedAgreement",
    "Pair",
    "Passkey",
    "Query",
    "Retrieval",
    "ShiftConsistency",
    "attention_divergence",
    "attention_weights",
    "average_ranks",
    "compare_models",
    "default_lengths",
    "difference",
    "document_vectors",
    "evaluate_model",
    "fidelity",
    "hidden_states",
    "load_encoder",
    "load_model",
    "load_tokenizer",
    "mask_rows",
    "masked_accuracy",
    "masked_accuracy_by_length",
    "masked_agreement",
    "masked_predictions",
    "masked_windows",
    "model_max_length",
    "pair_vectors",
    "paired_bootstrap",
    "passage_vectors",
    "passkey_by_mask",
    "passkey_by_vector",
    "passkeys",
    "pool",
    "pooling_of",
    "rank_correlation",
    "rank_documents",
    "read_documents",
    "read_pairs",
    "read_queries",
    "read_records",
    "retrieve",
    "shift_consistency",
    "similarities",
    "spearman_difference",
    "token_ids",
    "unknown_rate",
    "verdict",
    "windowed_hidden_states",
]
