"""Names of BERT's tensors in old files, in stock Transformers and here: tables that every conversion reads.

old file  <-- RULES -->  stock BERT  <-- identity, but for SCHEME and TABLE -->  relpos_bert

No conversion renames a tensor outside these tables. An export looks up which name of a file leads to which of ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar


Value = TypeVar("Value")


@dataclass(frozen=True)
class Rule:
    """Two spellings of a name. `*` stands for the part they share.

    Attributes:
        old: as in the file.
        new: one step closer to stock BERT.
    """

    old: str
    new: str

    def rename(self, name: str) -> str | None:
        """The new spelling, or None where the rule does not apply."""
        start, end = self.old.split("*")
        if len(name) <= len(start) + len(end) or not (name.startswith(start) and name.endswith(end)):
            return None
        return self.new.replace("*", name[len(start) : len(name) - len(end)])


# In this order, each at most once. They end in the names of a BERT with a head, whose encoder is called `bert`.
RULES = (
    Rule("module.*", "*"),  # torch.nn.DataParallel
    Rule("model.*", "*"),  # a wrapper's attribute
    Rule("*.gamma", "*.weight"),  # TensorFlow's normalisations
    Rule("*.beta", "*.bias"),
    Rule("embeddings.*", "bert.embeddings.*"),  # BertModel's own dump
    Rule("encoder.*", "bert.encoder.*"),
    Rule("pooler.*", "bert.pooler.*"),
)
# BertModel is the encoder itself.
BASE_RULES = (*RULES, Rule("bert.*", "*"))

# Buffers of older releases: computed, never trained.
BUFFERS = ("*embeddings.position_ids", "*embeddings.token_type_ids", "*.relative_positions_encoding.*")
# Ours, not stock BERT's: parameters of the position scheme.
SCHEME = "*.distance_embedding.*"
# Stock BERT's; ours only where `config.has_absolute_table`.
TABLE = "*embeddings.position_embeddings.weight"


@dataclass(frozen=True)
class Tie:
    """Two names of one tensor, of which files may hold either.

    Attributes:
        name: one of them.
        other: the other one.
        always: also when `config.tie_word_embeddings` is False.
    """

    name: str
    other: str
    always: bool


TIES = (
    Tie("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight", always=False),
    # one parameter in Transformers v4, whatever the configuration says; v5 unties it with the weight
    Tie("cls.predictions.decoder.bias", "cls.predictions.bias", always=True),
)


def to_stock(name: str, rules: tuple[Rule, ...]) -> str:
    """The name in stock BERT."""
    for rule in rules:
        name = rule.rename(name) or name
    return name


def is_buffer(name: str) -> bool:
    """Whether it is a buffer of an older release."""
    return any(fnmatchcase(name, pattern) for pattern in BUFFERS)


def is_scheme(name: str) -> bool:
    """Whether it is a parameter of a position scheme."""
    return fnmatchcase(name, SCHEME)


def is_table(name: str) -> bool:
    """Whether it is the table of absolute positions."""
    return fnmatchcase(name, TABLE)


def inverse(weights: Mapping[str, Value]) -> dict[str, Value]:
    """Weights of a relpos_bert model under the names of stock BERT: all but the parameters of the scheme.

    Args:
        weights: as `state_dict()` of one of our models gives them.
    """
    return {name: value for name, value in weights.items() if not is_scheme(name)}
