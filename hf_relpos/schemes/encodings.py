"""Encodings of positions and offsets: T5's buckets, and the three layouts of sinusoids.

Pure functions, never buffers: a computed buffer does not survive `from_pretrained`.
"""

import math

import torch


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
