"""Tasks: long documents, a question for each, and which document answers it.

Passkeys and needles follow Zhu et al. 2024, "LongEmbed: extending embedding models for long context retrieval", arXiv
2404.12096: documents of one length that differ in one sentence, at a random depth, which the question asks for.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_relpos.data import read_texts
from hf_relpos.evaluation import read_documents, read_records


# The filler and the sentence of Mohtashami and Jaggi 2023, arXiv 2305.16300, with a name as in LongEmbed.
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
PASSKEY = "{name}'s pass key is {key}. Remember it. {key} is the pass key for {name}. "
QUESTION = "What is the pass key for {name}?"
FIRST = "Ada Ben Clara David Emma Felix Grace Henry Iris Jacob Karen Leo Maria Noah Olga Peter Quinn Rosa Simon Tessa"
LAST = "Adams Baker Carter Dixon Evans Fisher Graham Hughes Irving Jensen Keller Lopez Morgan Nolan Owens Price Reed"


@dataclass(frozen=True)
class Documents:
    """Documents and the questions that they answer.

    Attributes:
        rows: tokens of each, `[CLS] … [SEP]`.
        questions: texts.
        right: for each question the index of its document.
        depths: for each question where its answer is in the document, 0 to 1.
    """

    rows: list[list[int]]
    questions: list[str]
    right: list[int]
    depths: list[float]


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def _row(tokenizer: PreTrainedTokenizerBase, before: list[int], inner: list[int], after: list[int]) -> list[int]:
    return [tokenizer.cls_token_id, *before, *inner, *after, tokenizer.sep_token_id]


def passkeys(tokenizer: PreTrainedTokenizerBase, length: int, count: int, seed: int) -> Documents:
    """A pass key of another person in each document of the same filler."""
    rng = np.random.default_rng(seed)
    people = [f"{first} {last}" for first in FIRST.split() for last in LAST.split()]
    filler = _tokens(tokenizer, FILLER * (length // 20 + 1))
    rows, questions, depths = [], [], rng.random(count)
    for name, key, depth in zip(
        rng.choice(people, count, replace=False), rng.integers(10_000, 99_999, count), depths, strict=True
    ):
        needle = _tokens(tokenizer, PASSKEY.format(name=name, key=key))
        room = length - 2 - len(needle)
        split = round(depth * room)
        rows.append(_row(tokenizer, filler[:split], needle, filler[split:room]))
        questions.append(QUESTION.format(name=name))
    return Documents(rows, questions, list(range(count)), depths.tolist())


def needles(
    tokenizer: PreTrainedTokenizerBase, length: int, count: int, seed: int, haystack: str, articles: "Articles"
) -> Documents:
    """The sentence of an article that answers a question, in a piece of other text, each document with another one."""
    rng = np.random.default_rng(seed)
    asked: dict[str, int] = {}
    for number in rng.permutation(len(articles.questions)).tolist():
        asked.setdefault(articles.questions[number].document, number)
    room_for_all = count * (length + 100) * 8
    start = int(rng.integers(max(1, len(haystack) - room_for_all)))
    filler = _tokens(tokenizer, haystack[start : start + room_for_all])
    rows, questions, depths = [], [], rng.random(count)
    for number, depth in zip(list(asked.values())[:count], depths, strict=True):
        question = articles.questions[number]
        needle = _tokens(tokenizer, articles.sentence(question))[: length // 2]
        room = length - 2 - len(needle)
        piece, filler = filler[:room], filler[room:]
        split = round(depth * room)
        rows.append(_row(tokenizer, piece[:split], needle, piece[split:]))
        questions.append(question.text)
    return Documents(rows, questions, list(range(count)), depths.tolist())


@dataclass(frozen=True)
class Question:
    """A question, its article, and the character at which its answer begins."""

    text: str
    document: str
    evidence: int


@dataclass(frozen=True)
class Articles:
    """Articles by id, and questions about them."""

    texts: dict[str, str]
    questions: list[Question]

    @classmethod
    def read(cls, documents: Path, queries: Path) -> "Articles":
        """Files with {id, text} and {query, doc, evidence} in each line."""
        columns = ("query", "doc", "evidence")
        questions = [Question(*(record[name] for name in columns)) for record in read_records(queries, columns)]
        return cls(read_documents(documents), questions)

    def draw(self, count: int, seed: int) -> "Articles":
        """So many of them, and their questions."""
        names = sorted(self.texts)
        kept = {names[number] for number in np.random.default_rng(seed).permutation(len(names))[:count].tolist()}
        questions = [question for question in self.questions if question.document in kept]
        return Articles({name: text for name, text in self.texts.items() if name in kept}, questions)

    def sentence(self, question: Question) -> str:
        """The sentence in which the answer begins."""
        text = self.texts[question.document]
        ends = [match.end() for match in re.finditer(r"[.!?][\"')\]]*\s+|\n", text)]
        before = max((end for end in ends if end <= question.evidence), default=0)
        after = min((end for end in ends if end > question.evidence), default=len(text))
        return text[before:after].strip()

    def paragraphs(self, document: str) -> list[tuple[int, int]]:
        """Borders of the paragraphs, lines with text."""
        return [match.span() for match in re.finditer(r"[^\n]*\S[^\n]*", self.texts[document])]

    def at_length(self, tokenizer: PreTrainedTokenizerBase, length: int) -> Documents:
        """The first `length` tokens of each article, and the questions that are answered there."""
        rows, seen, index = [], {}, {}
        for name, text in self.texts.items():
            encoding = tokenizer(text, truncation=True, max_length=length, return_offsets_mapping=True, verbose=False)
            index[name] = len(rows)
            rows.append(encoding.input_ids)
            seen[name] = encoding.offset_mapping[-2][1]  # the last character read
        answered = [question for question in self.questions if question.evidence < seen[question.document]]
        return Documents(
            rows,
            [question.text for question in answered],
            [index[question.document] for question in answered],
            [question.evidence / max(1, seen[question.document]) for question in answered],
        )


def read_haystack(path: Path) -> str:
    """The text of a file."""
    return "\n".join(read_texts(str(path)))


def by_depth(depths: Sequence[float], hits: Sequence[bool], parts: int = 4) -> list[float | None]:
    """The share of hits in each part of the documents, None where no answer lies there."""
    shares: list[float | None] = []
    for part in range(parts):
        inside = [hit for depth, hit in zip(depths, hits, strict=True) if part / parts <= depth < (part + 1) / parts]
        shares.append(round(float(np.mean(inside)), 4) if inside else None)
    return shares
