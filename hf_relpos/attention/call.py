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
from .toeplitz import ToeplitzTerms, shared_toeplitz, to_toeplitz
from .tracing import is_traced


class LazyMask:
    """A mask that backends can read in parts, without building the dense mask."""

    @functools.cached_property
    def dense(self) -> torch.Tensor:
        """The dense mask, boolean (1 or B, 1, L, K); True means that the query may attend."""
        raise NotImplementedError


class SharedTerms:
    """The terms of a scheme that are the same in every layer, made once per forward together with their Toeplitz form.

    They are made before the first layer and never inside one. A layer that is recomputed in the backward pass
    (activation checkpointing) then sees the same terms as in the forward.

    Args:
        terms: the terms of every layer.
        signature: `Scheme.signature` of the scheme. A layer whose scheme has another signature makes its own terms.
        context: the context of the call.
        like: (…, d), a tensor with the head size, device and dtype of the queries. A layer on another device, or with
            another dtype, makes its own terms.
    """

    def __init__(self, terms: Terms, signature: Hashable, context: AttentionContext, like: torch.Tensor):
        self.terms = terms
        self.signature = signature
        self.device, self.dtype = like.device, like.dtype
        self.toeplitz = shared_toeplitz(terms, context, like)


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
        shared: the terms that all layers share, if `terms` are these; or None.
        layer: the attention module. Transformers' attention functions read `is_causal` and `training` from it.
        options: further keyword arguments for these functions.
        runs_on: the device on which the call would run, if its tensors only describe it (on the meta device); or None.
        by_name: whether the caller named the backend. A backend then does not refuse because another one is faster.
        value_size: the number of leading value features that are not zero padding. A backend may return only these.
            None means all of them.
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

    @property
    def is_traced(self) -> bool:
        """Whether a graph is being recorded. The computation must then not depend on the data."""
        return is_traced()


# A function from the output (B, L, H, d) of a rewritten call, which backends got, to the output of the original call.
Finish = Callable[[torch.Tensor], torch.Tensor]


def unchanged(out: torch.Tensor) -> torch.Tensor:
    """Return the output as it is, for a call that was not rewritten."""
    return out


def toeplitz_of(call: AttentionCall) -> ToeplitzTerms:
    """Return the Toeplitz form of the terms of a call. Terms that all layers share are converted once per forward."""
    if call.shared is None:
        return to_toeplitz(call.terms, call.context, call.query)
    if call.shared.toeplitz is None or call.query.dtype != call.shared.dtype:
        return to_toeplitz(call.shared.terms, call.context, call.query)
    return call.shared.toeplitz


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
