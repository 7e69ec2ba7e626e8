"""Agreement of a converted model with its source: hidden states, attention, masked tokens, similarity of sentences."""

from .compare import CompareSettings, compare_models
from .encoder import Encoder, hidden_states, pool
from .inspection import model_max_length
from .loading import load_encoder, load_model, load_tokenizer, pooling_of
from .masked import MaskedAgreement, masked_agreement, masked_predictions
from .model_fidelity import (
    Fidelity,
    FidelitySettings,
    LengthFidelity,
    ShiftConsistency,
    attention_divergence,
    attention_divergences,
    default_lengths,
    fidelity,
    shift_consistency,
    verdict,
)
from .passages import passage_vectors
from .similarity import pair_vectors, rank_correlation, similarities, spearman_difference
from .sliding_windows import windowed_hidden_states


__all__ = [
    "CompareSettings",
    "Encoder",
    "Fidelity",
    "FidelitySettings",
    "LengthFidelity",
    "MaskedAgreement",
    "ShiftConsistency",
    "attention_divergence",
    "attention_divergences",
    "compare_models",
    "default_lengths",
    "fidelity",
    "hidden_states",
    "load_encoder",
    "load_model",
    "load_tokenizer",
    "masked_agreement",
    "masked_predictions",
    "model_max_length",
    "pair_vectors",
    "passage_vectors",
    "pool",
    "pooling_of",
    "rank_correlation",
    "shift_consistency",
    "similarities",
    "spearman_difference",
    "verdict",
    "windowed_hidden_states",
]
