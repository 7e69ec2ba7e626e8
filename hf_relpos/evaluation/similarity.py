"""Semantic textual similarity: does the cosine of two sentence vectors rank pairs as people do?"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from ..data.pairs import Pair
from .encoder import Encoder, ProgressCallback
from .statistics import Difference, paired_bootstrap, rank_correlation


def pair_vectors(encoder: Encoder, pairs: Sequence[Pair], progress: ProgressCallback | None = None) -> torch.Tensor:
    """The vectors of both sentences of each pair, (pairs, 2, D); a sentence that recurs is read once."""
    texts = [text for pair in pairs for text in (pair.sentence1, pair.sentence2)]
    distinct = list(dict.fromkeys(texts))
    number = {text: n for n, text in enumerate(distinct)}
    vectors = encoder.encode(distinct, progress=progress, what="sentence pairs")
    return vectors[[number[text] for text in texts]].view(len(pairs), 2, -1)


def similarities(vectors: torch.Tensor) -> np.ndarray:
    """Cosines of pairs of vectors (pairs, 2, D), in float64."""
    return torch.nn.functional.cosine_similarity(*vectors.double().unbind(1), dim=-1).numpy()


def spearman(
    model: PreTrainedModel,
    tokenizer,
    pairs: Sequence[Pair],
    pooling: str = "mean",
    max_length: int | None = None,
) -> float:
    """Spearman's ρ between the scores and the cosines of the sentence vectors, × 100.

    Args:
        model: any with `last_hidden_state`.
        pairs: at least two.
        pooling: `mean` or `cls`.
        max_length: tokens read of a sentence; None for what the model reads.
    """
    found = similarities(pair_vectors(Encoder(model, tokenizer, pooling, max_length), pairs))
    return 100 * rank_correlation(found, np.array([pair.score for pair in pairs]))


def spearman_difference(
    one: np.ndarray, other: np.ndarray, scores: np.ndarray, draws: int = 1000, seed: int = 0
) -> Difference:
    """How many points of Spearman's ρ the second model has more than the first, with its 95 % range over pairs.

    Args:
        one: cosines by the first model, (pairs,).
        other: by the second.
        scores: by people.
    """
    one, other, scores = (np.asarray(values) for values in (one, other, scores))

    def difference(numbers: np.ndarray) -> float:
        truth = scores[numbers]
        return 100 * (rank_correlation(other[numbers], truth) - rank_correlation(one[numbers], truth))

    return paired_bootstrap(difference, len(scores), draws, seed)
