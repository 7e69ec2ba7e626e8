"""Longer tables of absolute positions from short ones: pure functions of the rows."""

import torch


# α of Su's decomposition: how much of a position is said by its block, and how much by its place in the block
ALPHA = 0.4


def interpolate(table: torch.Tensor, length: int) -> torch.Tensor:
    """Rows 1 to n − 1 stretched evenly over places 1 to length − 1, linear in between; row 0, [CLS], as it is.

    Position interpolation (Chen et al. 2023, arXiv 2306.15595), for a learned table. Neighbours come closer together
    than in training. Row 0 stands for [CLS] more than for a place and is no neighbour of row 1, so it stays out.

    Args:
        table: (n, D), n ≥ 2.
        length: N ≥ 2.

    Returns:
        (N, D) in float64.
    """
    rows = table[1:].double()
    place = torch.linspace(0, len(rows) - 1, length - 1, dtype=torch.float64)
    left = place.floor().long()
    right = (left + 1).clamp(max=len(rows) - 1)
    share = (place - left)[:, None]
    return torch.cat([table[:1].double(), torch.lerp(rows[left], rows[right], share)])


def decompose(table: torch.Tensor, length: int, cls: bool) -> torch.Tensor:
    """Su's hierarchical decomposition: p of place i·n + j is α u_i + (1 − α) u_j, with u = (p − α p₀) / (1 − α).

    Su 2020, kexue.fm/archives/7947. The first n rows are those of the table. It covers n² places.

    Args:
        table: (n, D).
        length: N.
        cls: row 0, [CLS], stays as it is and out of the sums, which then count places from row 1 on.

    Returns:
        (N, D) in float64.

    Raises:
        ValueError: for more places than there are.
    """
    if cls:
        return torch.cat([table[:1].double(), decompose(table[1:], length - 1, cls=False)])
    rows, count = table.double(), len(table)
    if length > count**2:
        raise ValueError(f"{count} rows make {count**2:,} places, not {length:,}")
    parts = (rows - ALPHA * rows[0]) / (1 - ALPHA)
    place = torch.arange(length)
    made = ALPHA * parts[place // count] + (1 - ALPHA) * parts[place % count]
    made[:count] = rows[:length]  # without rounding
    return made
