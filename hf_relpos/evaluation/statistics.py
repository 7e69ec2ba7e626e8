"""Rank correlation, and how sure one can be of a difference between two models on the same questions."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """How much more the second of two models reaches than the first.

    Attributes:
        mean: on the questions as they are.
        low: 2.5 % of the resampled differences lie below.
        high: 2.5 % lie above.
    """

    mean: float
    low: float
    high: float


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 on, in float64; values that are equal share the mean of their ranks."""
    _, group, sizes = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = sizes.cumsum()
    return ((2 * last - sizes + 1) / 2)[group.reshape(-1)]


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's ρ with ties: Pearson's correlation of the average ranks. NaN where one of them never varies."""
    x, y = (average_ranks(values) for values in (one, other))
    x, y = x - x.mean(), y - y.mean()
    size = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / size) if size else float("nan")


def paired_bootstrap(
    difference: Callable[[np.ndarray], float], count: int, draws: int = 1000, seed: int = 0
) -> Difference:
    """Range of a difference between two models on the same questions, by drawing questions with replacement.

    Args:
        difference: maps numbers of questions, (count,) with repetitions, to the difference on these.
        count: how many questions there are.
        draws: how often to draw them.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    drawn = [difference(rng.integers(0, count, count)) for _ in range(draws)]
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Difference(float(difference(np.arange(count))), float(low), float(high))
