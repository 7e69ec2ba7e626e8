"""Names of BERT's tensors in old files, in stock Transformers and here.

old file  <-- RULES -->  stock BERT  <-- identity, except SCHEME and TABLE -->  relpos_bert

Conversions rename tensors by these rules only. An export looks up the name in a file for each of our names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar


Value = TypeVar("Value")


@dataclass(frozen=True)
class Rule:
    """A renaming rule, in which `*` is the common part of both names.

    Attributes:
        old: name in the file.
        new: name one step closer to stock BERT.
    """

    old: str
    new: str

    def rename(self, name: str) -> str | None:
        """The new name, or None if the rule does not apply."""
        start, end = self.old.split("*")
        if len(name) <= len(start) + len(end) or not (name.startswith(start) and name.endswith(end)):
            return None
        return self.new.replace("*", name[len(start) : len(name) - len(end)])


# Rules are applied in this order, each at most once. The results are names of a BERT with a head, whose encoder is
# called `bert`.
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

# Buffers of older releases, which are not trained.
BUFFERS = ("*embeddings.position_ids", "*embeddings.token_type_ids", "*.relative_positions_encoding.*")
# Parameters of the position scheme, which stock BERT does not have.
SCHEME = "*.distance_embedding.*"
# Absolute position embeddings of stock BERT; here only if `config.has_absolute_table`.
TABLE = "*embeddings.position_embeddings.weight"


@dataclass(frozen=True)
class Tie:
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


def to_stock(name: str, rules: tuple[Rule, ...]) -> str:
    """The name in stock BERT."""
    for rule in rules:
        name = rule.rename(name) or name
    return name


def from_stock(name: str, rules: Iterable[Rule]) -> str:
    """The inverse of `to_stock`, by rules in an order in which none applies to the result of an earlier one."""
    for rule in rules:
        name = Rule(rule.new, rule.old).rename(name) or name
    return name


def is_buffer(name: str) -> bool:
    """Whether the name is that of a buffer of an older release."""
    return any(fnmatchcase(name, pattern) for pattern in BUFFERS)


def is_scheme(name: str) -> bool:
    """Whether the name is that of a parameter of a position scheme."""
    return fnmatchcase(name, SCHEME)


def is_table(name: str) -> bool:
    """Whether the name is that of the absolute position embeddings."""
    return fnmatchcase(name, TABLE)


def inverse(weights: Mapping[str, Value]) -> dict[str, Value]:
    """Weights of a relpos_bert model, except the parameters of the scheme, by names of stock BERT.

    Args:
        weights: `state_dict()` of one of our models.
    """
    return {name: value for name, value in weights.items() if not is_scheme(name)}
