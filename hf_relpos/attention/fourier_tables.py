"""Fourier tables: their rows are sums of cosines and sines of the offset, so that plain attention can compute them.

    A_r = Σ_w a_w cos ω_w r + b_w sin ω_w r,     r = j − i

A cosine of a difference is a sum of products of functions of i and of j. Such a term is therefore a product of
features of the query and of the key (`fourier_features.py`). A backend may also read the rows by offset, as usual.

All frequencies are multiples of 2π / 2^24. Phases are reduced by integer arithmetic, so that those of far tokens are
as exact as those of near ones, in any dtype and on any device. Far from position 0, a float32 product would be off by
as much as rounding changes a position.
"""

import torch

from .context import AttentionContext
from .formula import Table


TURN = 1 << 24  # steps of a full turn; a float32 can represent every one of them
HIGHEST = 0.85 * TURN / 2  # at π, sines would vanish at every offset


def geometric(count: int, period: int) -> tuple[int, ...]:
    """Return frequencies at equal ratios, from 2π / `period` up to 0.85 π, in steps of 2π / 2^24.

    Args:
        count: the number of frequencies; a single one is the slowest.
        period: from 4 to 2^24.
    """
    slowest = TURN / period
    ratio = HIGHEST / slowest
    return tuple(round(slowest * ratio ** (number / max(count - 1, 1))) for number in range(count))


def phases(
    positions: torch.Tensor, frequencies: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cos ω_w p and sin ω_w p.

    Args:
        positions: p, integers of any shape, which may be negative.
        frequencies: W frequencies from `geometric`.
        dtype: float32 or float64.

    Returns:
        Two tensors (…, W).
    """
    steps = positions[..., None] * torch.tensor(frequencies, device=positions.device)
    steps = torch.remainder(steps + TURN // 2, TURN) - TURN // 2  # from −half a turn, where floats are most precise
    angles = steps.to(dtype) * (2 * torch.pi / TURN)
    return angles.cos(), angles.sin()


class FourierTable(Table):
    """A table of W cosines and sines of the offset. Its rows are computed whenever they are read.

    Attributes:
        coefficients: (H or 1, 2W, d) for A, B and V; (H or 1, 2W) for c. Those of the cosines come first, then those
            of the sines.
        frequencies: W frequencies from `geometric`.
        context: the context of the call, whose offsets are the rows.
    """

    coefficients: torch.Tensor
    frequencies: tuple[int, ...]
    context: AttentionContext

    def __init__(self, coefficients: torch.Tensor, frequencies: tuple[int, ...], context: AttentionContext) -> None:
        # Table is frozen, and these are not among its fields
        object.__setattr__(self, "coefficients", coefficients)
        object.__setattr__(self, "frequencies", frequencies)
        object.__setattr__(self, "context", context)

    @property
    def device(self) -> torch.device:
        return self.coefficients.device

    @property
    def rows(self) -> torch.Tensor:
        """The rows, one for each offset of the call."""
        precise = torch.promote_types(self.coefficients.dtype, torch.float32)
        offsets = self.context.offsets(self.coefficients.device)
        basis = torch.cat(phases(offsets, self.frequencies, precise), dim=-1)  # (P, 2W)
        coefficients = self.coefficients.to(precise)
        if coefficients.dim() == 2:
            return torch.matmul(coefficients, basis.T)
        return torch.matmul(basis, coefficients)

    def row_of(self, relation: torch.Tensor) -> torch.Tensor:
        """Return the row of each offset."""
        return relation - self.context.low
