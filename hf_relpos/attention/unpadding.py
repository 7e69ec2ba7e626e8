"""Unpadding: between its first and its last layer a batch is its real tokens, one after the other.

Projections, feed-forward parts and LayerNorms act on each token by itself, and layers run unchanged on (1, T, D).
Attention alone needs rows: those of about the same length are computed together, without the padding of the longest
(Portes et al. 2023, MosaicBERT, arXiv 2312.17482, §3.1.3, unpad likewise).
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from ..host.tracing import is_traced
from .context import moved


# A group has rows of at least this share of the length of its longest one. Smaller groups have less padding, and more
# of them take more calls.
SHORTEST = 0.8
# Rows of so few tokens are together in any case.
SHORT = 16
# What heads read: BERT's poolers the first state of a row.
FIRST = slice(0, 1)


@dataclass(frozen=True)
class RowGroup:
    """b rows of a batch whose attention is computed together.

    Attributes:
        tokens: where their real tokens are among the T of the batch.
        rows: which rows of the batch they are, (b,).
        length: l, of the longest.
        positions: of the real tokens among the b·l of the padded rows; None where all rows have l.
        visible: which keys are real tokens, (b, 1, 1, l); None where all are.
    """

    tokens: slice
    rows: torch.Tensor
    length: int
    positions: torch.Tensor | None
    visible: torch.Tensor | None

    def of(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The part of a tensor (B, L, …) that belongs to these rows, (b, l, …); that of (1, L, …) or None as it is.

        Tensors (…, L, L, …) of pairs are cut by the caller.
        """
        if tensor is None:
            return None
        return (tensor if tensor.shape[0] == 1 else tensor[self.rows])[:, : self.length]

    def in_rows(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors of the batch, (1, T, E) or (B, L, E), as (b, l, E); padding has zeros."""
        own = vectors.flatten(0, 1)[self.tokens]
        if self.positions is not None:
            own = own.new_zeros(len(self.rows) * self.length, own.shape[1]).index_copy(0, self.positions, own)
        return own.unflatten(0, (len(self.rows), self.length))

    def tokens_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The real tokens of (b, l, E), in their order."""
        flat = rows.flatten(0, 1)
        return flat if self.positions is None else flat.index_select(0, self.positions)


@dataclass(frozen=True)
class UnpaddedBatch:
    """A batch of B rows of L tokens without its padding, rows in the order of their lengths, the longest first.

    Attributes:
        indices: (T,), of the real tokens in the flattened batch.
        batch: B.
        length: L.
        groups: of rows, in order.
        kept: what a layer finds out for all layers of a call, such as the backend.
    """

    indices: torch.Tensor
    batch: int
    length: int
    groups: tuple[RowGroup, ...]
    kept: dict[Hashable, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, real: torch.Tensor, read: slice = FIRST) -> "UnpaddedBatch | None":
        """From a mask (B, L), True for real tokens; None where padding stands inside of a row, or heads read it.

        Tokens of a row have to be neighbours, since the distances between them count.

        Args:
            read: the states of a row that heads read. Padding stays where it is among them.
        """
        batch, length = real.shape
        lengths = real.sum(1)
        if not length or not bool(real[:, read].all()):
            return None
        if bool((real[:, 1:] & ~real[:, :-1]).sum(1).add(real[:, 0]).ne(1).any()):  # rows without a token, too
            return None
        columns = torch.arange(length, device=real.device)
        order = lengths.argsort(descending=True, stable=True)
        sizes = lengths[order].tolist()
        indices = (order[:, None] * length + columns)[real[order]]
        groups, first, begin = [], 0, 0
        while first < batch:
            longest = sizes[first]
            last = first
            while last < batch and (sizes[last] >= SHORTEST * longest or longest <= SHORT):
                last += 1
            count, rows = sum(sizes[first:last]), order[first:last]
            visible = positions = None
            if count < len(rows) * longest:
                seen = columns[:longest] < lengths[rows, None]
                visible, positions = seen[:, None, None, :], seen.flatten().nonzero().flatten()
            groups.append(RowGroup(slice(begin, begin + count), rows, longest, positions, visible))
            first, begin = last, begin + count
        return cls(indices, batch, length, tuple(groups))

    @classmethod
    def with_padding(cls, real: torch.Tensor) -> "UnpaddedBatch":
        """Of a call that keeps its padding: one group with all L positions of all B rows.

        States are (B, L, D) then. The group's `visible` hides the keys that are padding, and its `positions` are None.

        Args:
            real: (B, L), True for tokens.
        """
        rows, length = real.shape
        visible = None if bool(real.all()) else real[:, None, None, :]
        group = RowGroup(slice(None), torch.arange(rows), length, None, visible)
        return cls(torch.arange(real.numel()), rows, length, (group,))

    def to(self, device: torch.device) -> "UnpaddedBatch":
        """The batch on a device. accelerate asks for it if a layer is not on the device of the input."""
        on_device: UnpaddedBatch = moved(self, device)
        return on_device

    def dim(self) -> int:
        """As of the mask (B, L) that it stands for: stock encoders ask."""
        return 2

    def remove(self, states: torch.Tensor) -> torch.Tensor:
        """(B, L, D) to (1, T, D)."""
        return states.flatten(0, 1).index_select(0, self.indices)[None]

    def restore(self, tokens: torch.Tensor) -> torch.Tensor:
        """(1, T, D) to (B, L, D), with zeros for padding."""
        states = tokens.new_zeros(self.batch * self.length, tokens.shape[2])
        return states.index_copy(0, self.indices, tokens[0]).unflatten(0, (self.batch, self.length))

    def by_group(self, attend: Callable[..., torch.Tensor], *vectors: torch.Tensor) -> torch.Tensor:
        """Compute attention group by group.

        Args:
            attend: from a group and its vectors, each (b, l, E), to its output, (b, l, D).
            vectors: of the batch, each (1, T, E); (B, L, E) if its one group has all positions.

        Returns:
            (1, T, D) or (B, L, D).
        """
        found = [group.tokens_of(attend(group, *(group.in_rows(each) for each in vectors))) for group in self.groups]
        return torch.cat(found).unflatten(0, vectors[0].shape[:2])


@dataclass
class Running:
    """The batch of the call that is running, and what its encoder did with it.

    Attributes:
        is_used: whether the encoder asked for it.
    """

    batch: UnpaddedBatch
    is_used: bool = False


_running: ContextVar[Running | None] = ContextVar("running", default=None)


@contextmanager
def running(batch: UnpaddedBatch) -> Iterator[Running]:
    """While the forward of an encoder runs, its parts find its batch by `take_batch`."""
    found = Running(batch)
    token = _running.set(found)
    try:
        yield found
    finally:
        _running.reset(token)


def take_batch() -> UnpaddedBatch | None:
    """The batch of this thread's call; None for a call that nobody has unpadded."""
    found = None if is_traced() else _running.get()
    if found is None:
        return None
    found.is_used = True
    return found.batch
