"""Retrieval by the cosine of query and document vectors, with strategies for long documents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..console import ProgressCallback, split_progress
from ..data.batching import Row
from ..data.pairs import Query
from .encoder import Encoder, text_work
from .statistics import Difference, paired_bootstrap


STRATEGIES = ("full", "truncate", "chunks")
CHUNK = 512


@dataclass(frozen=True)
class Retrieval:
    """The rank of the relevant document for each query.

    Attributes:
        ranks: (queries,), from 1; documents with the same score as the relevant one count as better.
    """

    ranks: NDArray[Any]

    def by_query(self) -> dict[str, NDArray[Any]]:
        """Each measure for each query: accuracy@1, reciprocal rank, and nDCG@10 with one relevant document."""
        gain = np.where(self.ranks <= 10, 1 / np.log2(1 + self.ranks), 0.0)
        return {"accuracy@1": (self.ranks == 1).astype(float), "mrr": 1 / self.ranks, "ndcg@10": gain}

    def to_dict(self) -> dict[str, Any]:
        """Number of queries, and the mean of each measure."""
        return {"queries": len(self.ranks)} | {name: float(v.mean()) for name, v in self.by_query().items()}


def difference(one: Retrieval, other: Retrieval, draws: int = 1000, seed: int = 0) -> dict[str, Difference]:
    """The second result minus the first, by measure, with 95 % ranges over queries.

    Args:
        one: result of the first model or strategy.
        other: result of the second, for the same queries in the same order.
        draws: number of bootstrap samples.
        seed: seed of the bootstrap.

    Raises:
        ValueError: for different numbers of queries.
    """
    left, right = one.by_query(), other.by_query()
    if len(one.ranks) != len(other.ranks):
        raise ValueError(f"{len(one.ranks)} queries against {len(other.ranks)}; retrieve the same ones with both")
    return {
        name: paired_bootstrap(partial(_mean, right[name] - left[name]), len(one.ranks), draws, seed) for name in left
    }


def _mean(values: NDArray[np.float64], indices: NDArray[np.int64]) -> float:
    return float(values[indices].mean())


def document_vectors(
    encoder: Encoder,
    texts: Sequence[str],
    strategy: str = "full",
    length: int | None = None,
    chunk: int = CHUNK,
    progress: ProgressCallback | None = None,
) -> torch.Tensor:
    """Vectors of documents, (texts, D).

    Args:
        strategy: `full` reads the first `length` tokens at once. `truncate` reads the first `chunk` tokens. `chunks`
            reads the first `length` tokens in pieces of `chunk`, each between [CLS] and [SEP], and takes the mean of
            their vectors, weighted by their numbers of tokens.
        length: tokens read of a document, special tokens included (for `chunks`, [CLS] and [SEP] count once); None
            for all, or for the model's maximum length.
        chunk: tokens of a piece, special tokens included.

    Raises:
        ValueError: for an unknown strategy, and for more tokens at once than the model's maximum length.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy = {strategy!r} is unknown; use one of: {', '.join(map(repr, STRATEGIES))}")
    what = f"documents, {strategy}"
    if strategy != "chunks":
        return encoder.encode(texts, chunk if strategy == "truncate" else length, progress, what)
    size = encoder.limit(chunk) or chunk
    rows: list[Row] = []
    owner: list[int] = []
    for number, row in enumerate(encoder.tokenize(texts, length)):
        cut = pieces(row, size)
        rows += cut
        owner += [number] * len(cut)
    vectors = encoder.encode_rows(rows, progress, what)
    weight = torch.tensor([max(len(row) - 2, 1) for row in rows], dtype=vectors.dtype)[:, None]
    total = vectors.new_zeros(len(texts), vectors.shape[1]).index_add_(0, torch.tensor(owner), vectors * weight)
    return total / weight.new_zeros(len(texts), 1).index_add_(0, torch.tensor(owner), weight)


def retrieval_work(
    encoder: Encoder,
    documents: Mapping[str, str],
    queries: Sequence[Query],
    strategy: str = "full",
    length: int | None = None,
    chunk: int = CHUNK,
) -> dict[str, float]:
    """Expected work of `retrieve`: for the queries and for the documents."""
    most, piece = (chunk, None) if strategy == "truncate" else (length, chunk if strategy == "chunks" else None)
    return {
        "queries": text_work(encoder.model, [query.text for query in queries]),
        "documents": text_work(encoder.model, documents.values(), most, piece),
    }


def pieces(row: Row, size: int) -> list[Row]:
    """Split a row `[CLS] … [SEP]` into pieces of at most `size` tokens, each between [CLS] and [SEP]."""
    inner, step = row[1:-1], size - 2
    return [[row[0], *inner[start : start + step], row[-1]] for start in range(0, max(len(inner), 1), step)]


def rank_documents(queries: torch.Tensor, documents: torch.Tensor, right: torch.Tensor) -> NDArray[Any]:
    """The rank of the relevant document for each query, by cosine.

    Args:
        queries: (Q, D).
        documents: (N, D).
        right: (Q,), index of the relevant document.

    Returns:
        (Q,), from 1. Among documents with the same score the relevant one is last, so a model with the same vector for
        all documents ranks it last.
    """
    scores = nn.functional.normalize(queries.double(), dim=-1) @ nn.functional.normalize(documents.double(), dim=-1).T
    own = scores.gather(1, right[:, None])
    return (scores >= own).sum(1).numpy()


def retrieve(
    encoder: Encoder,
    documents: Mapping[str, str],
    queries: Sequence[Query],
    strategy: str = "full",
    length: int | None = None,
    chunk: int = CHUNK,
    progress: ProgressCallback | None = None,
) -> Retrieval:
    """Rank all documents for each query.

    Args:
        documents: text by id.
        queries: each with the id of its document.
        strategy, length, chunk: as in `document_vectors`.

    Raises:
        ValueError: for a query whose document is missing, and as `document_vectors`.
    """
    number = {name: n for n, name in enumerate(documents)}
    for query in queries:
        if query.document not in number:
            raise ValueError(
                f"the query {query.text!r} asks for the document {query.document!r}, which is not among the "
                f"{len(documents)} documents; give the files that belong together"
            )
    parts = split_progress(progress, retrieval_work(encoder, documents, queries, strategy, length, chunk))
    query_vectors = encoder.encode([query.text for query in queries], progress=parts["queries"], what="queries")
    vectors = document_vectors(encoder, list(documents.values()), strategy, length, chunk, parts["documents"])
    right = torch.tensor([number[query.document] for query in queries])
    return Retrieval(rank_documents(query_vectors, vectors, right))
