"""Random masking of tokens for evaluation and distillation: every drawn token becomes [MASK].

`DataCollatorForLanguageModeling` is for training: it also inserts random tokens, and may leave a row without [MASK].
"""

from collections.abc import Sequence

import numpy as np

from .batching import Row


IGNORE_INDEX = -100  # the label that the losses of Transformers ignore


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
        masked = rng.random(len(ids)) < rate
        masked[[0, -1]] = False
        if not masked.any():
            masked[rng.integers(1, len(ids) - 1)] = True
        inputs.append(np.where(masked, mask_token_id, ids).tolist())
        labels.append(np.where(masked, ids, IGNORE_INDEX).tolist())
    return inputs, labels
