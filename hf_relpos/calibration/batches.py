"""Batches of calibration: windows of text, and rows that are longer than the teacher reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ..data.batching import pad_rows
from ..evaluation.sliding_windows import central_windows, window_starts


@dataclass
class Batch:
    """Windows of about the same length, and the hidden states of teacher and student at the current layer.

    Attributes:
        number: index among the batches of all processes.
        ids: (B, L), padded on the right.
        mask: (B, L), 1 for tokens.
        held_out: enters no fit.
        longest: of the windows of all batches.
        reading: how the teacher reads a row that is too long for it; None for rows that it reads as they are.
        teacher: hidden states, (B, L, D); empty before the embeddings are computed.
        student: likewise.
    """

    number: int
    ids: torch.Tensor
    mask: torch.Tensor
    held_out: bool
    longest: int
    reading: "Reading | None" = None
    teacher: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    student: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        reading = None if self.reading is None else self.reading.to(device)
        tensors = {name: getattr(self, name).to(device) for name in ("ids", "mask", "teacher", "student")}
        return replace(self, reading=reading, **tensors)

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of tokens, (N, …), of (B, L, …)."""
        return tensor[self.mask.bool()]


@dataclass
class Reading:
    """One row in overlapping windows, each of which begins with the row's first token, as `windowed_hidden_states`.

    Attributes:
        windows: the windows, (W, w), and the teacher's hidden states of them.
        window: for each token of the row the window in which it is most central, (L,).
        position: its position there, (L,).
        columns: the position in the row of every token of every window, (W, w).
    """

    windows: Batch
    window: torch.Tensor
    position: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor, limit: int) -> "Reading":
        """A row (1, L) in windows of `limit` tokens, half a window apart."""
        body, size = ids.shape[1] - 1, limit - 1
        starts = window_starts(body, size, limit // 2)
        window = central_windows(starts, body, size)
        position = torch.arange(body) - torch.tensor(starts)[window] + 1
        columns = torch.tensor(starts)[:, None] + torch.arange(limit)
        columns[:, 0] = 0
        rows = ids[0, columns]
        windows = Batch(0, rows, torch.ones_like(rows), False, limit)
        return cls(windows, nn.functional.pad(window, (1, 0)), nn.functional.pad(position, (1, 0)), columns)

    def to(self, device: torch.device) -> "Reading":
        """The same on a device."""
        tensors = (tensor.to(device) for tensor in (self.window, self.position, self.columns))
        return Reading(self.windows.to(device), *tensors)

    def merge(self, states: torch.Tensor) -> torch.Tensor:
        """(W, w, D) to (1, L, D); of the first token, which all windows have, the mean."""
        merged = states[self.window, self.position]
        merged[0] = states[:, 0].mean(0)
        return merged[None]

    def weights(self, attention: Callable[[torch.Tensor], torch.Tensor], rows: slice) -> torch.Tensor:
        """The attention of the m queries `rows` over the whole row, (1, H, m, L).

        Args:
            attention: from N indices of `windows` to their attention, (N, H, w, w).
        """
        numbers, which = torch.unique(self.window[rows], return_inverse=True)
        weights = attention(numbers)[which, :, self.position[rows]]  # (m, H, w)
        merged = weights.new_zeros(*weights.shape[:2], len(self.window))
        merged.scatter_(2, self.columns[numbers][which][:, None].expand_as(weights), weights)
        return merged.transpose(0, 1)[None]


def make_batches(
    windows: Sequence[Sequence[int]],
    pad: int,
    batch_tokens: int,
    holdout: int,
    rank: int = 0,
    world: int = 1,
    limit: int | None = None,
) -> list[Batch]:
    """Windows in batches of about the same length; those of this process.

    Args:
        windows: token ids.
        pad: token id.
        batch_tokens: tokens in a batch.
        holdout: one of so many batches is held out.
        rank: index of this process.
        world: number of processes.
        limit: tokens that the teacher reads; a longer row is a batch of its own. None for no limit.
    """
    order = sorted(range(len(windows)), key=lambda index: (len(windows[index]), index))
    groups: list[list[int]] = []
    for index in order:
        length = len(windows[index])
        too_long = limit is not None and length > limit
        full = not groups or length * (len(groups[-1]) + 1) > batch_tokens or too_long
        if not full and length <= 1.15 * len(windows[groups[-1][0]]):
            groups[-1].append(index)
        else:
            groups.append([index])
    batches = []
    for number, group in enumerate(groups):
        if number % world != rank:
            continue
        ids, mask = pad_rows([windows[index] for index in group], pad)
        reading = Reading.of(ids, limit) if limit is not None and ids.shape[1] > limit else None
        held_out = number % holdout == holdout // 2
        batches.append(Batch(number, ids, mask.long(), held_out, len(windows[order[-1]]), reading))
    return batches
