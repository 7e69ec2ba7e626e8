"""Random masking of tokens for evaluation and distillation: every drawn token becomes [MASK].

`DataCollatorForLanguageModeling` is for training: it also inserts random tokens, and may leave a row without [MASK].
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batching import Row


IGNORE_INDEX = -100  # the label that the losses of Transformers ignore


def mask_tokens(
    ids: NDArray[np.int64],
    mask_token_id: int,
    rng: np.random.Generator,
    rate: float = 0.15,
    maskable: NDArray[np.bool_] | None = None,
    at_least_one: bool = True,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Replace tokens by [MASK] at random.

    Args:
        ids: (L,).
        rate: probability that a token is masked.
        maskable: the same shape, false for tokens that are never masked; None for no such tokens.
        at_least_one: mask a random token where none was drawn.

    Returns:
        Token ids and labels, the same shape; labels are `IGNORE_INDEX` at tokens that are not masked.
    """
    maskable = np.ones(ids.shape, dtype=bool) if maskable is None else maskable
    masked = (rng.random(ids.shape) < rate) & maskable
    if at_least_one and not masked.any():
        candidates = np.flatnonzero(maskable)
        masked[candidates[rng.integers(len(candidates))]] = True
    return np.where(masked, mask_token_id, ids), np.where(masked, ids, IGNORE_INDEX)


def mask_rows(
    rows: Sequence[Row], mask_token_id: int, rng: np.random.Generator, rate: float = 0.15
) -> tuple[list[list[int]], list[list[int]]]:
    """Mask at least one token of each row `[CLS] … [SEP]`, but never its first or last.

    Args:
        rows: token ids, of any lengths.
        rate: probability that a token is masked.

    Returns:
        Rows, and labels of the same lengths; labels are `IGNORE_INDEX` at tokens that are not masked.

    Raises:
        ValueError: for a row without a token between the first and the last.
    """
    inputs, labels = [], []
    for row in rows:
        if len(row) < 3:
            raise ValueError(f"a row of {len(row)} tokens has none to mask between [CLS] and [SEP]; leave it out")
        ids = np.asarray(row)
        inner = np.ones(len(ids), dtype=bool)
        inner[[0, -1]] = False
        masked, label = mask_tokens(ids, mask_token_id, rng, rate, inner)
        inputs.append(masked.tolist())
        labels.append(label.tolist())
    return inputs, labels
