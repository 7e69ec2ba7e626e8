"""Conjugate gradients, and the base class of the fits of scores and values."""

from collections.abc import Callable, Iterable, Sequence

import torch

from ...processes import Reduce, local_sum
from .blocks import Block
from .parameters import Parameters
from .tables import Tables, zeros_like


def conjugate_gradients(
    product: Callable[[torch.Tensor], torch.Tensor],
    right: torch.Tensor,
    precondition: Callable[[torch.Tensor], torch.Tensor],
    iterations: int,
    tolerance: float,
) -> torch.Tensor:
    """Solve M x = right for symmetric positive M, given as a function for its products.

    Stops after `iterations`, or if the residual is below `tolerance` times the right-hand side (2-norm).
    """
    x = torch.zeros_like(right)
    residual = right.clone()
    z = precondition(residual)
    direction = z.clone()
    rz = float(residual @ z)
    goal = tolerance * float(right.norm())
    for _ in range(iterations):
        if rz <= 0 or float(residual.norm()) <= goal:
            break
        along = product(direction)
        curvature = float(direction @ along)
        if curvature <= 0:
            break
        x += (rz / curvature) * direction
        residual -= (rz / curvature) * along
        z = precondition(residual)
        previous, rz = rz, float(residual @ z)
        direction = z + (rz / previous) * direction
    return x


class Fit:
    """Base class of the fits of scores and values: θ, the blocks of this process, and sums over processes."""

    def __init__(self, parameters: Parameters, blocks: Sequence[Block], reduce: Reduce = local_sum):
        self.parameters, self.blocks, self.reduce = parameters, blocks, reduce

    def collect(self, add: Callable[[Block, Tables], None]) -> Tables:
        """Per-head tables to which `add` adds each block, summed over processes."""
        total = zeros_like(self.parameters.made, self.parameters.heads)
        for block in self.blocks:
            add(block, total)
        for letter, tensor in total.items():
            setattr(total, letter, self.reduce(tensor))
        return total

    def sum(self, values: Iterable[torch.Tensor]) -> float:
        """Sum numbers over blocks and processes."""
        zero = torch.zeros((), dtype=torch.float64, device=self.parameters.device)
        return float(self.reduce(torch.stack([zero, *(value.double() for value in values)]).sum()))
