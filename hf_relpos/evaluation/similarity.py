"""Semantic textual similarity: Spearman correlation of the cosines of sentence vectors with human scores."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..console import ProgressCallback
from ..data.pairs import Pair
from .encoder import Encoder
from .statistics import Difference, paired_bootstrap, rank_correlation


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


def spearman_difference(
    one: NDArray[Any], other: NDArray[Any], scores: NDArray[Any], draws: int = 1000, seed: int = 0
) -> Difference:
    """Spearman's ρ × 100 of the second model minus that of the first, with its 95 % range over pairs.

    Args:
        one: cosines of the first model, (pairs,).
        other: cosines of the second model, (pairs,).
        scores: human scores, (pairs,).
    """
    one, other, scores = (np.asarray(values) for values in (one, other, scores))

    def difference(indices: NDArray[np.int64]) -> float:
        truth = scores[indices]
        return 100 * (rank_correlation(other[indices], truth) - rank_correlation(one[indices], truth))

    return paired_bootstrap(difference, len(scores), draws, seed)
