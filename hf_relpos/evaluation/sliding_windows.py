"""Read texts longer than a model's maximum length in overlapping windows.

The teacher's hidden states from these windows are the reference for its student.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..data.batching import Row, batch_indices
from .encoder import hidden_states, pad_batch
from .inspection import model_max_length


@dataclass(frozen=True)
class OverlappingWindows:
    """W windows of w tokens that cover a row of L; each begins with the row's first token ([CLS]).

    Attributes:
        columns: position in the row of each token of each window, (W, w).
        window: for each token of the row, the window where it is most central: farthest from the nearer end of the
            window (the first of equals), (L,).
        position: its position in that window, (L,).
    """

    columns: torch.Tensor
    window: torch.Tensor
    position: torch.Tensor

    @classmethod
    def of(cls, length: int, size: int, stride: int | None = None) -> "OverlappingWindows":
        """Windows of `size` tokens over a row of `length` tokens.

        Args:
            stride: tokens between the starts of two windows; None for half a window.

        Raises:
            ValueError: for a window of fewer than three tokens or a stride that skips tokens.
        """
        stride = size // 2 if stride is None else stride
        if size < 3 or not 1 <= stride <= size - 1:
            raise ValueError(f"length = {size}, stride = {stride}: give 3 or more, and 1 to length − 1")
        body, room = torch.arange(length - 1), min(size, length) - 1  # without the first token
        last = length - 1 - room  # the last window ends with the row
        starts = torch.tensor([*range(0, last, stride), last])
        columns = starts[:, None] + torch.arange(room + 1)
        columns[:, 0] = 0
        window = torch.minimum(body - starts[:, None], starts[:, None] + room - 1 - body).argmax(0)
        position = body - starts[window] + 1
        first = torch.zeros(1, dtype=torch.long)
        return cls(columns, torch.cat([first, window]), torch.cat([first, position]))

    def merge(self, states: torch.Tensor) -> torch.Tensor:
        """Merge (W, w, …) to (L, …): a token gets the values of its window, the first token the mean over windows."""
        merged = states[self.window, self.position]
        merged[0] = states[:, 0].mean(0)
        return merged


def windowed_hidden_states(
    model: PreTrainedModel, ids: Row, length: int | None = None, stride: int | None = None
) -> torch.Tensor:
    """Last hidden states of a text that may be longer than the maximum length of the model.

    A token's state is from that of the `OverlappingWindows` where it is most central; the first token gets the mean
    over windows. Only the last window has [SEP], as for a model that reads the whole text.

    Args:
        model: a model with `last_hidden_state`.
        ids: one text, `[CLS] … [SEP]`, L tokens.
        length: tokens per window, [CLS] included; None for the maximum length of the model.
        stride: tokens between the starts of two windows; None for half a window.

    Returns:
        (L, D), at least float32.

    Raises:
        ValueError: for a window of fewer than three tokens or a stride that skips tokens.
    """
    windows = OverlappingWindows.of(len(ids), length or model_max_length(model) or len(ids), stride)
    rows = torch.as_tensor(ids)[windows.columns].tolist()
    states: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    for indices in batch_indices(rows):
        batch = hidden_states(model, *pad_batch([rows[index] for index in indices], model))
        for index, row in zip(indices, batch, strict=True):
            states[index] = row
    return windows.merge(torch.stack(states))
