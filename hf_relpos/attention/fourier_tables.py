"""Tables whose rows are sums of cosines and sines of the offset: low rank in position, and so plain attention.

    A_r = Σ_w a_w cos ω_w r + b_w sin ω_w r,     r = j − i

A cosine of a difference is a sum of products of functions of i and of j, which makes such a term a product of features
of the query and of the key (`fourier_features.py`); any backend may also read the rows by offset, as of another table.

All frequencies are multiples of 2π / 2^24. Phases are reduced by arithmetic of integers, so those of far tokens are as
exact as those of near ones, in any dtype and on any device: far from position 0 a float32 product would be off by as
much as rounding changes a position.
"""

import torch

from .context import AttentionContext
from .formula import Table


TURN = 1 << 24  # steps of a full turn; a float32 holds every one of them
HIGHEST = 0.85 * TURN / 2  # at π sines would vanish at every offset


def geometric(count: int, period: int) -> tuple[int, ...]:
    """Frequencies at equal ratios, from 2π / `period` up to 0.85 π, in steps of 2π / 2^24.

    Args:
        count: how many; one alone is the slowest.
        period: from 4 to 2^24.
    """
    slowest = TURN / period
    ratio = HIGHEST / slowest
    return tuple(round(slowest * ratio ** (number / max(count - 1, 1))) for number in range(count))


def phases(
    positions: torch.Tensor, frequencies: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos ω_w p and sin ω_w p.

    Args:
        positions: p, integers, any shape; may be negative.
        frequencies: W of them, as `geometric` gives them.
        dtype: float32 or float64.

    Returns:
        Two tensors (…, W).
    """
    steps = positions[..., None] * torch.tensor(frequencies, device=positions.device)
    steps = torch.remainder(steps + TURN // 2, TURN) - TURN // 2  # from −half a turn, where numbers are finest
    angles = steps.to(dtype) * (2 * torch.pi / TURN)
    return angles.cos(), angles.sin()


class FourierTable(Table):
    """A table of W cosines and sines of the offset. Its rows are computed whenever they are read.

    Attributes:
        coefficients: (H or 1, 2W, d) for A, B and V; (H or 1, 2W) for c. Those of the cosines, then of the sines.
        frequencies: W of them, as `geometric` gives them.
        context: of the call; its offsets are the rows.
    """

    coefficients: torch.Tensor
    frequencies: tuple[int, ...]
    context: AttentionContext

    def __init__(self, coefficients: torch.Tensor, frequencies: tuple[int, ...], context: AttentionContext) -> None:
        # a table is frozen, and these are none of its fields
        object.__setattr__(self, "coefficients", coefficients)
        object.__setattr__(self, "frequencies", frequencies)
        object.__setattr__(self, "context", context)

    @property
    def device(self) -> torch.device:
        return self.coefficients.device

    @property
    def rows(self) -> torch.Tensor:
        """One for each offset of the call."""
        precise = torch.promote_types(self.coefficients.dtype, torch.float32)
        offsets = self.context.offsets(self.coefficients.device)
        basis = torch.cat(phases(offsets, self.frequencies, precise), dim=-1)  # (P, 2W)
        coefficients = self.coefficients.to(precise)
        if coefficients.dim() == 2:
            return torch.matmul(coefficients, basis.T)
        return torch.matmul(basis, coefficients)

    def row_of(self, relation: torch.Tensor) -> torch.Tensor:
        """The row of each offset."""
        return relation - self.context.low
