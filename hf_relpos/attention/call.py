"""One self-attention call, and what a backend is. Backends know the terms of the formula, never a scheme."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from .context import AttentionContext
from .formula import Terms
from .sliding_window import SlidingWindowMask
from .toeplitz import SharedTerms, ToeplitzTerms, to_toeplitz, toeplitz_unsupported
from .tracing import is_traced


# Backends that draw dropout in units of 2^−16 take no larger one.
MAX_DROPOUT = 1 - 2**-8


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention: what a backend needs to compute it, or to say why it cannot.

    Attributes:
        query: (B, H, L, d), before any rotation.
        key: (B, H, K, d), likewise.
        value: (B, H, K, d).
        terms: what the scheme adds to the formula.
        context: offsets of the L queries and K keys, and what else is known of them.
        mask: boolean (True: may attend) or additive, broadcastable to (B, H, L, K); a SlidingWindowMask, under an
            attention window; a BlockMask for flex_attention; or None.
        is_causal: whether a query attends to no later key; only without a mask.
        dropout: probability of dropping an attention weight; 0 outside training.
        output_weights: whether the caller wants the attention weights.
        needs_gradients: whether autograd is on, so that there may be a backward pass.
        shared: the terms of all layers, where `terms` are these.
        layer: the attention module, from which Transformers' attention functions read `is_causal` and `training`.
        options: further keyword arguments for these functions.
        runs_on: the device of the call, where the tensors are only a description of it (on the meta device).
        by_name: whether the caller named the backend. A faster backend is then no reason against it.
        value_size: how many of the first features of the values are not padding. A backend may return only these.
            None for all.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    terms: Terms
    context: AttentionContext
    mask: torch.Tensor | SlidingWindowMask | BlockMask | None = None
    is_causal: bool = False
    dropout: float = 0.0
    output_weights: bool = False
    needs_gradients: bool = False
    shared: SharedTerms | None = None
    layer: nn.Module | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    runs_on: torch.device | None = None
    by_name: bool = False
    value_size: int | None = None

    @property
    def device(self) -> torch.device:
        """Where the call is computed."""
        return self.query.device if self.runs_on is None else self.runs_on

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the query, the key and the value."""
        return self.query.dtype

    @property
    def tensor_mask(self) -> torch.Tensor | None:
        """The mask as a tensor. A SlidingWindowMask becomes the mask of all pairs, once for all layers.

        Raises:
            TypeError: for a BlockMask, which such a backend should have refused.
        """
        if isinstance(self.mask, BlockMask):
            raise TypeError("the mask is a BlockMask, made for flex_attention; this backend takes tensors")
        return self.mask.dense if isinstance(self.mask, SlidingWindowMask) else self.mask

    @property
    def causal_mask(self) -> torch.Tensor:
        """Boolean, (1 or B, 1, L, K): which keys are not later than the query."""
        return (self.context.matrix(self.query.device) <= 0)[..., None, :, :]

    @property
    def scores(self) -> int:
        """How many scores there are: B·H·L·K."""
        batch, heads, length, _ = self.query.shape
        return batch * heads * length * self.key.shape[2]

    @property
    def is_traced(self) -> bool:
        """Whether a graph is being recorded, which must not depend on the data."""
        return is_traced()

    def toeplitz(self, by_run: bool = False, by_row: bool = False) -> ToeplitzTerms:
        """The terms as arrays by offset; those that the layers share are made once per forward.

        Args:
            by_run: see `to_toeplitz`; for terms that layers do not share.
            by_row: the same.
        """
        if self.shared is not None:
            return self.shared.toeplitz(self.context, self.query)
        return to_toeplitz(self.terms, self.context, self.query, by_run, by_row)


class Backend(Protocol):
    """One way to compute the formula. A new one is a file with such a class, and a line in `backends.BACKENDS`.

    A backend that reads only the keys in the window of a SlidingWindowMask says so by a method `reads_window_only`;
    see the function of that name.
    """

    name: str

    def unsupported(self, call: AttentionCall) -> list[str]:
        """The reasons why this backend does not compute that call.

        It may also say that another one is faster, unless the call names it (`call.by_name`): then every reason is an
        error. Must not read the contents of any tensor, nor sizes where the call is being traced: the graph would
        hold for these sizes only.

        Returns:
            Reasons, each part of a sentence; empty for a call that it takes.
        """
        ...

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute a call for which nothing is unsupported.

        Returns:
            The output (B, L, H, d), and the attention weights (B, H, L, K) or None where they are not kept.
        """
        ...


def reads_window_only(backend: Backend, call: AttentionCall) -> bool:
    """Whether a backend reads only the keys in the window of a call. The others make the mask of all pairs."""
    method = getattr(backend, "reads_window_only", None)  # not every backend has one
    return isinstance(call.mask, SlidingWindowMask) and method is not None and bool(method(call))


def unsupported_by_offset(
    call: AttentionCall, content_alone: bool = False, start_on_device: bool = False
) -> list[str]:
    """Reasons against a call for backends that compute terms as arrays by offset and keep no attention weights.

    Args:
        content_alone: whether the backend takes calls without any term beside the content, too.
        start_on_device: whether it takes calls in which the index of the first query is known to the device alone.
    """
    reasons = toeplitz_unsupported(call.terms, call.context)
    batch, heads, length, _ = call.query.shape
    mask = call.mask
    if call.output_weights:
        reasons.append("only eager returns attention weights")
    if not (mask is None or isinstance(mask, SlidingWindowMask)) and (
        not isinstance(mask, torch.Tensor)
        or mask.dtype != torch.bool
        or mask.dim() != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[1] not in (1, heads)
        or mask.shape[2] not in (1, length)
        or mask.shape[3] != call.key.shape[2]
    ):
        reasons.append("the mask is not a boolean tensor that broadcasts to (B, H, L, K)")
    if call.terms.only_content and not content_alone:
        reasons.append("there are no terms beside the content, and sdpa is faster")
    if isinstance(call.context.start, torch.Tensor) and not start_on_device:
        reasons.append("the index of the first query among the keys is known to the device alone")
    if call.dropout > MAX_DROPOUT:
        reasons.append(f"dropout = {call.dropout} is too close to 1")
    return reasons
