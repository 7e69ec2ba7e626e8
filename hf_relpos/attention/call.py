"""One self-attention call, and what a backend is. Backends know the terms of the formula, never a scheme."""

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from .context import AttentionContext
from .formula import Terms
from .tracing import is_traced


class LazyMask:
    """A mask that backends may read in parts, without making it whole."""

    @functools.cached_property
    def dense(self) -> torch.Tensor:
        """All pairs, boolean (1 or B, 1, L, K), True: may attend."""
        raise NotImplementedError

    @functools.cached_property
    def visible_keys(self) -> torch.Tensor:
        """How many keys each query attends to, (1 or B, 1, L); of padding any number."""
        raise NotImplementedError


# Forms of the terms that backends want made once where all layers share them, by name: from the terms, the context and
# a tensor of the head size, device and dtype of the queries.
SHARED_FORMS: dict[str, Callable[[Terms, AttentionContext, torch.Tensor], Any]] = {}


class SharedTerms:
    """The terms of a scheme that are the same in every layer, and the forms that backends want: made once per forward.

    They are made before the first layer and never in one, so that a layer which is computed again in the backward
    (activation checkpointing) finds what it found the first time.

    Args:
        terms: of every layer.
        signature: of the scheme, `Scheme.signature`; a layer whose scheme has another makes its own.
        context: of the call.
        like: (…, d), a tensor of the head size, device and dtype of the queries. A layer elsewhere, or in another
            dtype, makes its own.
    """

    def __init__(self, terms: Terms, signature: Hashable, context: AttentionContext, like: torch.Tensor):
        self.terms = terms
        self.signature = signature
        self.device, self.dtype = like.device, like.dtype
        self.forms = {name: make(terms, context, like) for name, make in SHARED_FORMS.items()}


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention: what a backend needs to compute it, or to say why it cannot.

    Attributes:
        query: (B, H, L, d), before any rotation.
        key: (B, H, K, d), likewise.
        value: (B, H, K, d).
        terms: what the scheme adds to the formula.
        context: offsets of the L queries and K keys, and what else is known of them.
        mask: boolean (True: may attend) or additive, broadcastable to (B, H, L, K); a LazyMask, under an attention
            window; a BlockMask for flex_attention; or None.
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
        """Where the call is computed."""
        return self.query.device if self.runs_on is None else self.runs_on

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the query, the key and the value."""
        return self.query.dtype

    @property
    def tensor_mask(self) -> torch.Tensor | None:
        """The mask as a tensor. A LazyMask becomes the mask of all pairs, once for all layers.

        Raises:
            TypeError: for a BlockMask, which such a backend should have refused.
        """
        if isinstance(self.mask, BlockMask):
            raise TypeError("the mask is a BlockMask, made for flex_attention; this backend takes tensors")
        return self.mask.dense if isinstance(self.mask, LazyMask) else self.mask

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


# Makes the output (B, L, H, d) of a call from that of the call that a backend got in its place.
Finish = Callable[[torch.Tensor], torch.Tensor]


def unchanged(out: torch.Tensor) -> torch.Tensor:
    """The output of a call that a backend got as it is."""
    return out


class Backend(Protocol):
    """One way to compute the formula. A new one is a file with such a class, and a line in `backends.BACKENDS`.

    A backend that reads only the keys in the window of a LazyMask says so by a method `reads_window_only`; see the
    function of that name.
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
    return isinstance(call.mask, LazyMask) and method is not None and bool(method(call))
