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
from .call import SharedTerms
from .context import AttentionContext, moved


# A group has rows of at least this share of the length of its longest one. Smaller groups have less padding, and more
# of them take more calls.
SHORTEST = 0.8
# Rows of so few tokens are together in any case.
SHORT = 16
# What heads read: BERT's poolers the first state of a row.
FIRST = slice(0, 1)


@dataclass(frozen=True, eq=False)
class RowGroup:
    """b rows of a batch whose attention is computed together, each of l tokens at most.

    Attributes:
        context: positions of queries and keys, and the other relations between them.
        mask: that of an `AttentionCall`; of a group that nobody has prepared, which keys are tokens, (b, 1, 1, l), or
            None where all are.
        terms: those of all layers; None where each layer makes its own.
        kept: what a layer finds out for others, such as the backend.
        rows: which rows of the batch they are, (b,); None where all are one group, and nobody asks.
        positions: of the real tokens among the b·l of the padded rows; None where all rows have l, or keep padding.
        columns: of the batch, (b, l), where rows have padding on the left; None for the first l.
    """

    context: AttentionContext
    mask: Any = None
    terms: SharedTerms | None = None
    kept: dict[Hashable, Any] = field(default_factory=dict)
    rows: torch.Tensor = None  # type: ignore[assignment]
    positions: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """l."""
        return self.context.query_length

    @property
    def count(self) -> int:
        """Of its real tokens, or of all b·l where padding stays."""
        return len(self.rows) * self.length if self.positions is None else len(self.positions)

    def of(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The part of a tensor (B, L, …) that belongs to these rows, (b, l, …); that of (1, L, …) may stay (1, l, …).

        Tensors (…, L, L, …) of pairs are cut by the caller, where there is no padding on the left.
        """
        if tensor is None:
            return None
        if self.columns is not None:
            return tensor[(self.rows if len(tensor) > 1 else 0 * self.rows)[:, None], self.columns]
        return (tensor if len(tensor) == 1 else tensor[self.rows])[:, : self.length]

    def in_rows(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors of its tokens, (count, E), as (b, l, E); padding has zeros."""
        if self.positions is not None:
            padded = vectors.new_zeros(len(self.rows) * self.length, vectors.shape[1])
            vectors = padded.index_copy(0, self.positions, vectors)
        return vectors.unflatten(0, (-1, self.length))

    def tokens_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The real tokens of (b, l, E), in their order."""
        flat = rows.flatten(0, 1)
        return flat if self.positions is None else flat.index_select(0, self.positions)


@dataclass(eq=False)
class Batch:
    """B rows of L tokens: what layers and parts of an encoder know of the call that runs.

    Without its padding, its rows are in the order of their lengths, the longest first, and its states (1, T, D). With
    it, all rows are one group, and states (B, L, D).

    Attributes:
        size: B.
        length: L.
        groups: of rows, in order.
        indices: (T,), of the real tokens in the flattened batch; None where padding stays.
        is_used: whether a part of the encoder has asked for it.
    """

    size: int
    length: int
    groups: tuple[RowGroup, ...]
    indices: torch.Tensor | None = None
    is_used: bool = False

    @classmethod
    def of(cls, real: torch.Tensor, read: slice = FIRST) -> "Batch | None":
        """Without padding, from a mask (B, L), True for real tokens; None where padding is inside of a row, or read.

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
        indices, starts = (order[:, None] * length + columns)[real[order]], real.int().argmax(1)[order]
        is_left = bool(starts.any())
        groups, first = [], 0
        while first < batch:
            longest = sizes[first]
            last = first
            while last < batch and (sizes[last] >= SHORTEST * longest or longest <= SHORT):
                last += 1
            rows, mask, positions = order[first:last], None, None
            if sizes[last - 1] < longest:
                seen = columns[:longest] < lengths[rows, None]
                mask, positions = seen[:, None, None, :], seen.flatten().nonzero().flatten()
            context = AttentionContext(longest, longest, longest=length)
            places = (starts[first:last, None] + columns[:longest]).clamp(max=length - 1) if is_left else None
            groups.append(RowGroup(context, mask, rows=rows, positions=positions, columns=places))
            first = last
        return cls(batch, length, tuple(groups), indices)

    @classmethod
    def with_padding(cls, real: torch.Tensor) -> "Batch":
        """With its padding, from a mask (B, L), True for real tokens."""
        size, length = real.shape
        mask = None if bool(real.all()) else real[:, None, None, :]
        return cls(size, length, (RowGroup(AttentionContext(length, length), mask, rows=torch.arange(size)),))

    @property
    def tokens(self) -> int:
        """How many are computed, T or B·L."""
        return self.size * self.length if self.indices is None else len(self.indices)

    def to(self, device: Any = None, *args: Any, **kwargs: Any) -> "Batch":
        """The batch on a device, for accelerate; with another dtype, which encoders ask of a mask, as it is."""
        on_device: Batch = self if isinstance(device, torch.dtype | None) else moved(self, device)
        return on_device

    def dim(self) -> int:
        """As of the mask (B, L) that it stands for: stock encoders ask."""
        return 2

    def remove(self, states: torch.Tensor) -> torch.Tensor:
        """(B, L, D) to (1, T, D)."""
        assert self.indices is not None
        return states.flatten(0, 1).index_select(0, self.indices)[None]

    def restore(self, tokens: torch.Tensor) -> torch.Tensor:
        """(1, T, D) to (B, L, D), with zeros for padding."""
        assert self.indices is not None
        states = tokens.new_zeros(self.size * self.length, tokens.shape[2])
        return states.index_copy(0, self.indices.to(tokens.device), tokens[0]).unflatten(0, (self.size, self.length))

    def by_group(self, attend: Callable[..., torch.Tensor], *vectors: torch.Tensor) -> torch.Tensor:
        """Compute attention group by group.

        Args:
            attend: from a group and its vectors, each (b, l, E), to its output, (b, l, D).
            vectors: of the batch, each (1, T, E), or (B, L, E) with padding.

        Returns:
            (1, T, D) or (B, L, D).
        """
        counts = [group.count for group in self.groups]
        parts = zip(self.groups, *(each.flatten(0, 1).split(counts) for each in vectors), strict=True)
        found = [group.tokens_of(attend(group, *map(group.in_rows, part))) for group, *part in parts]
        return torch.cat(found).unflatten(0, vectors[0].shape[:2])


_running: ContextVar[Batch | None] = ContextVar("running", default=None)


@contextmanager
def running(batch: Batch) -> Iterator[None]:
    """While the forward of an encoder runs, its parts find its batch by `take_batch`."""
    token = _running.set(batch)
    try:
        yield
    finally:
        _running.reset(token)


def take_batch() -> Batch | None:
    """The batch of this thread's call; None for a call that nobody has prepared."""
    batch = None if is_traced() else _running.get()
    if batch is not None:
        batch.is_used = True
    return batch
