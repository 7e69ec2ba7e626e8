"""Batches of calibration: windows of text, and rows that are longer than the teacher reads."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..data.batching import pad_rows
from ..evaluation.sliding_windows import central_windows, window_starts


@dataclass
class Batch:
    """Windows of about the same length, and what teacher and student make of them at the current layer.

    Attributes:
        number: among the batches of all processes.
        ids: (B, L), padded on the right.
        mask: (B, L), 1 for tokens.
        held_out: enters no fit.
        longest: of the windows of all batches.
        reading: how the teacher reads a row that is too long for it; None for rows that it reads as they are.
        teacher: hidden states, (B, L, D).
        student: hidden states, (B, L, D).
    """

    number: int
    ids: torch.Tensor
    mask: torch.Tensor
    held_out: bool
    longest: int
    reading: "Reading | None" = None
    teacher: torch.Tensor | None = None
    student: torch.Tensor | None = None

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of tokens, (N, …), of (B, L, …)."""
        return tensor[self.mask.bool()]


@dataclass
class Reading:
    """One row in overlapping windows, each of which begins with the row's first token, as `windowed_hidden_states`.

    Attributes:
        windows: the windows, (W, w), and the teacher's hidden states of them.
        window: for each token of the row the window in which it is most central, (L,).
        place: its place there, (L,).
        columns: the place in the row of every token of every window, (W, w).
    """

    windows: Batch
    window: torch.Tensor
    place: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor, limit: int) -> "Reading":
        """A row (1, L) in windows of `limit` tokens, half a window apart."""
        body, room = ids.shape[1] - 1, limit - 1
        starts = window_starts(body, room, limit // 2)
        window = central_windows(starts, body, room)
        place = torch.arange(body) - torch.tensor(starts)[window] + 1
        columns = torch.tensor(starts)[:, None] + torch.arange(limit)
        columns[:, 0] = 0
        rows = ids[0, columns]
        windows = Batch(0, rows, torch.ones_like(rows), False, limit)
        return cls(windows, *(nn.functional.pad(each, (1, 0)) for each in (window, place)), columns)

    def merge(self, states: torch.Tensor) -> torch.Tensor:
        """(W, w, D) to (1, L, D); of the first token, which all windows have, the mean."""
        merged = states[self.window, self.place]
        merged[0] = states[:, 0].mean(0)
        return merged[None]

    def weights(self, read: Callable[[Batch, torch.Tensor], torch.Tensor], rows: slice) -> torch.Tensor:
        """The attention of some of the row's queries over all of the row, (1, H, m, L).

        Args:
            read: from windows, and which of `windows` they are, to their attention, (N, H, w, w).
        """
        numbers, which = torch.unique(self.window[rows], return_inverse=True)
        windows = replace(self.windows, ids=self.windows.ids[numbers], mask=self.windows.mask[numbers])
        found = read(windows, numbers)[which, :, self.place[rows]]  # (m, H, w)
        merged = found.new_zeros(*found.shape[:2], len(self.window))
        merged.scatter_(2, self.columns[numbers][which][:, None].expand_as(found), found)
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
    """Windows in batches of one length, as far as that goes; those of this process.

    Args:
        limit: tokens that the teacher reads; a longer row is a batch of its own. None for no limit.
    """
    limit = math.inf if limit is None else limit
    order = sorted(range(len(windows)), key=lambda at: (len(windows[at]), at))
    groups: list[list[int]] = []
    for at in order:
        length = len(windows[at])
        full = not groups or length * (len(groups[-1]) + 1) > batch_tokens or length > limit
        if not full and length <= 1.15 * len(windows[groups[-1][0]]):
            groups[-1].append(at)
        else:
            groups.append([at])
    batches = []
    for number, group in enumerate(groups):
        if number % world != rank:
            continue
        ids, mask = pad_rows([windows[at] for at in group], pad)
        reading = Reading.of(ids, int(limit)) if ids.shape[1] > limit else None
        held_out = number % holdout == holdout // 2
        batches.append(Batch(number, ids, mask.long(), held_out, len(windows[order[-1]]), reading))
    return batches
