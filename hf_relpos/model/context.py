"""What one attention call knows about its pairs (i, j), and pure functions of offsets: clipping, buckets, sinusoids.

All are functions of lengths and devices, never state: a computed buffer does not survive `from_pretrained`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .padding import Padding


def is_traced() -> bool:
    """Whether a graph is being recorded, which must not depend on the data."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


@dataclass(frozen=True)
class AttentionContext:
    """The offsets r = j − i of L queries and K keys, and the other relations that a scheme may ask for.

    Attributes:
        query_length: L.
        key_length: K.
        start: place of the first query among the keys: 0 without a cache, the number of cached tokens with one. A
            tensor of one element when a static cache keeps it on the device.
        positions: (B, K), the position of each key where that is not its place in the row; None for consecutive
            tokens, which is the fast case. The queries are the L keys from `start` on.
        reach: the largest |r| that `positions` can make; read only with `positions`.
        grid: (B, L, 2), row and column of each token of an image, negative outside of it; or None.
        token_type_ids: (B, L), or None.
        relation_ids: (B, L, L), the label of each directed edge from i to j; or None.
        shared: what the scheme's module shared by all layers returned for this call, or, until a layer has called it,
            a function that returns that; or None.
        query_projection: the W_q of the layer that asks for terms, D to H·d; or None.
        key_projection: its W_k.
        temperature: τ of the formula, (1 or B, 1 or H, L); None for 1.
        padding: where the real tokens are, if the layer is given only these; or None.
        device: where the layer computes, for schemes without parameters to tell it; None for the default device.
        dtype: what to compute angles, slopes and the like in: that of the layer, float32 at least.
    """

    query_length: int
    key_length: int
    start: int | torch.Tensor = 0
    positions: torch.Tensor | None = None
    max_distance: int = 0
    grid: torch.Tensor | None = None
    token_type_ids: torch.Tensor | None = None
    relation_ids: torch.Tensor | None = None
    shared: Any = None
    query_projection: Callable[[torch.Tensor], torch.Tensor] | None = None
    key_projection: Callable[[torch.Tensor], torch.Tensor] | None = None
    temperature: torch.Tensor | None = None
    padding: Padding | None = None
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32

    @property
    def low(self) -> int:
        """Smallest offset that can occur."""
        if self.positions is not None:
            return -self.max_distance
        last = self.key_length if isinstance(self.start, torch.Tensor) else self.start + self.query_length
        return 1 - last

    @property
    def high(self) -> int:
        """Largest offset that can occur."""
        if self.positions is not None:
            return self.max_distance
        return self.key_length - 1 - (0 if isinstance(self.start, torch.Tensor) else self.start)

    def query_positions(self, device: torch.device) -> torch.Tensor:
        """Positions of the queries, (L,), or (B, L) where they were given."""
        places = torch.arange(self.query_length, device=device) + self.start
        return places if self.positions is None else self.positions[:, places]

    def key_positions(self, device: torch.device) -> torch.Tensor:
        """Positions of the keys, (K,), or (B, K) where they were given."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.key_length, device=device)

    def matrix(self, device: torch.device) -> torch.Tensor:
        """r = j − i for every query and key, (L, K), or (B, L, K) where positions were given."""
        return self.key_positions(device)[..., None, :] - self.query_positions(device)[..., :, None]

    def grid_offsets(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows and columns from query to key, and whether both are on the grid, each (B, L, L).

        Raises:
            ValueError: for a grid that is not of all keys.
        """
        if self.grid is None or tuple(self.grid.shape[1:]) != (self.key_length, 2):
            raise ValueError(
                f"the grid has shape {None if self.grid is None else tuple(self.grid.shape)}; {self.query_length} "
                f"tokens that attend to {self.key_length} need position_ids of shape (batch, {self.key_length}, 2), "
                "and with a cache there is no way to give them: use_cache=False"
            )
        grid = self.grid.long()
        steps = grid[:, None, :] - grid[:, :, None]
        inside = (grid >= 0).all(-1)
        return steps[..., 0], steps[..., 1], inside[:, None, :] & inside[:, :, None]

    def span(self, device: torch.device) -> torch.Tensor:
        """Every offset from `low` to `high`, ascending, (high − low + 1,)."""
        return torch.arange(self.low, self.high + 1, device=device)


def t5_bucket(r: torch.Tensor, buckets: int, max_distance: int, bidirectional: bool = True) -> torch.Tensor:
    """Bucket of each offset, near ones exactly and far ones on a logarithmic scale (Raffel et al., arXiv 1910.10683).

    Args:
        r: offsets j − i, any shape.
        buckets: their number; with `bidirectional`, half for keys to the left and half for keys to the right.
        max_distance: all distances from it on share the last bucket.

    Returns:
        Numbers in [0, buckets), the shape of `r`.
    """
    first = torch.zeros_like(r)
    if bidirectional:
        buckets //= 2
        first = torch.where(r > 0, buckets, 0)
        distance = r.abs()
    else:
        distance = (-r).clamp(min=0)
    exact = buckets // 2
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + far.to(r.dtype)).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


def sinusoid_interleaved(positions: torch.Tensor, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sinusoids in the layout of the paper, [sin pω₀, cos pω₀, sin pω₁, …], ω_n = 10000^(−2n/dim).

    Vaswani et al. (arXiv 1706.03762, §3.5), NEZHA, CAPE.

    Args:
        positions: any shape; may be negative or fractional.
        dim: an even width.
        dtype: of the result; the angles are computed in float32 at least.

    Returns:
        (…, dim).
    """
    angles = _angles(positions, dim, dtype)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype)


def sinusoid_concat(positions: torch.Tensor, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sinusoids in the concatenated layout [sin pω₀ … sin pω_{dim/2−1} | cos pω₀ …], ω_n = 10000^(−2n/dim).

    The layout of Transformer-XL (arXiv 1901.02860), XLNet and Funnel. Arguments and result as
    `sinusoid_interleaved`'s.
    """
    angles = _angles(positions, dim, dtype)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def sinusoid_t2t(positions: torch.Tensor, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sinusoids in the layout of tensor2tensor, fairseq and TENER: concatenated, with ω_n = 10000^(−n/(dim/2 − 1)).

    The last wavelength is exactly 10000·2π. Arguments and result as `sinusoid_interleaved`'s; for dim = 2, where that
    formula divides by zero, the only frequency is 1.
    """
    working = torch.promote_types(dtype, torch.float32)
    half = dim // 2
    steps = torch.arange(half, device=positions.device, dtype=working) / max(half - 1, 1)
    angles = positions.to(working)[..., None] * 10000.0**-steps
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def _angles(positions: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    working = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=working) / dim
    return positions.to(working)[..., None] * 10000.0**-exponents
