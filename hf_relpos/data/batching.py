"""Rows of token ids, `[CLS] … [SEP]`, of different lengths: in batches of similar length, and padded."""

from collections.abc import Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence


Row = Sequence[int]

BATCH_TOKENS = 8192
# Eager attention holds several numbers for each pair of tokens and head: in long rows the pairs fill the memory.
BATCH_PAIRS = 4 * 1024 * 1024


def rows_per_batch(length: int, batch_tokens: int = BATCH_TOKENS) -> int:
    """How many rows of that length form a batch, at least one."""
    return max(1, min(batch_tokens // length, BATCH_PAIRS // length**2))


def batch_indices(rows: Sequence[Row], batch_tokens: int = BATCH_TOKENS) -> Iterator[list[int]]:
    """Indices of all rows, batch by batch: rows of similar length together, the longest first.

    The longest first, so that a batch which does not fit into memory fails at once.
    """
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    start = 0
    while start < len(order):
        count = rows_per_batch(len(rows[order[start]]), batch_tokens)
        yield order[start : start + count]
        start += count


def pad_rows(rows: Sequence[Row], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded on the right, (B, L) int64, and their mask, (B, L) bool, true for tokens that are not padding."""
    tensors = [torch.as_tensor(row) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_value=pad_token_id)
    return ids, pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in tensors], batch_first=True)
