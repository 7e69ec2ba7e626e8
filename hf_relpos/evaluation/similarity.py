"""Semantic textual similarity: Spearman correlation of the cosines of sentence vectors with human scores."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..console import ProgressCallback
from ..data.pairs import Pair
from ..extras import import_extra
from .encoder import Encoder


def pair_vectors(encoder: Encoder, pairs: Sequence[Pair], progress: ProgressCallback | None = None) -> torch.Tensor:
    """Vectors of both sentences of each pair, (pairs, 2, D); a repeated sentence is encoded once."""
    texts = [text for pair in pairs for text in (pair.sentence1, pair.sentence2)]
    distinct = list(dict.fromkeys(texts))
    number = {text: n for n, text in enumerate(distinct)}
    vectors = encoder.encode(distinct, progress=progress, what="sentence pairs")
    return vectors[[number[text] for text in texts]].view(len(pairs), 2, -1)


def similarities(vectors: torch.Tensor) -> NDArray[np.float64]:
    """Cosines of pairs of vectors (pairs, 2, D), in float64."""
    left, right = vectors.double().unbind(1)
    return torch.nn.functional.cosine_similarity(left, right, dim=-1).numpy()


def scipy_stats() -> Any:
    """The module `scipy.stats`, imported on first use.

    Raises:
        ModuleNotFoundError: without SciPy; names the remedy.
    """
    return import_extra("scipy.stats", "sts", "correlations need")


def rank_correlation(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Spearman's ρ; NaN if one of them is constant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NaN says it
        return float(scipy_stats().spearmanr(one, other).statistic)


def spearman_difference(
    one: NDArray[Any], other: NDArray[Any], scores: NDArray[Any], draws: int = 1000, seed: int = 0
) -> dict[str, float]:
    """Spearman's ρ × 100 of the second model minus that of the first, with its 95 % range over pairs.

    Args:
        one: cosines of the first model, (pairs,).
        other: cosines of the second model, (pairs,).
        scores: human scores, (pairs,).
        draws: number of bootstrap samples, drawn with replacement.
        seed: seed of the bootstrap.

    Returns:
        `mean`, on all pairs, and `low` and `high`, percentiles 2.5 and 97.5 of the resampled differences.
    """
    one, other, scores = (np.asarray(values) for values in (one, other, scores))
    rng = np.random.default_rng(seed)

    def difference(indices: NDArray[np.int64]) -> float:
        truth = scores[indices]
        return 100 * (rank_correlation(other[indices], truth) - rank_correlation(one[indices], truth))

    drawn = [difference(rng.integers(0, len(scores), len(scores))) for _ in range(draws)]
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return {"mean": difference(np.arange(len(scores))), "low": float(low), "high": float(high)}
