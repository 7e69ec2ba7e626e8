"""What a call computes, as the dispatcher sees it: hooks, which `FlopCounterMode` has, would keep padding in."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


PRODUCTS = ("linear", "addmm", "mm", "_linear_pointwise")


class Computed(TorchDispatchMode):
    """A context that counts.

    Attributes:
        products: how many numbers linear layers returned.
        largest: how many elements the largest tensor had.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        if func.overloadpacket.__name__ in PRODUCTS:
            self.products += sum(sizes)
        return out


def computed_by(function: Any) -> Computed:
    """What a function without arguments computes."""
    with Computed() as counts:
        function()
    return counts
