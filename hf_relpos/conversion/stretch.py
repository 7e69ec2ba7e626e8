"""Longer tables of absolute positions from short ones: pure functions of the rows."""

import torch


# α of Su's decomposition: the weight of a position's block; its index in the block has the rest
ALPHA = 0.4


def interpolate(table: torch.Tensor, length: int) -> torch.Tensor:
    """Rows 1 to n − 1 stretched evenly over positions 1 to length − 1, linear in between; row 0, [CLS], as it is.

    Position interpolation (Chen et al. 2023, arXiv 2306.15595), for a learned table. Neighbours come closer together
    than in training. Row 0 stands for [CLS] rather than a position and is no neighbour of row 1, so it stays out.

    Args:
        table: (n, D), n ≥ 2.
        length: N ≥ 2.

    Returns:
        (N, D) in float64.
    """
    rows = table[1:].double()
    position = torch.linspace(0, len(rows) - 1, length - 1, dtype=torch.float64)
    left = position.floor().long()
    right = (left + 1).clamp(max=len(rows) - 1)
    share = (position - left)[:, None]
    return torch.cat([table[:1].double(), torch.lerp(rows[left], rows[right], share)])


def decompose(table: torch.Tensor, length: int, cls: bool) -> torch.Tensor:
    """Su's hierarchical decomposition: p of position i·n + j is α u_i + (1 − α) u_j, with u = (p − α p₀) / (1 − α).

    Su 2020, kexue.fm/archives/7947. The first n rows are those of the table. It covers n² positions.

    Args:
        table: (n, D).
        length: N.
        cls: row 0, [CLS], stays as it is and out of the sums, which then count positions from row 1 on.

    Returns:
        (N, D) in float64.

    Raises:
        ValueError: for more than n² positions.
    """
    if cls:
        return torch.cat([table[:1].double(), decompose(table[1:], length - 1, cls=False)])
    rows, count = table.double(), len(table)
    if length > count**2:
        raise ValueError(f"{count} rows make {count**2:,} positions, not {length:,}")
    parts = (rows - ALPHA * rows[0]) / (1 - ALPHA)
    position = torch.arange(length)
    extended = ALPHA * parts[position // count] + (1 - ALPHA) * parts[position % count]
    extended[:count] = rows[:length]  # without rounding
    return extended
