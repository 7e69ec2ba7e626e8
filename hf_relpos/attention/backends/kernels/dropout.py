"""Dropout of attention weights, drawn from (seed, row of the batch, head, query, key) and not stored.

`tiles.kept` draws the same numbers in a kernel, whatever the size of its tiles.
"""

import torch


def kept(seed: torch.Tensor, pair: torch.Tensor, query: torch.Tensor, key: torch.Tensor, dropout: int) -> torch.Tensor:
    """Return which weights stay, boolean, in the shape to which the tensors broadcast.

    All tensors are int64 and on one device.

    Args:
        seed: (1,).
        pair: row of the batch · H + head.
        query: indices of queries.
        key: indices of keys.
        dropout: probability of dropping a weight, in units of 2^−16.
    """
    drawn = _mix(_mix(_mix(seed & 0xFFFFFFFF) ^ (seed >> 32)) ^ pair)
    row, column = _mix(drawn ^ query), _mix((~drawn & 0xFFFFFFFF) ^ key)
    return (_mix(row ^ column) >> 16) >= dropout


def _mix(x: torch.Tensor) -> torch.Tensor:
    """`tiles.mix` for int64 tensors that hold numbers of 32 bits."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)
