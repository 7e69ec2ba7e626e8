"""One choice in place of scheme, method and their options: how close a result comes, and what it costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..families.errors import ConversionError
from ..families.recognition import SourceSpec
from ..schemes.registry import GENERAL_SCHEME, PLAIN_SCHEME
from ..schemes.scheme import nearest
from .methods import METHODS


@dataclass(frozen=True)
class Quality:
    """What `convert` takes where its caller names no scheme, method or option.

    Attributes:
        help: one line, for reports.
        method: key of `METHODS`.
        scheme: of the result.
        scheme_options: of that scheme.
        method_options: of that method.
    """

    help: str
    method: str
    scheme: str
    scheme_options: Mapping[str, Any] = field(default_factory=dict)
    method_options: Mapping[str, Any] = field(default_factory=dict)

    def complete_scheme(self, scheme: Any, options: Any) -> tuple[Any, Any]:
        """Scheme and options as the caller gave them, completed; another scheme has its own defaults."""
        if scheme in (None, self.scheme):
            return self.scheme, _completed(options, self.scheme_options)
        return scheme, options

    def complete_options(self, method: str, options: Any) -> Any:
        """Options of a method as the caller gave them, completed with those that it has."""
        return _completed(
            options, {key: self.method_options[key] for key in METHODS[method].options if key in self.method_options}
        )


def _completed(given: Any, own: Mapping[str, Any]) -> Any:
    """What was given, and whatever else is our own; what is no mapping is left for others to refuse."""
    return {**own, **(given or {})} if given is None or isinstance(given, Mapping) else given


DEFAULT_QUALITY = "default"
# Closeness and time of each: docs/results/benchmarks/conversion.md. Steps pay better than more tokens to fit.
QUALITIES = {
    "fast": Quality(
        "made quickest: fitted, then trained for a few steps to the source's outputs",
        method="calibrate+distil",
        scheme=PLAIN_SCHEME,
        method_options={"tokens": 12_000, "steps": 60, "batch_tokens": 512},
    ),
    DEFAULT_QUALITY: Quality(
        "close to the source, and little slower than it: fitted, then trained briefly to its outputs",
        method="calibrate+distil",
        scheme=PLAIN_SCHEME,
        method_options={"tokens": 12_000, "steps": 120, "batch_tokens": 512},
    ),
    "faithful": Quality(
        "as close to the source as it gets; takes longer to make, and to run",
        method="calibrate+distil",
        scheme=GENERAL_SCHEME,
        method_options={"tokens": 20_000, "steps": 400, "batch_tokens": 512},
    ),
}


def choose_quality(requested: str | None, method: str | None, spec: SourceSpec, has_text: bool) -> str | None:
    """The requested quality; the default one where there is text and nothing says what to do with it; else None.

    Args:
        requested: as the caller of `convert` gave it.
        method: likewise.
        spec: of the source. One that is relative already is converted exactly unless something else is asked for.
        has_text: whether there is text to learn from.

    Raises:
        ConversionError: for an unknown one, a method that does not learn, and one that needs text without any.
    """
    if requested is None:
        return DEFAULT_QUALITY if has_text and method is None and spec.absolute else None
    if requested not in QUALITIES:
        raise ConversionError(
            f"quality = {requested!r} is unknown{nearest(requested, QUALITIES)}; known: {', '.join(QUALITIES)}"
        )
    if method is not None and METHODS[method].text == "unused":
        raise ConversionError(
            f"quality = {requested!r}: method = {method!r} learns nothing, and has no qualities; leave one of them out"
        )
    if not has_text and METHODS[method or QUALITIES[requested].method].text == "required":
        raise ConversionError(
            f"quality = {requested!r}: learns from text; give texts, some hundred sentences, or choose "
            "method = 'calibrate', which can do with random tokens"
        )
    return requested
