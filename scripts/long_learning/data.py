"""Articles, and questions that a passage of them answers, from files like SQuAD's."""

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_relpos.data.records import iterate_lines


# Where a sentence ends: after its point and quotes, before a capital letter, a digit or an opening quote.
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")
UNITS = ("sentence", "paragraph")


@dataclass(frozen=True)
class Question:
    """A question, and the number of the passage that answers it."""

    text: str
    passage: int


@dataclass(frozen=True)
class Article:
    """The beginning of an article as passages, and the questions that are answered there.

    Attributes:
        title: a text.
        passages: token ids of each, without special tokens.
        named: for each passage whether it has a word of the title.
        questions: of these passages.
    """

    title: str
    passages: list[list[int]]
    named: list[bool]
    questions: list[Question]


def read_articles(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, length: int, unit: str) -> list[Article]:
    """The articles of all files, each up to the last whole paragraph in its first `length` tokens.

    Args:
        unit: a passage is a `sentence` or a `paragraph`; the one in which the first answer begins answers a question.

    Raises:
        ValueError: for a file of another kind; articles without questions are left out.
    """
    articles = []
    for path in paths:
        text = "\n".join(iterate_lines(path))
        try:
            articles += [_article(record, tokenizer, length, unit) for record in json.loads(text)["data"]]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{path}: not SQuAD's JSON ({type(error).__name__}: {error}); give that") from error
    return [article for article in articles if article.questions]


def sentence_starts(text: str) -> list[int]:
    """The characters at which the sentences of a text begin."""
    return [0, *(match.end() for match in SENTENCE_END.finditer(text))]


def _article(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, length: int, unit: str) -> Article:
    """One article of a file."""
    title = record["title"].replace("_", " ")
    words = re.findall(r"\w{4,}", title.lower()) or [title.lower()]
    article = Article(title, [], [], [])
    room = length - 2  # [CLS] and [SEP]
    for paragraph in record["paragraphs"]:
        context, first = paragraph["context"], len(article.passages)
        starts = sentence_starts(context) if unit == "sentence" else [0]
        texts = [context[start:end] for start, end in zip(starts, [*starts[1:], len(context)], strict=True)]
        rows = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        room -= sum(map(len, rows))
        if room < 0:
            break
        numbers = [first + count - 1 for count in accumulate(map(bool, rows))]  # a blank passage has none of its own
        article.passages.extend(filter(None, rows))
        article.named.extend(
            any(word in text.lower() for word in words) for text, row in zip(texts, rows, strict=True) if row
        )
        for each in paragraph["qas"]:
            if not each["answers"]:  # SQuAD 2.0 has questions that nothing answers
                continue
            begin = each["answers"][0]["answer_start"]
            article.questions.append(Question(each["question"], numbers[bisect_right(starts, begin) - 1]))
    return article


def split(articles: Sequence[Article], counts: Sequence[int]) -> list[list[Article]]:
    """So many articles for each part, drawn in one order whatever the seed of a run.

    Raises:
        ValueError: for too few articles.
    """
    if sum(counts) > len(articles):
        raise ValueError(f"{' + '.join(map(str, counts))} articles are asked for, and there are {len(articles)}")
    order = iter(np.random.default_rng(0).permutation(len(articles)).tolist())
    return [[articles[next(order)] for _ in range(count)] for count in counts]


def draw_questions(article: Article, count: int, rng: np.random.Generator) -> list[Question]:
    """So many questions of an article, or all that there are."""
    chosen = rng.permutation(len(article.questions))[:count].tolist()
    return [article.questions[number] for number in sorted(chosen)]
