"""Unpadding of live encoders: between its first and its last layer a batch is its real tokens, one after the other.

Projections, feed-forward parts and LayerNorms act on each token by itself, so that stock's layers run unchanged on
(1, T, D). Attention alone needs rows: those of about the same length are computed together, without the padding of the
longest (Portes et al. 2023, MosaicBERT, arXiv 2312.17482, §3.1.3, unpad likewise).

An unpadding encoder hands its layers an `UnpaddedBatch` in place of the attention mask. So threads, gradient
checkpointing and copies of a model need nothing of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..attention.masks import is_visible
from ..attention.tracing import is_traced
from ..host.live import collects_outputs
from ..host.transformers import has_cache
from .attention import has_contents
from .parts import strange_part


# A group has rows of at least this share of the length of its longest one. Smaller groups have less padding, and more
# of them take more calls.
SHORTEST = 0.8
# Rows of so few tokens are together in any case.
SHORT = 16
# Values of `_attn_implementation` that are attention as it is known here; others are code of somebody else's.
IMPLEMENTATIONS = (None, "eager", "sdpa")
# What heads read: BERT's poolers the first state of a row.
FIRST = slice(0, 1)
# In the names of heads for spans, which read all states of a row.
SPANS = "ForQuestionAnswering"
# A batch is left as it is where less than this share of its tokens are padding.
FEWEST = 0.05


@dataclass(frozen=True)
class RowGroup:
    """b rows of a batch whose attention is computed together.

    Attributes:
        tokens: where their real tokens are among the T of the batch.
        rows: b.
        length: l, of the longest.
        positions: of the real tokens among the b·l of the padded rows; None where all rows have l.
        visible: which keys are real tokens, (b, 1, 1, l); None where all are.
    """

    tokens: slice
    rows: int
    length: int
    positions: torch.Tensor | None
    visible: torch.Tensor | None

    def in_rows(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors of the batch, (1, T, E), as (b, l, E); padding has zeros."""
        own = vectors[0, self.tokens]
        if self.positions is not None:
            own = own.new_zeros(self.rows * self.length, own.shape[1]).index_copy(0, self.positions, own)
        return own.unflatten(0, (self.rows, self.length))

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
    """

    indices: torch.Tensor
    batch: int
    length: int
    groups: tuple[RowGroup, ...]

    @classmethod
    def of(cls, real: torch.Tensor, read: slice = FIRST) -> "UnpaddedBatch | None":
        """From a mask (B, L), True for real tokens; None where there is too little padding to take out, or inside.

        Tokens of a row have to be neighbours, since the distances between them count.

        Args:
            read: the states of a row that heads read. Padding stays where it is among them.
        """
        batch, length = real.shape
        lengths = real.sum(1)
        if int(lengths.sum()) > (1 - FEWEST) * batch * length or not bool(real[:, read].all()):
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
            count, rows = sum(sizes[first:last]), last - first
            visible = positions = None
            if count < rows * longest:
                seen = columns[:longest] < lengths[order[first:last], None]
                visible, positions = seen[:, None, None, :], seen.flatten().nonzero().flatten()
            groups.append(RowGroup(slice(begin, begin + count), rows, longest, positions, visible))
            first, begin = last, begin + count
        return cls(indices, batch, length, tuple(groups))

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
            vectors: of the batch, each (1, T, E).

        Returns:
            (1, T, D).
        """
        found = [group.tokens_of(attend(group, *(group.in_rows(each) for each in vectors))) for group in self.groups]
        return torch.cat(found)[None]


def key_mask(mask: torch.Tensor, dtype: torch.dtype, is_added: bool, by_row: bool) -> torch.Tensor | None:
    """A mask that hides the same keys from all queries and heads, as (B, L), True for those that are seen; else None.

    Args:
        mask: what stock would read.
        dtype: of the scores. A mask of this dtype is additive.
        is_added: whether stock adds masks of four dimensions to the scores, whatever their dtype: booleans and
            integers hide nothing there.
        by_row: whether stock takes masks (B, L), nonzero for keys that are seen.
    """
    if mask.dim() == 2:
        return mask != 0 if by_row else None
    is_read = mask.dtype == dtype or (mask.dtype == torch.bool and not is_added)
    if mask.dim() != 4 or mask.shape[1] != 1 or not is_read:
        return None
    visible = is_visible(mask)
    if mask.dtype != torch.bool and not bool(((mask == 0) | ~visible).all()):
        return None
    first = visible[:, 0, 0]
    return first if bool((visible == first[:, None, None]).all()) else None


def unpadded(
    encoder: nn.Module,
    states: torch.Tensor,
    mask: torch.Tensor | None,
    outputs: dict[str, Any],
    read: slice = FIRST,
    by_row: bool = False,
    dtype: torch.dtype | None = None,
) -> UnpaddedBatch | None:
    """The batch of a call without its padding; None for a call that has to see padding, or has none.

    Args:
        encoder: the module around the layers.
        states: (B, L, D), what it is called with.
        mask: what stock reads as `key_mask` says, or adds to the scores.
        outputs: further arguments, of which those that ask for hidden states and attention weights count.
        read: as of `UnpaddedBatch.of`.
        by_row: as of `key_mask`.
        dtype: of the scores; None for that of the states.
    """
    # not all encoders have their configuration themselves
    config: Any = next((vars(each)["config"] for each in encoder.modules() if "config" in vars(each)), None)
    implementation = getattr(config, "_attn_implementation", None)
    if (
        not isinstance(mask, torch.Tensor)
        or not (has_contents(states) and has_contents(mask))
        or states.shape[0] < 2
        or any(outputs.get(name) for name in ("output_hidden_states", "output_attentions"))
        or outputs.get("encoder_hidden_states") is not None
        or has_cache(outputs)
        or outputs.get("is_causal")
        or bool(getattr(config, "chunk_size_feed_forward", False))
        or implementation not in IMPLEMENTATIONS
        or collects_outputs()
    ):
        return None
    real = key_mask(mask, dtype or states.dtype, implementation != "sdpa", by_row)
    if real is None or real.shape != states.shape[:2]:
        return None
    batch = UnpaddedBatch.of(real, read)
    return None if batch is None or strange_part(encoder) is not None else batch


def may_unpad(encoder: nn.Module) -> bool:
    """Whether an encoder of this package's own models may take padding out of the call that is running."""
    return not is_traced() and not collects_outputs() and strange_part(encoder) is None


class UnpaddingEncoder:
    """An encoder of stock's whose layers get a batch without its padding: to be put before the stock class."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As stock; the states of padding are zeros."""
        encoder: Any = self
        # by position comes, in all of these classes, what a decoder needs
        is_decoder = any(each is not None for each in args)
        batch = None if is_decoder else unpadded(encoder, hidden_states, attention_mask, kwargs)
        if batch is None:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc]
        outputs = super().forward(batch.remove(hidden_states), batch, *args, **kwargs)  # type: ignore[misc]
        outputs["last_hidden_state"] = batch.restore(outputs["last_hidden_state"])
        return outputs
