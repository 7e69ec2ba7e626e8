"""Batches of calibration: windows of text, and rows past the teacher's maximum length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...data.batching import pad_rows
from ...evaluation.sliding_windows import OverlappingWindows


@dataclass
class Batch:
    """Windows of about the same length, and the hidden states of teacher and student at the current layer.

    Attributes:
        number: index among the batches of all processes.
        ids: (B, L), padded on the right.
        mask: (B, L), 1 for tokens.
        types: token types, (B, L).
        held_out: whether the batch is held out from all fits.
        longest: length of the longest window of all batches.
        long_row: windows in which the teacher reads a row past its maximum length; None for other batches.
        teacher: hidden states of the teacher, (B, L, D); empty before the embeddings are computed.
        student: hidden states of the student, likewise.
    """

    number: int
    ids: torch.Tensor
    mask: torch.Tensor
    types: torch.Tensor
    held_out: bool
    longest: int
    long_row: "LongRow | None" = None
    teacher: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    student: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        long_row = None if self.long_row is None else self.long_row.to(device)
        tensors = {name: getattr(self, name).to(device) for name in ("ids", "mask", "types", "teacher", "student")}
        return replace(self, long_row=long_row, **tensors)

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Select real tokens: (B, L, …) to (N, …)."""
        return tensor[self.mask.bool()]


@dataclass
class LongRow:
    """One row in overlapping windows, as in `windowed_hidden_states`.

    Attributes:
        windows: the windows, (W, w), with the teacher's hidden states.
        overlapping: their positions in the row.
    """

    windows: Batch
    overlapping: OverlappingWindows

    @classmethod
    def of(cls, ids: torch.Tensor, limit: int) -> "LongRow":
        """Split a row (1, L) into windows of `limit` tokens, half a window apart."""
        overlapping = OverlappingWindows.of(ids.shape[1], limit)
        rows = ids[0, overlapping.columns]
        return cls(Batch(0, rows, torch.ones_like(rows), torch.zeros_like(rows), False, limit), overlapping)

    def to(self, device: torch.device) -> "LongRow":
        """The same on a device."""
        return LongRow(self.windows.to(device), self.overlapping.to(device))

    def merge(self, states: torch.Tensor) -> torch.Tensor:
        """Merge (W, w, D) to (1, L, D)."""
        return self.overlapping.merge(states)[None]

    def weights(self, attention: Callable[[torch.Tensor], torch.Tensor], rows: slice) -> torch.Tensor:
        """The attention of the m queries `rows` over the whole row, (1, H, m, L).

        Args:
            attention: function from N indices of windows to their attention, (N, H, w, w).
        """
        where = self.overlapping
        numbers, which = torch.unique(where.window[rows], return_inverse=True)
        weights = attention(numbers)[which, :, where.position[rows]]  # (m, H, w)
        merged = weights.new_zeros(*weights.shape[:2], len(where.window))
        merged.scatter_(2, where.columns[numbers][which][:, None].expand_as(weights), weights)
        return merged.transpose(0, 1)[None]


def make_batches(
    windows: Sequence[Sequence[int]],
    pad: int,
    batch_tokens: int,
    holdout: int,
    rank: int = 0,
    world: int = 1,
    limit: int | None = None,
    types: Sequence[Sequence[int]] | None = None,
) -> list[Batch]:
    """Make batches of windows of similar length, and return those of this process.

    Args:
        windows: token ids.
        pad: id of the padding token.
        batch_tokens: tokens in a batch.
        holdout: one in so many batches is held out.
        rank: index of this process.
        world: number of processes.
        limit: maximum length of the teacher; a longer row is a batch by itself, of one segment. None for no limit.
        types: token types of the windows; None for zeros.
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
        long_row = LongRow.of(ids, limit) if limit is not None and ids.shape[1] > limit else None
        own_types = torch.zeros_like(ids)
        if types is not None and long_row is None:
            own_types, _ = pad_rows([types[index] for index in group], 0)
        held_out = number % holdout == holdout // 2
        batches.append(Batch(number, ids, mask.long(), own_types, held_out, len(windows[order[-1]]), long_row))
    return batches
