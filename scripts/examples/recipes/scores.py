"""Scores of named entities, by seqeval."""

from collections.abc import Sequence

from seqeval.metrics import f1_score, precision_score, recall_score


def entity_scores(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 of entities in percent, exact in type and both ends; 0 where one is undefined.

    In seqeval's default mode, as the CoNLL-2000 scorer counts: I- without a B- of its type before it begins an entity.
    """
    measures = {"precision": precision_score, "recall": recall_score, "f1": f1_score}
    return {name: 100 * float(measure(truth, predicted, zero_division=0)) for name, measure in measures.items()}
