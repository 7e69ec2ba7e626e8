"""Which attention weights dropout leaves: drawn by (seed, row of the batch, head, query, key), and kept nowhere.

`tiles.kept` draws the same numbers in a kernel, whatever its tiles are.
"""

import torch


def kept(seed: torch.Tensor, pair: torch.Tensor, query: torch.Tensor, key: torch.Tensor, dropout: int) -> torch.Tensor:
    """Which weights stay: boolean, of the shape to which the others broadcast, all int64 and on one device.

    Args:
        seed: (1,).
        pair: row of the batch · H + head.
        query: indices of queries; `key`, of keys.
        dropout: probability of dropping a weight, in units of 2^−16.
    """
    drawn = _mix(_mix(_mix(seed & 0xFFFFFFFF) ^ (seed >> 32)) ^ pair)
    row, column = _mix(drawn ^ query), _mix((~drawn & 0xFFFFFFFF) ^ key)
    return (_mix(row ^ column) >> 16) >= dropout


def _mix(x: torch.Tensor) -> torch.Tensor:
    """`tiles.mix`, of int64 that hold 32 bits."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)
