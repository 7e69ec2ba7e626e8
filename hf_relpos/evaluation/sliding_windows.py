"""Texts past the maximum length of a model, read in overlapping windows.

What a teacher says of a long text in this way is the reference for its student there.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..data.batching import BATCH_TOKENS, Row, batch_indices
from .encoder import hidden_states, pad_batch
from .inspection import model_max_length


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """Where the windows that cover `length` tokens start, `stride` apart; the last one ends with the text."""
    if length <= window:
        return [0]
    return [*range(0, length - window, stride), length - window]


def central_windows(starts: Sequence[int], length: int, window: int) -> torch.Tensor:
    """For each of `length` tokens the window in which it is farthest from the nearer end; the first of equals."""
    index, first = torch.arange(length), torch.tensor(starts)
    last = first[:, None] + min(window, length) - 1
    return torch.minimum(index - first[:, None], last - index).argmax(0)


def windowed_hidden_states(
    model: PreTrainedModel,
    ids: Row,
    length: int | None = None,
    stride: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> torch.Tensor:
    """Last hidden states of a text that may be longer than the maximum length of the model.

    Every window starts with the text's first token ([CLS]). A token's state is that of the window in which it is most
    central, that is, farthest from the nearer end of the window (the first of equals); the first token, which is in
    all windows, gets the mean. [SEP] is in the last window only, as a model that reads the whole text has it only at
    the end.

    Args:
        model: any with `last_hidden_state`.
        ids: one text, `[CLS] … [SEP]`, L tokens.
        length: tokens per window, [CLS] included; None for the maximum length of the model.
        stride: tokens between the starts of two windows; None for half a window.

    Returns:
        (L, D), float32 at least.

    Raises:
        ValueError: for a window of fewer than three tokens or a stride that leaves tokens out.
    """
    length = length or model_max_length(model) or len(ids)
    inner = length - 1
    stride = length // 2 if stride is None else stride
    if length < 3 or not 1 <= stride <= inner:
        raise ValueError(
            f"length = {length}, stride = {stride}: windows need three tokens at least, and a stride from 1 to "
            "length − 1, so that none is left out"
        )
    body = list(ids[1:])
    starts = window_starts(len(body), inner, stride)
    rows = [[ids[0], *body[start : start + inner]] for start in starts]
    states: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    for indices in batch_indices(rows, batch_tokens):
        batch = hidden_states(model, *pad_batch([rows[index] for index in indices], model))
        for index, row in zip(indices, batch, strict=True):
            states[index] = row[: len(rows[index])]
    positions = torch.arange(len(body))
    central = central_windows(starts, len(body), inner)
    out = torch.stack([row[0] for row in states]).mean(0, keepdim=True).repeat(len(ids), 1)
    for number, (start, row) in enumerate(zip(starts, states, strict=True)):
        own = positions[central == number]
        out[own + 1] = row[own - start + 1]
    return out
