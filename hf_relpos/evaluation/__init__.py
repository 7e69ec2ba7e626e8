"""Agreement of a converted model with its source: hidden states, and masked tokens."""

from .compare import compare_models
from .encoder import Encoder, hidden_states, pool
from .inspection import model_max_length
from .loading import load_encoder, load_model, load_tokenizer, pooling_of
from .masked import MaskedAgreement, masked_agreement
from .model_fidelity import Fidelity, LengthFidelity, default_lengths, fidelity, verdict
from .sliding_windows import windowed_hidden_states


__all__ = ["Encoder", "Fidelity", "LengthFidelity", "MaskedAgreement", "compare_models", "default_lengths"]
__all__ += ["fidelity", "hidden_states", "load_encoder", "load_model", "load_tokenizer", "masked_agreement"]
__all__ += ["model_max_length", "pool", "pooling_of", "verdict", "windowed_hidden_states"]
