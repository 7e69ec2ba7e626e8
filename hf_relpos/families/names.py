"""Names of BERT's tensors in old files, in stock Transformers and here.

old file  <-- the family's names, to_stock -->  stock BERT  <-- identity, except SCHEME and TABLE -->  relpos_bert

Conversions rename tensors by these rules only. An export looks up the name in a file for each of our names.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple


# Prefixes in front of any model: torch.nn.DataParallel, and a wrapper's attribute.
WRAPPERS = ("module.", "model.")
# TensorFlow's names of normalisations.
TENSORFLOW = {"gamma": "weight", "beta": "bias"}
# Buffers of older releases, which are not trained.
BUFFERS = ("*embeddings.position_ids", "*embeddings.token_type_ids", "*.relative_positions_encoding.*")
# Parameters of the position scheme, which stock BERT does not have.
SCHEME = "*.distance_embedding.*"
# Absolute position embeddings of stock BERT; here only if `config.has_absolute_table`.
TABLE = "*embeddings.position_embeddings.weight"


class Tie(NamedTuple):
    """Two names of one tensor; files may have either.

    Attributes:
        name: the first name.
        other: the second name.
        always: also if `config.tie_word_embeddings` is False.
    """

    name: str
    other: str
    always: bool


TIES = (
    Tie("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight", always=False),
    # always one parameter in Transformers v4; v5 unties it with the weight
    Tie("cls.predictions.decoder.bias", "cls.predictions.bias", always=True),
)


def rename(name: str, parts: Mapping[str, str]) -> str:
    """Rename parts of a tensor's name, each once and in order.

    Args:
        parts: new by old parts, whole words between dots, anywhere in the name; `*` is the number of a layer.
    """
    dotted = f".{name}."
    for old, new in parts.items():
        pattern = re.escape(f".{old}.").replace(r"\*", r"(\d+)")
        dotted = re.sub(pattern, f".{new}.".replace("*", r"\1"), dotted, count=1)
    return dotted.strip(".")


def of_attention(pattern: str, *parts: str) -> dict[str, str]:
    """BERT's names of queries, keys, values and, for a fourth part, the output, by a pattern filled with the parts."""
    ours = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    return {pattern.format(part): f"*.{name}" for part, name in zip(parts, ours, strict=False)}


def to_stock(name: str, base: bool, parts: Mapping[str, str]) -> str:
    """The name in stock BERT.

    Args:
        name: a name in a file.
        base: for BertModel, which is the encoder itself; in other classes it is called `bert`.
        parts: as for `rename`: BERT's names by those of another family.
    """
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper)
    name = rename(name, {**TENSORFLOW, **parts})
    if name.startswith(("embeddings.", "encoder.", "pooler.")):  # BertModel's own dump
        name = f"bert.{name}"
    return name.removeprefix("bert.") if base else name


def is_buffer(name: str) -> bool:
    """Whether the name is that of a buffer of an older release."""
    return any(fnmatchcase(name, pattern) for pattern in BUFFERS)


def is_scheme(name: str) -> bool:
    """Whether the name is that of a parameter of a position scheme."""
    return fnmatchcase(name, SCHEME)


def is_table(name: str) -> bool:
    """Whether the name is that of the absolute position embeddings."""
    return fnmatchcase(name, TABLE)
