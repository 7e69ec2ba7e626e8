"""Encodings of positions and offsets: T5's buckets, and three layouts of sinusoids.

These are pure functions, not buffers: a computed buffer does not survive `from_pretrained`.
"""

import math

import torch


def t5_bucket(r: torch.Tensor, buckets: int, max_distance: int, bidirectional: bool = True) -> torch.Tensor:
    """Return the bucket of each offset, as in T5 (arXiv 1910.10683): exact for near ones, logarithmic for far ones.

    Args:
        r: offsets j − i, any shape.
        buckets: number of buckets. With `bidirectional`, half serve keys to the left and half keys to the right.
        max_distance: all distances from this one on share the last bucket.

    Returns:
        Numbers in [0, buckets), with the shape of `r`.
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
    """Compute sinusoids in the interleaved layout [sin pω₀, cos pω₀, sin pω₁, …], ω_n = 10000^(−2n/dim).

    This is the layout of Vaswani et al. (arXiv 1706.03762, §3.5), NEZHA and CAPE.

    Args:
        positions: any shape; may be negative or fractional.
        dim: width, an even number.
        dtype: dtype of the result. Angles are computed in float32 or wider.

    Returns:
        (…, dim).
    """
    angles = _angles(positions, dim, dtype, last=dim)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype)


def sinusoid_concat(positions: torch.Tensor, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Compute sinusoids in the concatenated layout [sin pω₀ … sin pω_{dim/2−1} | cos pω₀ …], ω_n = 10000^(−2n/dim).

    This is the layout of Transformer-XL (arXiv 1901.02860), XLNet and Funnel. Arguments and result are those of
    `sinusoid_interleaved`.
    """
    angles = _angles(positions, dim, dtype, last=dim)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def sinusoid_t2t(positions: torch.Tensor, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Compute sinusoids in the concatenated layout of tensor2tensor, with ω_n = 10000^(−n/(dim/2 − 1)).

    fairseq and TENER use it, too. The last wavelength is exactly 10000·2π. For dim = 2 the formula divides by zero;
    the only frequency is then 1. Arguments and result are those of `sinusoid_interleaved`.
    """
    angles = _angles(positions, dim, dtype, last=max(dim - 2, 1))
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def _angles(positions: torch.Tensor, dim: int, dtype: torch.dtype, last: int) -> torch.Tensor:
    working = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=working) / last
    return positions.to(working)[..., None] * 10000.0**-exponents
