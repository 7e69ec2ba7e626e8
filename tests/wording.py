"""A tokenizer of a few words, and texts of them, for tests that begin with text."""

from pathlib import Path

from transformers import BertTokenizer


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = "the cat dog sun sky bird sat ran saw was is red blue old new big on under and a house tree road .".split()
VOCABULARY = SPECIAL + WORDS
TEXTS = ["the cat sat on the big house .", "a dog ran .", "the old bird saw the red sun and the sky was blue ."]


def tokenizer(folder: Path) -> BertTokenizer:
    """A tokenizer of these words.

    Args:
        folder: its vocabulary is written there.
    """
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
    return BertTokenizer(str(folder / "vocab.txt"))
