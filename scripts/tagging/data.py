"""Sentences as rows of tokens: tokenizers of single words, word shapes as token types, tags at first tokens."""

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from experiments.arguments import digest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import DataCollatorForTokenClassification, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_relpos.data.conll import Sentence, read_conll, tag_names
from hf_relpos.data.masking import IGNORE_INDEX
from hf_relpos.evaluation.loading import load_model, load_tokenizer
from hf_relpos.files import write_text


SPECIAL = ["[PAD]", "[UNK]"]
SHAPES = ("other", "lower", "capitalised", "upper", "mixed", "number", "letters and digits", "caseless")


def shape_of(word: str) -> int:
    """The shape of a word, as an index into SHAPES."""
    letters = [character for character in word if character.isalpha()]
    digits = any(character.isdigit() for character in word)
    cased = [character for character in letters if character.lower() != character.upper()]
    if not letters:
        name = "number" if digits else "other"
    elif digits:
        name = "letters and digits"
    elif not cased:
        name = "caseless"
    elif all(character.islower() for character in cased):
        name = "lower"
    elif cased[0].isupper() and all(character.islower() for character in cased[1:]):
        name = "capitalised"
    else:
        name = "upper" if all(character.isupper() for character in cased) else "mixed"
    return SHAPES.index(name)


def train_tokenizer(words: Sequence[str], unit: str, size: int) -> Tokenizer:
    """A tokenizer for single words.

    Args:
        words: of the training file, each as often as it occurs.
        unit: `wordpiece`, `word` or `character`.
        size: maximum size of the vocabulary; words or characters that occur once are left out, to train [UNK].
    """
    if unit == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL[1]))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, handle_chinese_chars=False)
        trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
        tokenizer.train_from_iterator(words, trainer)
    else:
        counts = Counter(words if unit == "word" else (character for word in words for character in word))
        frequent = [item for item, count in counts.most_common(size - len(SPECIAL)) if count > 1]
        vocabulary = {item: number for number, item in enumerate([*SPECIAL, *frequent])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[1]))
        if unit == "character":
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return tokenizer


class TaggedSentences(torch.utils.data.Dataset):
    """Sentences as rows of tokens, without special tokens.

    The tag of a word is the label of its first token; its other tokens are ignored. A sentence of more than `length`
    tokens is split between words.

    Attributes:
        rows: examples for the Trainer, longest first.
        first_tokens: for each row the (sentence, word, token) indices of first tokens.
    """

    def __init__(
        self,
        sentences: Sequence[Sentence],
        tokenizer: PreTrainedTokenizerBase,
        names: Sequence[str],
        length: int,
        pieces: int,
    ):
        """
        Args:
            names: of the tags, by label.
            length: maximum number of tokens in a row.
            pieces: maximum number of tokens in a word: its first ones, and its last.
        """
        labels = {name: label for label, name in enumerate(names)}
        tokenized: dict[str, list[int]] = {}
        rows: list[tuple[dict[str, list[int]], list[tuple[int, int, int]]]] = []
        for sentence, (words, tags) in enumerate(sentences):
            row, first_tokens = None, None
            for word, (text, tag) in enumerate(zip(words, tags, strict=True)):
                if text not in tokenized:
                    # tokenizers drop some characters, and words of nothing else
                    ids = tokenizer(text, add_special_tokens=False)["input_ids"] or [tokenizer.unk_token_id]
                    tokenized[text] = ids if len(ids) <= pieces else [*ids[: pieces - 1], *ids[-1:]][:pieces]
                ids = tokenized[text]
                if row is None or len(row["input_ids"]) + len(ids) > length:
                    row, first_tokens = {"input_ids": [], "token_type_ids": [], "labels": []}, []
                    rows.append((row, first_tokens))
                first_tokens.append((sentence, word, len(row["input_ids"])))
                row["input_ids"] += ids
                row["token_type_ids"] += [shape_of(text)] * len(ids)
                row["labels"] += [labels[tag], *[IGNORE_INDEX] * (len(ids) - 1)]
        rows.sort(key=lambda pair: -len(pair[0]["input_ids"]))
        self.rows = [row for row, _ in rows]
        self.first_tokens = [first_tokens for _, first_tokens in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.rows[index]

    def tags(
        self, predicted: Sequence[Sequence[int]], names: Sequence[str], sentences: Sequence[Sentence]
    ) -> list[list[str]]:
        """The tags of each sentence, from the predicted label of every token in every row."""
        tags = [["O"] * len(words) for words, _ in sentences]
        for labels, first_tokens in zip(predicted, self.first_tokens, strict=True):
            for sentence, word, token in first_tokens:
                tags[sentence][word] = names[labels[token]]
        return tags


class UnknownTokenCollator(DataCollatorForTokenClassification):
    """Pads, and replaces tokens by [UNK] with probability `unknown`."""

    unknown = 0.0

    def torch_call(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().torch_call(features)
        if self.unknown:
            replaced = torch.rand(batch["input_ids"].shape) < self.unknown
            batch["input_ids"][replaced & batch["attention_mask"].bool()] = self.tokenizer.unk_token_id
        return batch


class TaggingTask:
    """Training and development sentences, the tags, and the tokenizer.

    Attributes:
        sentences: of the training and of the development file.
        names: of the tags, by label.
        vectors: word vectors of `--tokenizer`, scaled to the standard deviation `--init`; None without `--vectors`.

    Raises:
        ValueError: for files that cannot be read or hold no entities, and a development file with types of entities
            that the training file does not have.
    """

    def __init__(self, args: argparse.Namespace):
        self.sentences = [
            read_conll(path, args.columns)[:limit]
            for path, limit in ((args.train, args.train_sentences), (args.dev, args.dev_sentences))
        ]
        self.names = tag_names(self.sentences[0])
        for path, sentences in zip((args.train, args.dev), self.sentences, strict=True):
            names = tag_names(sentences)
            if names == ["O"]:
                raise ValueError(f"{path}: {len(sentences)} sentences and no entity; give a file with some")
            unknown = sorted(set(names) - set(self.names))
            if unknown:
                types = ", ".join(name[2:] for name in self.names[1::2])
                raise ValueError(
                    f"{path}: type {unknown[0][2:]!r} is none of {args.train}, which has {types}; rename or drop it"
                )
        self.vectors, self.tokenizer_file = None, None
        if args.tokenizer:
            self.tokenizer = load_tokenizer(args.tokenizer)
            if self.tokenizer.pad_token_id is None or self.tokenizer.unk_token_id is None:
                raise ValueError(f"--tokenizer {args.tokenizer}: lacks a padding token or an unknown token")
            if args.vectors:
                table = load_model(args.tokenizer, masked=False).get_input_embeddings().weight.detach()
                self.vectors = table * (args.init / table.std())
        else:
            words = [word for words, _ in self.sentences[0] for word in words]
            self.tokenizer_file = args.work / f"{digest(args.unit, args.vocab, words)}.json"
            if self.tokenizer_file.is_file():  # another would differ: the tokenizers library breaks ties at random
                tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
            else:
                tokenizer = train_tokenizer(words, args.unit, args.vocab)
            self.tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, pad_token=SPECIAL[0], unk_token=SPECIAL[1]
            )
        self.train, self.dev = (
            TaggedSentences(sentences, self.tokenizer, self.names, args.max_length, args.pieces)
            for sentences in self.sentences
        )

    def save_tokenizer(self) -> None:
        """Write the tokenizer to `--work`, for runs that are added later."""
        if self.tokenizer_file:
            self.tokenizer_file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.tokenizer_file, self.tokenizer.backend_tokenizer.to_str())
