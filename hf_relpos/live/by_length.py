"""Level `by length`: the encoder's own forward computes sequences of similar length together.

Nothing has to be known of the encoder but that it maps tokens and a mask to states, row by row. A batch is cut into
groups: each costs its padded tokens, and as much again as a call of the encoder costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .call import EncoderCall, Level, MismatchError


# A call of an encoder costs about as much time as so many tokens. See docs/results/benchmarks/cpu-encoder.md.
TOKENS_OF_A_CALL = 60


@dataclass(frozen=True)
class ByLength(Level):
    """Compute a batch in parts of similar length.

    Attributes:
        positions: as of `EncoderCall.arguments`.
        inner: levels that compute a part with the padding that it has; else the encoder's own forward does.
        call_cost: of a call of the encoder, in tokens.
    """

    name = "by length"
    positions: str | None = None
    inner: tuple[Level, ...] = ()
    call_cost: int = TOKENS_OF_A_CALL

    def unsupported(self, call: EncoderCall) -> list[str]:
        """As of every level."""
        return [] if call.sides else ["padding is inside of sequences only"]

    def run(self, call: EncoderCall) -> Any:
        """As of every level."""
        given, by_token = call.arguments(self.positions)
        assert call.real is not None
        parts = parts_of(call.real, self.call_cost)
        call.computed = sum(call.real[part].numel() for part in parts)
        outputs = []
        for part in parts:
            own = {name: given[name][part] for name in by_token} | {name: given[name][part[0]] for name in call.by_row}
            inner = EncoderCall(call.encoder, call.forward, call.setup, given | own)
            level = next((each for each in self.inner if not each.unsupported(inner)), None)
            outputs.append(call.forward(**inner.given) if level is None else level.run(inner))
        return joined(outputs, call.real, parts)

    def for_check(self) -> "ByLength":
        """Use several parts, although the sequences of a check are short."""
        return replace(self, call_cost=0)


# Which rows of a batch are computed together, and the columns that hold their tokens: an index of (B, L, …).
Part = tuple[torch.Tensor, slice]


def parts_of(real: torch.Tensor, call_cost: int) -> list[Part]:
    """Split a batch into parts of similar length.

    Args:
        real: (B, L), True for tokens; each row has one.
        call_cost: of a call of the encoder, in tokens.

    Returns:
        Parts whose columns leave out padding before, or after, all of their tokens.
    """
    length = real.shape[1]
    columns = torch.arange(length)
    first = torch.where(real, columns, length).amin(1)
    last = torch.where(real, columns, -1).amax(1) + 1
    parts = []
    for is_left in (False, True):
        rows = ((first > 0) == is_left).nonzero().flatten()
        if not len(rows):
            continue
        begin, end = int(first[rows].min()), int(last[rows].max())
        sizes = (end - first[rows] if is_left else last[rows]).tolist()
        for own, size in groups_of(sizes, call_cost):
            parts.append((rows[own], slice(end - size, end) if is_left else slice(begin, size)))
    return parts


def groups_of(sizes: Sequence[int], call_cost: int) -> list[tuple[list[int], int]]:
    """Group sequences by length, longest first; each group has the length of its longest sequence.

    A group ends where its padding would cost more than another call. On uniform and lognormal lengths, the whole costs
    .5 to 3 % more than the best groups.
    """
    found: list[tuple[list[int], int]] = []
    padding = 0
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        missing = found[-1][1] - sizes[row] if found else 0
        if found and padding + missing <= call_cost:
            found[-1][0].append(row)
            padding += missing
        else:
            found.append(([row], sizes[row]))
            padding = 0
    return found


def joined(outputs: list[Any], real: torch.Tensor, parts: Sequence[Part]) -> Any:
    """The outputs of an encoder for the parts of a batch as one, its states (B, L, …) with zeros at padding.

    Raises:
        MismatchError: for outputs that are neither tensors with an entry for each row, or for each token, nor made of
            such tensors.
    """
    first = outputs[0]
    if first is None:
        return None
    if isinstance(first, dict):  # as outputs of Transformers are
        return type(first)(**{name: joined([each[name] for each in outputs], real, parts) for name in first})
    if isinstance(first, tuple | list):
        return type(first)(joined(list(each), real, parts) for each in zip(*outputs, strict=True))
    if not isinstance(first, torch.Tensor):
        raise MismatchError(f"an output of type {type(first).__name__} cannot be put together from parts of a batch")
    batch, length = real.shape
    by_token = first.dim() > 2
    out = first.new_zeros(batch, *((length, *first.shape[2:]) if by_token else first.shape[1:]))
    for each, part in zip(outputs, parts, strict=True):
        if each.shape[:2] != (real[part].shape if by_token else (len(part[0]), *first.shape[1:])):
            shape = tuple(each.shape)
            raise MismatchError(f"an output of shape {shape} has no entry for each sequence, or for each token")
        out[part if by_token else part[0]] = each
    hidden = ~real.reshape(batch, length, *(1,) * (out.dim() - 2))
    return out.masked_fill_(hidden, 0) if by_token else out
