"""Offsets r = j − i of one attention call, maps from offsets to table rows, and sinusoids.

All are functions of lengths and devices, never state: a computed buffer does not survive `from_pretrained`.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Offsets:
    """The offsets of L consecutive queries and K consecutive keys.

    Attributes:
        query_length: L.
        key_length: K.
        start: place of the first query among the keys: 0 without a cache, the number of cached tokens with one. A
            tensor of one element when a static cache keeps it on the device.
    """

    query_length: int
    key_length: int
    start: int | torch.Tensor = 0

    @property
    def low(self) -> int:
        """Smallest offset that can occur."""
        last = self.key_length if isinstance(self.start, torch.Tensor) else self.start + self.query_length
        return 1 - last

    @property
    def high(self) -> int:
        """Largest offset that can occur."""
        return self.key_length - 1 - (0 if isinstance(self.start, torch.Tensor) else self.start)

    def query_positions(self, device: torch.device) -> torch.Tensor:
        """Positions of the queries, (L,)."""
        return torch.arange(self.query_length, device=device) + self.start

    def key_positions(self, device: torch.device) -> torch.Tensor:
        """Positions of the keys, (K,)."""
        return torch.arange(self.key_length, device=device)

    def matrix(self, device: torch.device) -> torch.Tensor:
        """r = j − i for every query and key, (L, K)."""
        return self.key_positions(device)[None, :] - self.query_positions(device)[:, None]

    def span(self, device: torch.device) -> torch.Tensor:
        """Every offset from `low` to `high`, ascending, (high − low + 1,)."""
        return torch.arange(self.low, self.high + 1, device=device)


def sinusoid_concat(positions: torch.Tensor, dim: int) -> torch.Tensor:
    """Sinusoids in the concatenated layout [sin pω₀ … sin pω_{dim/2−1} | cos pω₀ …], ω_n = 10000^(−2n/dim).

    The layout of Transformer-XL (arXiv 1901.02860), XLNet and Funnel; Vaswani et al. (arXiv 1706.03762, §3.5)
    interleave sine and cosine instead, and tensor2tensor uses other frequencies: the three are not interchangeable.

    Args:
        positions: (N,), integer or float; may be negative.
        dim: an even width.

    Returns:
        (N, dim), float32 (float64 where `positions` is).
    """
    dtype = positions.dtype if positions.dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=dtype) / dim
    angles = positions.to(dtype)[:, None] * (10000.0**-exponents)[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
