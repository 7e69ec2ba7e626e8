"""The methods of a conversion, with their options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoints.errors import ConversionError
from ..schemes.registry import SCHEMES
from ..schemes.scheme import Option, Scheme, integer


TOO_FEW = 500  # tokens of text, below which nothing can be learnt


def is_share(value: Any) -> bool:
    """Whether a value is a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


# Options of `distil`.
DISTIL = {
    "steps": integer(400, "steps of the distillation"),
    "batch_tokens": integer(512, "tokens in a step of the distillation"),
    "distil_tokens": integer(None, "tokens of text to distil on", none="as many as the steps read", least=TOO_FEW),
    "length": integer(
        None,
        "number of tokens that the result has to read. Beyond the source's limit, every third of `steps` is followed "
        "by a step on a row of this length, which the source reads in overlapping windows",
        none="the source's limit",
    ),
    "window": integer(
        None,
        "attention_window of the result; the value of `length` lets all tokens attend to all",
        none="half of the source's limit if `length` is beyond it, otherwise no window",
    ),
    "pairs": Option(
        None,
        "share of the training windows that are pairs of segments with token types, for tasks such as question "
        "answering; windows beyond the source's limit are not counted; 0 to 1. None: 0.5, or 0 if the source does not "
        "distinguish two token types",
        lambda value: value is None or is_share(value),
    ),
    "mask": Option(
        0.15,
        "share of [MASK] tokens in half of the windows, for a model that predicts masked tokens; 0 to 0.5",
        lambda value: is_share(value) and value <= 0.5,
    ),
}


@dataclass(frozen=True)
class Method:
    """A method of conversion: how absolute and relative positions are treated.

    Attributes:
        help: one line for the command line.
        exact: whether the result has the outputs of the source, which is verified, and so its absolute position
            embeddings.
        from_absolute: whether it supports sources with absolute positions.
        from_relative: whether it supports sources with relative positions.
        learns: whether it learns from text.
        options: its options by name.
    """

    help: str
    exact: bool = False
    from_absolute: bool = True
    from_relative: bool = False
    learns: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)

    def unsupported_reason(self, scheme: type[Scheme]) -> str:
        """Why the result cannot have a scheme; empty if it can."""
        if scheme.required_inputs:
            return f"the scheme requires inputs that the source does not have ({', '.join(scheme.required_inputs)})"
        if not self.from_absolute:  # the tables decide
            return ""
        if scheme.learned_input_table and not self.exact:
            return "the scheme adds absolute positions to the input, which the method removes"
        if not scheme.zero_init_is_identity:
            return "the terms of the scheme cannot start at zero, so the outputs would change"
        return ""


METHODS: dict[str, Method] = {
    "keep": Method(
        "keep absolute positions; relative terms start at zero. Same outputs; for further training", exact=True
    ),
    "drop": Method("average absolute positions; relative terms start at zero. Outputs change, so training is needed"),
    "distil": Method(
        "average absolute positions into the embeddings, start relative terms at zero, and train on text to reproduce "
        "the source's hidden states and attention. Outputs close to the source's",
        from_relative=True,
        learns=True,
        options=DISTIL,
    ),
    "exact": Method(
        "for a checkpoint with relative positions (hf_relpos; NEZHA; BERT, RoBERTa, … with relative_key): rename its "
        "weights. Same outputs",
        exact=True,
        from_absolute=False,
        from_relative=True,
    ),
}


def check_scheme(scheme: type[Scheme], method: Method) -> None:
    """Check that the method supports a scheme.

    Raises:
        ConversionError: otherwise; names the schemes that it supports.
    """
    if reason := method.unsupported_reason(scheme):
        supported = [name for name, candidate in SCHEMES.items() if not method.unsupported_reason(candidate)]
        is_learnt = not method.learns and not METHODS["distil"].unsupported_reason(scheme)
        remedy = "; method = 'distil' learns it from text" if is_learnt else ""
        known = f"the method supports: {', '.join(supported)}"
        raise ConversionError(f"position_embedding_type = {scheme.name!r}: {reason}; {known}{remedy}")
