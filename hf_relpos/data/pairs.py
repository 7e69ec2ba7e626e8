"""Scored sentence pairs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .records import read_records, text_field


PAIR_COLUMNS = ("score", "sentence1", "sentence2")


@dataclass(frozen=True)
class Pair:
    """Two sentences and a human score of their similarity, on any scale."""

    score: float
    sentence1: str
    sentence2: str


def read_pairs(path: str | Path, columns: Sequence[str] = PAIR_COLUMNS) -> list[Pair]:
    """Read scored sentence pairs.

    Args:
        path: JSON lines or tab-separated.
        columns: names of score, first and second sentence.

    Raises:
        ValueError: for files that `read_records` rejects, scores that are not numbers, sentences that are not text,
            fewer than two pairs, and scores that are all the same.
    """
    if len(columns) != 3:
        raise ValueError(f"columns = {list(columns)}: name three, for score, first and second sentence")
    pairs = []
    for number, record in enumerate(read_records(path, columns), 1):
        score, *sentences = (record[column] for column in columns)
        try:
            value = math.nan if isinstance(score, bool) else float(score)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(
                f"{path}, record {number}: {columns[0]} = {score!r} is no number; name the columns with --columns "
                f"(score, first and second sentence; now {', '.join(columns)})"
            )
        one, other = (text_field(path, number, *field) for field in zip(columns[1:], sentences, strict=True))
        pairs.append(Pair(value, one, other))
    if len(pairs) < 2:
        raise ValueError(f"{path}: one pair cannot be ranked; give more")
    if len({pair.score for pair in pairs}) == 1:
        raise ValueError(
            f"{path}: {columns[0]} = {pairs[0].score:g} in all pairs, which cannot be ranked; give others"
        )
    return pairs
