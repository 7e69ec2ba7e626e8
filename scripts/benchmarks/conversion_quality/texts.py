"""Text files: documents of a field, fingerprints, and training text without passages of the evaluation text."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_relpos.data import read_texts
from hf_relpos.data.pairs import Pair, read_pairs


# Files in the folder --data.
DATA = {
    "train_text": ["text/novels.txt.xz", "long/wikidocs.docs.jsonl.xz", "text/acl_abstracts.jsonl.xz#abstract"],
    "eval_text": ["text/wikitext2.valid.txt", "text/peps.jsonl.xz#abstract"],
    "other_text": "text/peps.jsonl.xz#body",  # technical specifications, unlike all that is trained on
    "sts": ["sts/stsb.dev.tsv", "sts/stsb.train.tsv"],
}
PASSAGE = 12_000  # characters of text that are taken in one piece
SHARED_WORDS = 12  # words in a row that no training text shares with an evaluation text


def source_fingerprint(source: str) -> list[Any]:
    """Name, field and size of a text file, which distinguish it from another one of the same name."""
    path, _, column = source.partition("#")
    return [Path(path).name, column, Path(path).stat().st_size if Path(path).is_file() else None]


def read_source(source: str) -> Iterable[str]:
    """The documents of `FILE` or `FILE#FIELD`."""
    path, _, column = source.partition("#")
    return read_texts(path, column or "text")


def draw_pairs(path: str, count: int | None, seed: int) -> list[Pair]:
    """The pairs of a similarity set; if there are more than `count`, so many of them in the order of the file."""
    pairs = read_pairs(path)
    if count and len(pairs) > count:
        drawn = np.random.default_rng(seed).permutation(len(pairs))[:count]
        pairs = [pairs[number] for number in sorted(drawn)]
    return pairs


def word_ngrams(text: str) -> set[int]:
    """Hashes of all runs of SHARED_WORDS words."""
    words = text.lower().split()
    return {hash(tuple(words[at : at + SHARED_WORDS])) for at in range(len(words) - SHARED_WORDS + 1)}


def training_passages(
    sources: Sequence[str], held_out: Sequence[str], characters: int, seed: int
) -> tuple[list[str], int]:
    """Passages at random positions, about equally many characters of each source.

    Args:
        sources: `FILE` or `FILE#FIELD`.
        held_out: sources with which no passage shares SHARED_WORDS words in a row.
        characters: in all; fewer where the text is short.
        seed: of the positions.

    Returns:
        The passages in random order, and how many were left out because of the evaluation text.
    """
    rng = np.random.default_rng(seed)
    held_out_ngrams = set().union(*(word_ngrams(" ".join(read_source(source))) for source in held_out))
    passages, left_out = [], 0
    for source in sources:
        text = "\n\n".join(read_source(source))
        size = min(PASSAGE, max(len(text), 1))
        starts = size * rng.permutation(max(1, len(text) // size))
        for start in starts[: -(-characters // (len(sources) * size))].tolist():
            passage = text[start : start + size]
            if start:  # the rest of a word
                passage = passage.partition(" ")[2]
            passage = passage.rpartition(" ")[0] or passage
            if held_out_ngrams.isdisjoint(word_ngrams(passage)):
                passages.append(passage)
            else:
                left_out += 1
    return [passages[number] for number in rng.permutation(len(passages))], left_out
