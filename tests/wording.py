"""A tokenizer of a few words, texts of them, and a classifier, for tests that begin with text."""

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer, PreTrainedModel


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


def save_with_tokenizer(model: PreTrainedModel, folder: Path) -> BertTokenizer:
    """Save a model and a tokenizer of these words, which is returned."""
    model.save_pretrained(folder)
    words = tokenizer(folder)
    words.save_pretrained(folder)
    return words


def classifier(folder: Path) -> str:
    """Save a random BERT with one label, whose outputs differ from text to text, and its tokenizer; the path."""
    sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = BertConfig(**sizes, initializer_range=0.3, num_labels=1)
    save_with_tokenizer(BertForSequenceClassification(config), folder)
    return str(folder)
