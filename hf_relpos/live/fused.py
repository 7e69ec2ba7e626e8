"""The first half of a feed-forward part with its GELU inside oneDNN's product, which saves a pass over the result.

Classes are made for the stock class that is there, and found again by their names, which pickles hold.
"""

import sys
from typing import Any

import torch
from torch import nn

from ..attention.cpu_gemm import FastLinear, linear_gelu
from ..attention.tracing import is_traced
from ..host import live as stock
from ..host.declarations import INTERMEDIATE
from .parts import strange_part


PREFIX = "Fused"  # of the names of our classes


class _FusedGelu:
    """To be put before the stock class. In training, and where code of others is inside, stock's code runs."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As stock."""
        module: Any = self
        dense, activation = module.dense, module.intermediate_act_fn
        is_gelu = type(activation) is stock.GELUActivation and activation.act is nn.functional.gelu
        if is_gelu and type(dense) is FastLinear and not is_traced() and strange_part(module) is None:
            out = linear_gelu(hidden_states, dense.weight, dense.bias)
            if out is not None:
                return out
        result: torch.Tensor = super().forward(hidden_states)  # type: ignore[misc]
        return result


def fused(module: nn.Module) -> type[nn.Module] | None:
    """The class of ours for a stock module; None if there is none."""
    name = type(module).__name__
    if name not in INTERMEDIATE or type(module) is not getattr(stock, name):
        return None
    found: type[nn.Module] = getattr(sys.modules[__name__], PREFIX + name)  # made once
    return found


def __getattr__(name: str) -> Any:
    if name.removeprefix(PREFIX) not in INTERMEDIATE or not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(stock, name.removeprefix(PREFIX))
    made = type(name, (_FusedGelu, base), {"__module__": __name__, "__doc__": _FusedGelu.__doc__})
    return globals().setdefault(name, made)
