"""The options of the conversion methods. Each is a field with its type, default, explanation and check."""

from dataclasses import dataclass
from typing import Any

from ..schemes.scheme import is_count
from ..settings import setting, setting_of


def is_share(value: Any) -> bool:
    """Whether a value is a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


@dataclass(frozen=True)
class NoOptions:
    """Options of a method without options."""


@dataclass(frozen=True)
class OwnBiasOptions:
    """Options of `drop`."""

    own_bias: str = setting_of(("keep", "drop"), "what to do with the source's own relative bias, which MPNet has")


@dataclass(frozen=True)
class RelativeOptions:
    """Options of `exact`."""

    max_position_embeddings: int | None = setting(
        None,
        "max_position_embeddings of the result, which is the size of the tables of relative_key; a positive integer, "
        "or None for the source's",
        is_count,
        optional=True,
    )


@dataclass(frozen=True)
class DistilOptions(OwnBiasOptions):
    """Options of `distil`."""

    steps: int = setting(400, "steps of the distillation; a positive integer", is_count)
    batch_tokens: int = setting(512, "tokens in a step of the distillation; a positive integer", is_count)
    distil_tokens: int | None = setting(
        None,
        "tokens of text to distil on; a positive integer, or None for as many as the steps read",
        is_count,
        optional=True,
    )
    length: int | None = setting(
        None,
        "tokens of the longest rows to learn from. Where the source does not read as many, another step on such rows, "
        "which it reads in overlapping windows, follows every second of `steps`. A positive integer, or None for the "
        "source's length",
        is_count,
        optional=True,
    )
    window: int | None = setting(
        None,
        "attention_window of the result; a positive integer, or None for attention to all tokens",
        is_count,
        optional=True,
    )
    pairs: float | None = setting(
        None,
        "share of the windows that are trained on as pairs of segments with their token types, for tasks such as "
        "question answering; only windows that the source reads at once count; 0 to 1. None: 0.5, and 0 for a source "
        "without two token types",
        is_share,
        optional=True,
    )
    mask: float = setting(
        0.15,
        "share of the tokens that are [MASK] in half of the text, for a model that predicts masked tokens; 0 to 0.5",
        lambda value: is_share(value) and value <= 0.5,
    )

    @property
    def tokens_to_distil(self) -> int:
        """Tokens of text to distil on."""
        return self.distil_tokens or self.steps * self.batch_tokens
