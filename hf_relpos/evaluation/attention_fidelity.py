"""KL divergence between the attention weights of teacher and student, by layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from ..data.batching import BATCH_TOKENS, Row, batch_indices
from .encoder import pad_batch


# Most bytes of the attention weights of both models on a batch; a single row that has more is not compared.
ATTENTION_BYTES = 1024**3
# A student gives weight 0 to keys outside its attention window, and the divergence would be infinite. With 1e-10 such
# a key costs 23 nats times the teacher's weight.
MIN_WEIGHT = 1e-10


@contextmanager
def eager_attention(*models: PreTrainedModel) -> Iterator[None]:
    """Context in which models use eager attention, which returns its weights."""
    before = [model.config._attn_implementation for model in models]
    try:
        for model in models:
            model.set_attn_implementation("eager")
        yield
    finally:
        for model, name in zip(models, before, strict=True):
            model.set_attn_implementation(name)


def attention_divergence(teacher: torch.Tensor, student: torch.Tensor, mask: torch.Tensor) -> float:
    """Σ KL(teacher‖student) over heads and query tokens that are not padding, in nats.

    Args:
        teacher: weights, (B, H, L, L).
        student: weights, the same shape.
        mask: (B, L), true for tokens that are not padding.
    """
    total = 0.0
    for p, q in zip(teacher.unbind(1), student.unbind(1), strict=True):  # one head at a time, to save memory
        ratio = p.clamp(min=MIN_WEIGHT).log_().sub_(q.clamp(min=MIN_WEIGHT).log_())
        total += float((ratio * p).sum(-1, dtype=torch.float64)[mask].sum())
    return total


@torch.inference_mode()
def attention_divergences(
    teacher: PreTrainedModel, student: PreTrainedModel, windows: Sequence[Row], batch_tokens: int = BATCH_TOKENS
) -> list[float] | None:
    """Mean divergence of the attention weights for each layer, over heads and tokens.

    Args:
        windows: rows of tokens, `[CLS] … [SEP]`.

    Returns:
        None for models whose weights differ in shape or are not returned, and for weights that take more than
        `ATTENTION_BYTES`.
    """
    config, longest = teacher.base_model.config, max(map(len, windows))
    row_bytes = 2 * 4 * config.num_hidden_layers * config.num_attention_heads * longest**2
    if row_bytes > ATTENTION_BYTES:
        return None
    totals: list[float] = []
    with eager_attention(teacher, student):
        for indices in batch_indices(windows, min(batch_tokens, longest * (ATTENTION_BYTES // row_bytes))):
            ids, mask = pad_batch([windows[index] for index in indices], student)
            one, other = (
                model.base_model(input_ids=ids, attention_mask=mask.long(), output_attentions=True).attentions or ()
                for model in (teacher, student)
            )
            if not one or [weights.shape for weights in one] != [weights.shape for weights in other]:
                return None
            found = [attention_divergence(p, q, mask) / p.shape[1] for p, q in zip(one, other, strict=True)]
            totals = [a + b for a, b in zip(totals or [0.0] * len(found), found, strict=True)]
    return [total / sum(map(len, windows)) for total in totals]
