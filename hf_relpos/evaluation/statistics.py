"""Rank correlation, and the bootstrap confidence interval of a difference between two models on the same examples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Difference:
    """The result of the second of two models minus that of the first.

    Attributes:
        mean: the difference on all examples.
        low: 2.5th percentile of the resampled differences.
        high: 97.5th percentile.
    """

    mean: float
    low: float
    high: float


def average_ranks(values: NDArray[Any]) -> NDArray[Any]:
    """Ranks from 1, in float64; equal values share the mean of their ranks."""
    _, group, sizes = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = sizes.cumsum()
    return ((2 * last - sizes + 1) / 2)[group.reshape(-1)]


def rank_correlation(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Spearman's ρ with ties: Pearson's correlation of the average ranks. NaN if one of them is constant."""
    x, y = (average_ranks(values) for values in (one, other))
    x, y = x - x.mean(), y - y.mean()
    size = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / size) if size else float("nan")


def paired_bootstrap(
    difference: Callable[[NDArray[Any]], float], count: int, draws: int = 1000, seed: int = 0
) -> Difference:
    """95 % confidence interval of a difference between two models, by drawing examples with replacement.

    Args:
        difference: maps indices of examples, (count,) with repetitions, to the difference on these.
        count: number of examples.
        draws: number of bootstrap samples.
        seed: seed of the bootstrap.
    """
    rng = np.random.default_rng(seed)
    drawn = [difference(rng.integers(0, count, count)) for _ in range(draws)]
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Difference(float(difference(np.arange(count))), float(low), float(high))
