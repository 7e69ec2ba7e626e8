"""A kernel with a fault, for tests of the check on first use: imported after Triton was told to interpret."""

import triton
import triton.language as tl


@triton.jit
def vectors(at, i, step, R, D: tl.constexpr, EVEN: tl.constexpr):
    """`tiles.vectors` that reads the row before the one it is asked for."""
    at += (i - 1)[:, None] * step + tl.arange(0, D)[None, :]
    return tl.load(at, mask=((i < R) & (i > 0))[:, None], other=0.0)
