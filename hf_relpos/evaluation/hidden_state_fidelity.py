"""Cosines between the hidden states of two models, and of one model with itself when its input is shifted.

The hidden states of an absolute model change when its input is shifted by some positions. `shift_consistency` measures
this, as a scale for the distance between teacher and student. It is not a bound: [CLS] stays at its position, so a
relative model can tell the position of a token by its distance to [CLS].
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from ..data.batching import BATCH_TOKENS, Row, batch_indices
from .encoder import check_pooling, hidden_states, pad_batch, pool
from .fidelity_report import ShiftConsistency
from .inspection import accepts_position_ids, first_position_id, model_max_length


SHIFTS = (1, 4, 16, 32, 64)


class CosineMeans:
    """Mean cosines over tokens and over windows, accumulated by batch."""

    def __init__(self, pooling: str) -> None:
        self.pooling = pooling
        self.token = torch.zeros(4, dtype=torch.float64)
        self.count = torch.zeros(4, dtype=torch.float64)
        self.sentence, self.windows = 0.0, 0

    def add(self, one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the hidden states of both models, (B, L, D), with the mask, (B, L)."""
        cosines = nn.functional.cosine_similarity(one.double(), other.double(), dim=-1)
        positions = torch.arange(mask.shape[1], device=mask.device)
        quarters = 4 * positions // mask.sum(1, keepdim=True)  # quarters of each window's own length
        self.token.index_add_(0, quarters[mask].cpu(), cosines[mask].cpu())
        self.count.index_add_(0, quarters[mask].cpu(), torch.ones_like(cosines[mask]).cpu())
        left, right = (pool(hidden.double(), mask, self.pooling) for hidden in (one, other))
        self.sentence += float(nn.functional.cosine_similarity(left, right, dim=-1).sum())
        self.windows += len(mask)

    def means(self) -> tuple[float, float]:
        """Token and sentence cosine."""
        return float(self.token.sum() / self.count.sum()), self.sentence / self.windows

    def quarters(self) -> list[float]:
        """Token cosine by quarter of the windows; quarters without tokens are omitted."""
        return [float(total / count) for total, count in zip(self.token, self.count, strict=True) if count]


def shift_consistency(
    teacher: PreTrainedModel,
    windows: Sequence[Row],
    shifts: Sequence[int] = SHIFTS,
    pooling: str = "mean",
    batch_tokens: int = BATCH_TOKENS,
) -> ShiftConsistency:
    """Agreement of a model with itself when its input is shifted; [CLS] stays at the first position.

    Args:
        teacher: a model that takes `position_ids`.
        windows: rows of tokens, `[CLS] … [SEP]`.
        shifts: shifts in positions; those that move the longest window past the model's maximum length are skipped.
        pooling: `mean` or `cls`.

    Raises:
        ValueError: if no shift fits, or the model takes no position ids.
    """
    check_pooling(pooling)
    if not accepts_position_ids(teacher):
        raise ValueError(f"{type(teacher).__name__}: takes no position_ids, so its input cannot be moved")
    limit = model_max_length(teacher)
    longest = max(map(len, windows))
    fitting = [shift for shift in shifts if limit is None or longest + shift <= limit]
    if not fitting:
        raise ValueError(
            f"windows of {longest} tokens leave no room for a shift of {min(shifts)} in the {limit} positions of the "
            "model; give shorter ones"
        )
    first = first_position_id(teacher)
    mean, single = CosineMeans(pooling), {shift: CosineMeans(pooling) for shift in fitting}
    for indices in batch_indices(windows, batch_tokens):
        ids, mask = pad_batch([windows[index] for index in indices], teacher)
        plain = hidden_states(teacher, ids, mask)
        total = torch.zeros_like(plain)
        for shift in fitting:
            positions = torch.arange(ids.shape[1], device=ids.device)
            positions = torch.where(positions > 0, positions + shift, 0) + first
            shifted = hidden_states(teacher, ids, mask, positions.expand_as(ids))
            single[shift].add(shifted, plain, mask)
            total += shifted
        mean.add(total / len(fitting), plain, mask)
    return ShiftConsistency(len(windows), *mean.means(), {shift: cosines.means() for shift, cosines in single.items()})
