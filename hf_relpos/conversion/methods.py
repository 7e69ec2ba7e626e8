"""The methods of conversion. A method is a function, a dataclass of options and an entry of `METHODS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..families.errors import ConversionError
from ..schemes.registry import PLAIN_SCHEME, SCHEMES
from ..schemes.scheme import Option, Scheme
from ..settings import options_of
from . import absolute_tables
from .exact import exact
from .learn import learn
from .options import (
    DistilOptions,
    NoOptions,
    OwnBiasOptions,
    RelativeOptions,
)
from .run import Apply


@dataclass(frozen=True)
class Method:
    """A method of conversion: how the positions are treated.

    Attributes:
        help: one line for the command line.
        apply: function that changes the result in place, given a model with the tensors of the source and zeros in the
            scheme's parameters; returns the names of changed tensors, with a note on each.
        unsupported_reason: function that tells why the result cannot have a scheme; empty if it can.
        keeps_table: whether the result has the absolute position embeddings of the source.
        exact: whether the result has the outputs of the source, which is verified.
        from_absolute: whether it supports sources with absolute positions.
        from_relative: whether it supports sources with relative positions.
        learns: whether it learns from text.
        options_type: dataclass of its options.
        default_scheme: scheme of the result unless the caller names one; None for `DEFAULT_SCHEME`.
    """

    help: str
    apply: Apply
    unsupported_reason: Callable[[type[Scheme]], str]
    keeps_table: bool = False
    exact: bool = False
    from_absolute: bool = True
    from_relative: bool = False
    learns: bool = False
    options_type: type[Any] = NoOptions
    default_scheme: str | None = None

    @property
    def options(self) -> dict[str, Option]:
        """Options of the method by name."""
        return options_of(self.options_type)


def needs_tokens_only(scheme: type[Scheme]) -> str:
    """Reject a scheme that needs other inputs than text."""
    if scheme.required_inputs:
        return f"this scheme needs inputs that the source does not have ({', '.join(scheme.required_inputs)})"
    return ""


def starts_neutral(scheme: type[Scheme]) -> str:
    """Reject a scheme whose parameters at zero have an effect, and one that needs other inputs than text."""
    if scheme.zero_is_neutral or scheme.required_inputs:
        return needs_tokens_only(scheme)
    return "this scheme cannot start without an effect, so the outputs would change at random"


def starts_neutral_without_table(scheme: type[Scheme]) -> str:
    """Also reject a scheme with absolute position embeddings."""
    if scheme.learned_input_table:
        return "this scheme has absolute positions at the input, which the method removes"
    return starts_neutral(scheme)


METHODS: dict[str, Method] = {
    "keep": Method(
        "keep absolute positions; relative terms start at zero. The same outputs, to be trained further",
        keeps_table=True,
        exact=True,
        apply=absolute_tables.keep,
        unsupported_reason=starts_neutral,
    ),
    "drop": Method(
        "replace absolute positions by their mean vector; relative terms start at zero. Needs training",
        apply=absolute_tables.drop,
        unsupported_reason=starts_neutral_without_table,
        options_type=OwnBiasOptions,
    ),
    "distil": Method(
        "add absolute positions to the embeddings, then train relative terms, which start at zero, and all weights to "
        "compute what the source computes. Close to the source's outputs",
        apply=learn,
        unsupported_reason=starts_neutral_without_table,
        default_scheme=PLAIN_SCHEME,
        from_relative=True,
        learns=True,
        options_type=DistilOptions,
    ),
    "exact": Method(
        "for a checkpoint that is relative already (ours; NEZHA; BERT, RoBERTa, … with relative_key): rename "
        "its weights, or put its tables into a scheme that holds them. The same outputs",
        exact=True,
        apply=exact,
        unsupported_reason=needs_tokens_only,
        from_absolute=False,
        from_relative=True,
        options_type=RelativeOptions,
    ),
}


def check_scheme(scheme: type[Scheme], method: Method) -> None:
    """Check that the method supports a scheme.

    Raises:
        ConversionError: otherwise; names the schemes that it supports.
    """
    reason = method.unsupported_reason(scheme)
    if reason:
        supported = [name for name, candidate in SCHEMES.items() if not method.unsupported_reason(candidate)]
        remedy = ""
        if method is not METHODS["distil"] and not METHODS["distil"].unsupported_reason(scheme):
            remedy = "; method='distil' learns it from text"
        raise ConversionError(
            f"position_embedding_type = {scheme.name!r}: {reason}; "
            f"this method supports: {', '.join(supported)}{remedy}"
        )
