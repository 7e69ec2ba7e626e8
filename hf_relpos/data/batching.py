"""Batches of rows of token ids, `[CLS] … [SEP]`: rows of similar length together, padded."""

from collections.abc import Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence


Row = Sequence[int]

BATCH_TOKENS = 8192
# Eager attention stores several numbers per pair of tokens and head, so pairs limit the batches of long rows.
BATCH_PAIRS = 4 * 1024 * 1024


def rows_per_batch(length: int, batch_tokens: int = BATCH_TOKENS) -> int:
    """Number of rows of that length in a batch, at least one."""
    return max(1, min(batch_tokens // length, BATCH_PAIRS // length**2))


def batch_indices(rows: Sequence[Row], batch_tokens: int = BATCH_TOKENS) -> Iterator[list[int]]:
    """Indices of all rows, batch by batch, rows of similar length together.

    The longest rows come first, so that a batch which does not fit into memory fails at once.
    """
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    start = 0
    while start < len(order):
        count = rows_per_batch(len(rows[order[start]]), batch_tokens)
        yield order[start : start + count]
        start += count


def pad_rows(rows: Sequence[Row], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows on the right; returns ids, (B, L) int64, and the mask, (B, L) bool, false for padding."""
    tensors = [torch.as_tensor(row) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_value=pad_token_id)
    return ids, pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in tensors], batch_first=True)
