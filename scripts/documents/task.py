"""Training and development documents: records of a label and a text, as token ids."""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_relpos.data.records import read_records
from hf_relpos.data.windows import special_tokens
from hf_relpos.evaluation.loading import load_tokenizer

from .strategies import Strategy


LONG_DOCUMENT = 512  # tokens above which a document counts as long


@dataclass
class Documents:
    """Token ids of each document, without special tokens, and the index of its label."""

    ids: list[list[int]]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.ids)


def read_documents(path: Path, columns: Sequence[str]) -> list[tuple[int, str, str]]:
    """(number from 1 on, label, text) of every record.

    Raises:
        ValueError: for a file without records or with one that has no label or no text.
    """
    documents = []
    for number, record in enumerate(read_records(path, columns), 1):
        label, text = (record[column] for column in columns)
        if label is None or not str(label).strip():
            raise ValueError(f"{path}: document {number} has no {columns[0]!r}; label it, or leave it out")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{path}: document {number} is empty: {columns[1]!r} = {text!r}; leave it out")
        documents.append((number, str(label), text))
    return documents


def tokenize(path: Path, records: Sequence[tuple[int, str, str]], names: Sequence[str], tokenizer: Any) -> Documents:
    """
    Raises:
        ValueError: for a label that is none of `names`, and a text of which the tokenizer leaves nothing.
    """
    index = {name: n for n, name in enumerate(names)}
    for number, label, _ in records:
        if label not in index:
            known = ", ".join(names[:8])
            raise ValueError(f"{path}: document {number} has the label {label!r}; the training documents have {known}")
    ids = tokenizer([text for *_, text in records], add_special_tokens=False, verbose=False)["input_ids"]
    for (number, *_), row in zip(records, ids, strict=True):
        if not row:
            raise ValueError(f"{path}: document {number} is empty: the tokenizer finds no token in it; leave it out")
    return Documents(ids, [index[label] for _, label, _ in records])


class DocumentTask:
    """Both sets of documents, the names of their labels, and the tokenizer.

    Raises:
        ValueError: for files that cannot be read, hold empty documents, or too few.
    """

    def __init__(self, args: argparse.Namespace):
        self.tokenizer = load_tokenizer(args.source)
        self.special = special_tokens(self.tokenizer)
        columns = args.columns.split(",")
        if len(columns) != 2 or not all(columns):
            raise ValueError(f"--columns {args.columns}: name the label and the text, with a comma between them")
        records = read_documents(args.train, columns)
        random.Random(0).shuffle(records)  # files are often sorted by label
        held_out = args.held_out or 0
        count = args.train_documents or len(records) - held_out
        if count < 1 or count + held_out > len(records):
            raise ValueError(
                f"--train-documents {count} and --held-out {held_out}: {args.train} has {len(records)} documents; ask "
                "for fewer"
            )
        if args.held_out:
            path, dev = args.train, records[len(records) - held_out :]
        else:
            path, dev = args.dev, read_documents(args.dev, columns)[: args.dev_documents]
        train = records[:count]
        self.names = sorted({label for _, label, _ in train})
        if len(self.names) < 2:
            raise ValueError(
                f"{args.train}: all {len(train)} training documents have the label {self.names[0]!r}; give some with "
                "another"
            )
        self.train = tokenize(args.train, train, self.names, self.tokenizer)
        self.dev = tokenize(path, dev, self.names, self.tokenizer)

    def pieces(self, strategy: Strategy, ids: Sequence[int]) -> list[list[int]]:
        """The pieces in which a strategy reads a document, with special tokens."""
        return strategy.pieces(ids, *self.special)

    def is_long(self) -> np.ndarray:
        """(development documents,): which have more than LONG_DOCUMENT tokens, special ones included."""
        special = sum(map(len, self.special))
        return np.array([len(ids) + special > LONG_DOCUMENT for ids in self.dev.ids])
