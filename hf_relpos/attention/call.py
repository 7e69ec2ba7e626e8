"""One self-attention call, and the interface of a backend. Backends know the terms of the formula, never a scheme."""

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from .context import AttentionContext
from .formula import Terms
from .toeplitz import ToeplitzTerms, to_toeplitz, toeplitz_unsupported


class LazyMask:
    """A mask that backends can read in parts, without building the dense mask."""

    @functools.cached_property
    def dense(self) -> torch.Tensor:
        """The dense mask, boolean (1 or B, 1, L, K); True means that the query may attend."""
        raise NotImplementedError


class SharedTerms:
    """Terms of several calls, and their Toeplitz form: those of all layers, or of all groups of rows in one layer.

    Terms of all layers are made before the first layer and never inside one, and so is their form. A layer that is
    recomputed in the backward pass (activation checkpointing) then sees the same tensors as in the forward.

    Args:
        terms: the terms.
        signature: `Scheme.signature` of the scheme. A layer whose scheme has another signature makes its own terms.
        context: the context that they were made for. Others may be of shorter rows (`holds_for`).
        like: (…, d), a tensor with the head size, device and dtype of the queries. A layer on another device makes its
            own terms, and one with another dtype its own form.
    """

    def __init__(self, terms: Terms, signature: Hashable, context: AttentionContext, like: torch.Tensor):
        self.terms, self.signature, self.context = terms, signature, context
        self.device, self.dtype, self.size = like.device, like.dtype, like.shape[-1]

    @functools.cached_property
    def toeplitz(self) -> ToeplitzTerms | None:
        """The Toeplitz form; None if the terms have none."""
        if toeplitz_unsupported(self.terms, self.context):
            return None
        like = torch.empty(0, self.size, device=self.device, dtype=self.dtype)
        return to_toeplitz(self.terms, self.context, like)

    def holds_for(self, context: AttentionContext) -> bool:
        """Whether these are the terms of another context, too: all are tables that have its offsets."""
        within = self.context.low <= context.low and context.high <= self.context.high
        return within and self.context.positions is None and context.positions is None and self.terms.by_offset


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention: the data with which a backend computes it, or says why it cannot.

    Attributes:
        query: (B, H, L, d), before any rotation.
        key: (B, H, K, d), before any rotation.
        value: (B, H, K, d).
        terms: what the scheme adds to the formula.
        context: offsets of the L queries and K keys, and the other relations of the pairs.
        mask: boolean (True: may attend) or additive, broadcastable to (B, H, L, K); a LazyMask under an attention
            window; a BlockMask for flex_attention; or None.
        is_causal: whether queries attend to no later key. It is only set without a mask.
        dropout: probability of dropping an attention weight; 0 outside training.
        output_weights: whether the caller wants the attention weights.
        needs_gradients: whether autograd is on, so that a backward pass may follow.
        shared: terms that other layers or other groups of rows have, too, if `terms` are these; or None.
        layer: the attention module. Transformers' attention functions read `is_causal` and `training` from it.
        options: further keyword arguments for these functions.
        runs_on: the device on which the call would run, if its tensors only describe it (on the meta device); or None.
        by_name: whether the caller named the backend. A backend then does not refuse because another one is faster.
        value_size: the number of leading value features that are not zero padding. A backend may return only these.
            None means all of them.
        kept: what the same call of other layers takes over, such as the backend; None to find out anew.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    terms: Terms
    context: AttentionContext
    mask: torch.Tensor | LazyMask | BlockMask | None = None
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
    kept: dict[Hashable, Any] | None = None

    @property
    def device(self) -> torch.device:
        """The device on which the call is computed."""
        return self.query.device if self.runs_on is None else self.runs_on

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the query, the key and the value."""
        return self.query.dtype

    @property
    def tensor_mask(self) -> torch.Tensor | None:
        """The mask as a tensor. A LazyMask builds its dense mask once for all layers.

        Raises:
            TypeError: for a BlockMask, which the backend should have refused.
        """
        if isinstance(self.mask, BlockMask):
            raise TypeError("the mask is a BlockMask, made for flex_attention; this backend takes tensors")
        return self.mask.dense if isinstance(self.mask, LazyMask) else self.mask

    @property
    def causal_mask(self) -> torch.Tensor:
        """Boolean (1 or B, 1, L, K); True where the key is not later than the query."""
        return (self.context.matrix(self.query.device) <= 0)[..., None, :, :]

    @property
    def scores(self) -> int:
        """The number of scores, B·H·L·K."""
        batch, heads, length, _ = self.query.shape
        return batch * heads * length * self.key.shape[2]


# A function from the output (B, L, H, d) of a rewritten call, which backends got, to the output of the original call.
Finish = Callable[[torch.Tensor], torch.Tensor]


def unchanged(out: torch.Tensor) -> torch.Tensor:
    """Return the output as it is, for a call that was not rewritten."""
    return out


def toeplitz_of(call: AttentionCall) -> ToeplitzTerms:
    """Return the Toeplitz form of the terms of a call; shared ones are converted once, for the longest rows."""
    shared, context = call.shared, call.context
    if shared is None or call.query.dtype != shared.dtype or shared.toeplitz is None:
        return to_toeplitz(call.terms, context, call.query)
    low, first, end = shared.context.low, context.low, context.high + 1
    if (first, end) == (low, shared.context.high + 1):
        return shared.toeplitz
    return shared.toeplitz.between(first - low, end - low)


class Backend(Protocol):
    """One way to compute the formula. A new backend is a file with such a class and a line in `dispatch.BACKENDS`.

    A backend that reads only the keys in the window of a LazyMask has a method `reads_window_only`; see the function
    of that name.
    """

    name: str

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Return the reasons why this backend does not compute a call.

        A reason may be that another backend is faster, unless the caller named this one (`call.by_name`): then every
        reason is an error. The method must not read the contents of any tensor. It must not read sizes while the call
        is being traced either, since the graph would hold for these sizes only.

        Returns:
            Reasons, each a part of a sentence. The list is empty if the backend takes the call.
        """
        ...

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute a call for which `unsupported` gives no reason.

        Returns:
            The output (B, L, H, d), and the attention weights (B, H, L, K) or None if they are not kept.
        """
        ...


def reads_window_only(backend: Backend, call: AttentionCall) -> bool:
    """Whether a backend reads only the keys in the window of a call. Other backends build the dense mask."""
    method = getattr(backend, "reads_window_only", None)  # not every backend has one
    return isinstance(call.mask, LazyMask) and method is not None and bool(method(call))
