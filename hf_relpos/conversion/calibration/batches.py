"""Batches of calibration: windows of text, and rows that are longer than the teacher reads."""

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
        held_out: enters no fit.
        longest: of the windows of all batches.
        reading: how the teacher reads a row that is too long for it; None for rows that it reads as they are.
        teacher: hidden states, (B, L, D); empty before the embeddings are computed.
        student: likewise.
    """

    number: int
    ids: torch.Tensor
    mask: torch.Tensor
    types: torch.Tensor
    held_out: bool
    longest: int
    reading: "Reading | None" = None
    teacher: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    student: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        reading = None if self.reading is None else self.reading.to(device)
        tensors = {name: getattr(self, name).to(device) for name in ("ids", "mask", "types", "teacher", "student")}
        return replace(self, reading=reading, **tensors)

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of tokens, (N, …), of (B, L, …)."""
        return tensor[self.mask.bool()]


@dataclass
class Reading:
    """One row in overlapping windows, as `windowed_hidden_states` reads it.

    Attributes:
        windows: the windows, (W, w), and the teacher's hidden states of them.
        overlapping: where they are in the row.
    """

    windows: Batch
    overlapping: OverlappingWindows

    @classmethod
    def of(cls, ids: torch.Tensor, limit: int) -> "Reading":
        """A row (1, L) in windows of `limit` tokens, half a window apart."""
        overlapping = OverlappingWindows.of(ids.shape[1], limit)
        rows = ids[0, overlapping.columns]
        return cls(Batch(0, rows, torch.ones_like(rows), torch.zeros_like(rows), False, limit), overlapping)

    def to(self, device: torch.device) -> "Reading":
        """The same on a device."""
        return Reading(self.windows.to(device), self.overlapping.to(device))

    def merge(self, states: torch.Tensor) -> torch.Tensor:
        """(W, w, D) to (1, L, D)."""
        return self.overlapping.merge(states)[None]

    def weights(self, attention: Callable[[torch.Tensor], torch.Tensor], rows: slice) -> torch.Tensor:
        """The attention of the m queries `rows` over the whole row, (1, H, m, L).

        Args:
            attention: from N indices of `windows` to their attention, (N, H, w, w).
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
    """Windows in batches of about the same length; those of this process.

    Args:
        windows: token ids.
        pad: token id.
        batch_tokens: tokens in a batch.
        holdout: one of so many batches is held out.
        rank: index of this process.
        world: number of processes.
        limit: tokens that the teacher reads; a longer row is a batch of its own, of one segment. None for no limit.
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
        reading = Reading.of(ids, limit) if limit is not None and ids.shape[1] > limit else None
        own_types = torch.zeros_like(ids)
        if types is not None and reading is None:
            own_types, _ = pad_rows([types[index] for index in group], 0)
        held_out = number % holdout == holdout // 2
        batches.append(Batch(number, ids, mask.long(), own_types, held_out, len(windows[order[-1]]), reading))
    return batches
