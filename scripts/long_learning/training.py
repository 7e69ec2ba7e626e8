"""Contrastive training against the documents and passages of all training articles, and retrieval of held-out ones."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench_long_retrieval import rank
from torch.nn.functional import cross_entropy, normalize
from transformers import get_linear_schedule_with_warmup

from hf_relpos.evaluation import rank_documents

from .data import Article, draw_questions
from .readers import Halves, Layout


SCALE = 20.0  # of cosines in the loss, as in sentence-transformers


@dataclass(frozen=True)
class Readable:
    """An article with its rows, and their states after the lower half (T, D)."""

    article: Article
    layout: Layout
    below: torch.Tensor


class Bank:
    """The vectors of all training articles and their passages, as they were when each was last read.

    Each question is compared with all of them, while gradients go through those of the batch: the cross-batch memory
    of Wang et al. 2020, arXiv 1912.06798. A batch of a few long documents then has as many negatives as a large one.
    """

    @torch.no_grad()
    def __init__(self, halves: Halves, articles: Sequence[Readable]):
        counts = [len(each.article.passages) for each in articles]
        self.starts = np.cumsum([0, *counts]).tolist()
        read = [halves.article(each.layout, each.below) for each in articles]
        self.documents = normalize(torch.stack([each.document for each in read]), dim=-1)
        self.passages = normalize(torch.cat([each.passages for each in read]), dim=-1)

    def loss(
        self,
        questions: torch.Tensor,
        documents: torch.Tensor,
        passages: torch.Tensor,
        numbers: Sequence[int],
        right: Sequence[tuple[int, int]],
    ) -> torch.Tensor:
        """Mean cross-entropy of documents plus that of passages; the bank keeps the new vectors.

        Args:
            questions: (Q, D).
            documents: (B, D), of the articles of the batch.
            passages: (P, D), of all of their passages.
            numbers: (B,), of the articles.
            right: (Q,), number of article and of its passage.
        """
        places = torch.cat([torch.arange(self.starts[n], self.starts[n + 1]) for n in numbers])
        all_documents = self.documents.index_copy(0, torch.tensor(numbers), normalize(documents, dim=-1))
        all_passages = self.passages.index_copy(0, places, normalize(passages, dim=-1))
        self.documents, self.passages = all_documents.detach(), all_passages.detach()
        scaled = SCALE * normalize(questions, dim=-1)
        found = cross_entropy(scaled @ all_documents.T, torch.tensor([number for number, _ in right]))
        targets = torch.tensor([self.starts[number] + passage for number, passage in right])
        return found + cross_entropy(scaled @ all_passages.T, targets)


def train(
    halves: Halves, articles: Sequence[Readable], rate: float, epochs: int, batch: int, asked: int, seed: int
) -> dict[str, Any]:
    """Train the upper half.

    Args:
        rate: highest learning rate of AdamW, after a tenth of the steps; then it falls to 0.
        batch: articles of a step.
        asked: questions about each of them, drawn anew in each epoch.

    Returns:
        Losses of the epochs, and CPU seconds.
    """
    start, rng = time.process_time(), np.random.default_rng(seed)
    bank = Bank(halves, articles)
    steps = epochs * -(-len(articles) // batch)
    optimizer = torch.optim.AdamW(halves.upper.encoder.parameters(), lr=rate, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    losses: list[list[float]] = []
    for _ in range(epochs):
        order = rng.permutation(len(articles)).tolist()
        losses.append([])
        for begin in range(0, len(order), batch):
            numbers = order[begin : begin + batch]
            drawn = [draw_questions(articles[number].article, asked, rng) for number in numbers]
            right = [(n, each.passage) for n, asked_here in zip(numbers, drawn, strict=True) for each in asked_here]
            read = [halves.article(articles[number].layout, articles[number].below) for number in numbers]
            loss = bank.loss(
                halves.texts([each.text for asked_here in drawn for each in asked_here]),
                torch.stack([each.document for each in read]),
                torch.cat([each.passages for each in read]),
                numbers,
                right,
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(halves.upper.encoder.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    means = [round(float(np.mean(each)), 4) for each in losses]
    return {"losses": means, "steps": steps, "training_seconds": round(time.process_time() - start, 1)}


@torch.no_grad()
def retrieve(halves: Halves, articles: Sequence[Readable], asked: int) -> dict[str, Any]:
    """Ranks of what answers each question, among these articles, and CPU seconds of an article's upper half.

    Args:
        asked: questions about an article at most.

    Returns:
        `ranks`, of the right article by the mean of its tokens (`document`), by the best of its rows (`piece`) and by
        the best of its passages (`best`), and of the right `passage`; and `seconds_an_article`.
    """
    rng, start = np.random.default_rng(0), time.process_time()
    read = [halves.article(each.layout, each.below) for each in articles]
    seconds = (time.process_time() - start) / len(articles)
    drawn = [draw_questions(each.article, asked, rng) for each in articles]
    owner = [number for number, questions in enumerate(drawn) for _ in questions]
    starts = np.cumsum([0, *(len(each.article.passages) for each in articles)]).tolist()
    answers = [each.passage for questions in drawn for each in questions]
    vectors = halves.texts([each.text for questions in drawn for each in questions])
    passages = torch.tensor([starts[number] + passage for number, passage in zip(owner, answers, strict=True)])
    ranks = {
        "document": rank_documents(vectors, torch.stack([each.document for each in read]), torch.tensor(owner)),
        "piece": rank(vectors, [each.rows for each in read], owner),
        "best": rank(vectors, [each.passages for each in read], owner),
        "passage": rank_documents(vectors, torch.cat([each.passages for each in read]), passages),
    }
    return {"ranks": {name: each.tolist() for name, each in ranks.items()}, "seconds_an_article": round(seconds, 4)}


def about_questions(articles: Sequence[Article], asked: int) -> dict[str, Any]:
    """Of each question of `retrieve` the number of its article, and whether its passage has a word of the title."""
    rng = np.random.default_rng(0)
    drawn = [draw_questions(article, asked, rng) for article in articles]
    return {
        "article": [number for number, questions in enumerate(drawn) for _ in questions],
        "named": [
            int(article.named[each.passage])
            for article, questions in zip(articles, drawn, strict=True)
            for each in questions
        ],
        "passages": sum(len(article.passages) for article in articles),
    }
