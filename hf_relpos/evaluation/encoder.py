"""Compute hidden states and sentence vectors of rows of token ids.

The result of a row does not depend on the other rows of its batch.
Shapes: B rows of a batch, L tokens of a row, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.batching import Row, pad_rows


POOLINGS = ("mean", "cls")


def check_pooling(pooling: str) -> None:
    """
    Raises:
        ValueError: for a pooling other than `mean` and `cls`.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling = {pooling!r} is unknown; use one of: {', '.join(map(repr, POOLINGS))}")


def pad_batch(rows: Sequence[Row], model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """`pad_rows` with a model's padding id, on its device: ids (B, L) int64, mask (B, L) bool."""
    ids, mask = pad_rows(rows, getattr(model.config, "pad_token_id", None) or 0)
    return ids.to(model.device), mask.to(model.device)


@torch.inference_mode()
def hidden_states(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Last hidden states of one batch, (B, L, D), at least float32.

    Args:
        model: a model with `last_hidden_state`, or with a head on such a model; its mode (train or eval) is kept.
        ids: (B, L).
        mask: (B, L), true for tokens that are not padding.
        token_type_ids: (B, L), or None for zeros.

    Raises:
        ValueError: if hidden states of real tokens are not finite.
    """
    types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}  # some models lack the argument
    hidden = model.base_model(input_ids=ids, attention_mask=mask.long(), **types).last_hidden_state
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if not hidden[mask].isfinite().all():
        name = getattr(model.config, "name_or_path", "") or type(model).__name__
        raise ValueError(f"{name}: the hidden states are NaN or infinite; check the weights, or load float32")
    return hidden


def pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: str = "mean") -> torch.Tensor:
    """Sentence vectors, (B, D), from hidden states (B, L, D).

    Args:
        mask: (B, L), true for tokens that are not padding.
        pooling: `mean` over these tokens, special tokens included, or `cls`, the first token.

    Raises:
        ValueError: for an unknown pooling.
    """
    check_pooling(pooling)
    if pooling == "cls":
        return hidden[:, 0]
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


@dataclass(frozen=True)
class Encoder:
    """A model with what its texts need.

    Attributes:
        model: a model with `last_hidden_state`, in eval mode.
        tokenizer: its tokenizer.
        pooling: `mean` or `cls`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    pooling: str = "mean"
