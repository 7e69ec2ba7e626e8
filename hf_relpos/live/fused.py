"""Feed-forward parts with the activation inside oneDNN's product, which saves a pass over the largest states.

Of a gated one (GLU; Shazeer 2020, arXiv 2002.05202) the second product is multiplied into the first in place. Classes
are made for the stock class that is there, and found again by their names, which pickles hold.
"""

import sys
from typing import Any

import torch
from torch import nn

from ..attention.cpu_gemm import FastLinear, has_gradients, linear, linear_activation
from ..attention.tracing import is_traced
from ..host import live as stock
from ..host.declarations import FEED_FORWARD, FeedForward
from .foreign import foreign_part


PREFIX = "Fused"  # of the names of our classes
# With fewer rows two products of half a weight take longer than one of the whole.
FEWEST_ROWS_OF_HALVES = 64


class _Fused:
    """To be put before the stock class. In training, and where code of others is inside, stock's code runs."""

    parts: FeedForward

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As stock."""
        out = _forward(self, self.parts, hidden_states)
        if out is None:
            result: torch.Tensor = super().forward(hidden_states)  # type: ignore[misc]
            return result
        return out


def _forward(module: Any, parts: FeedForward, states: torch.Tensor) -> torch.Tensor | None:
    """What a feed-forward part computes, in inference by known code; else None."""
    layer, factor = getattr(module, parts.linear), getattr(module, parts.factor) if parts.factor else None
    activation = _activation_of(getattr(module, parts.activation)) if parts.activation else "gelu"
    if (
        activation is None
        or type(layer) is not FastLinear
        or not (factor is None or type(factor) is FastLinear)
        or getattr(module, "chunk_size_feed_forward", False)
        or is_traced()
        or foreign_part(module) is not None
        or has_gradients(states, *module.parameters())
    ):
        return None
    if factor is layer and states.shape[:-1].numel() < FEWEST_ROWS_OF_HALVES:
        return None
    products = _products(layer, factor)
    out = linear_activation(states, *products[0], activation)
    if out is None:
        return None
    if factor is not None:
        out.mul_(linear(states, *products[1]))
    for name in parts.rest:
        out = getattr(module, name)(out)
    return out


def _products(
    layer: nn.Linear, factor: nn.Linear | None
) -> list[tuple[torch.Tensor, torch.Tensor | None, nn.Linear | None]]:
    """Weight, bias and layer of each product. A layer that is both has one in either half of its output features."""
    if factor is not layer:
        return [(each.weight, each.bias, each) for each in (layer, factor) if each is not None]
    biases = (None, None) if layer.bias is None else layer.bias.chunk(2)
    return [(weight, bias, None) for weight, bias in zip(layer.weight.chunk(2), biases, strict=True)]


def _activation_of(module: nn.Module) -> str | None:
    """The name that `linear_activation` has for an activation of Transformers; None for any other."""
    if type(module) is stock.GELUActivation:
        return "gelu" if module.act is nn.functional.gelu else None
    if type(module) is stock.NewGELUActivation:
        return "gelu_tanh"
    return "silu" if type(module) in (nn.SiLU, stock.SiLUActivation) else None


def fused(module: nn.Module) -> type[nn.Module] | None:
    """The class of ours for a stock module; None if there is none."""
    kind = type(module)
    parts = FEED_FORWARD.get(kind.__name__)
    if parts is None or kind.__module__ != parts.file:
        return None
    found: type[nn.Module] = getattr(sys.modules[__name__], PREFIX + kind.__name__)  # made once
    return found


def __getattr__(name: str) -> Any:
    parts = FEED_FORWARD.get(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    if parts is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(stock, name.removeprefix(PREFIX))
    made = type(name, (_Fused, base), {"__module__": __name__, "__doc__": _Fused.__doc__, "parts": parts})
    return globals().setdefault(name, made)
