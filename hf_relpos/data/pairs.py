"""Data sets of the evaluation: scored sentence pairs, documents, queries."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .records import read_records, text_field


PAIR_COLUMNS = ("score", "sentence1", "sentence2")


@dataclass(frozen=True)
class Pair:
    """Two sentences and a human score of their similarity, on any scale."""

    score: float
    sentence1: str
    sentence2: str


@dataclass(frozen=True)
class Query:
    """A question and the id of the one document that answers it."""

    text: str
    document: str


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


def read_documents(path: str | Path) -> dict[str, str]:
    """Read documents, with the columns `id` and `text`; returns their texts by id.

    Raises:
        ValueError: for files that `read_records` rejects, ids that are repeated or neither text nor an integer, and
            documents that are not text.
    """
    documents: dict[str, str] = {}
    for number, record in enumerate(read_records(path, ("id", "text")), 1):
        name = _identifier(path, number, "id", record["id"])
        if name in documents:
            raise ValueError(f"{path}, record {number}: id = {name!r} was there before; make the ids unique")
        documents[name] = text_field(path, number, "text", record["text"])
    return documents


def read_queries(path: str | Path) -> list[Query]:
    """Read queries, with the columns `query` and `doc`, the id of the document that answers it.

    Raises:
        ValueError: for files that `read_records` rejects, queries that are not text, and ids that are neither text
            nor an integer.
    """
    return [
        Query(text_field(path, number, "query", record["query"]), _identifier(path, number, "doc", record["doc"]))
        for number, record in enumerate(read_records(path, ("query", "doc")), 1)
    ]


def _identifier(path: str | Path, number: int, column: str, value: Any) -> str:
    """The id of a document as text; JSON may also hold it as an integer."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return text_field(path, number, column, str(value) if is_integer else value)
