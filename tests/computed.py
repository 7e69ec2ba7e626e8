"""What a call computes, as the dispatcher sees it: hooks, which `FlopCounterMode` has, would keep padding in."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


VIEWS = ("_unsafe_view", "lift_fresh")  # whose schema does not say so
ASKING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim")
PRODUCTS = ("linear", "addmm", "mm", "_linear_pointwise")


class Computed(TorchDispatchMode):
    """A context that counts.

    Attributes:
        products: how many numbers linear layers returned.
        largest: how many elements the largest tensor had.
        operators: how often each operator ran, without views.
        asked: operators that gave Python what a tensor holds, or a shape that follows from it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products, self.largest = 0, 0
        self.operators: Counter[str] = Counter()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        name = func.overloadpacket.__name__
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        self.operators[name] += not (is_view or name in VIEWS)
        by_mask = name.startswith("index") and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1:2])
        )
        self.asked += [name] if by_mask or name in ASKING else []
        if func.overloadpacket.__name__ in PRODUCTS:
            self.products += sum(sizes)
        return out


def computed_by(function: Any) -> Computed:
    """What a function without arguments computes."""
    with Computed() as counts:
        function()
    return counts
