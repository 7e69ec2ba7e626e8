"""Presets: one choice that sets scheme, method and their options."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..schemes.registry import GENERAL_SCHEME, PLAIN_SCHEME


@dataclass(frozen=True)
class Quality:
    """A preset: defaults of `convert` for scheme, method and options.

    Attributes:
        help: one line for reports.
        method: key of `METHODS`.
        scheme: scheme of the result.
        scheme_options: options of that scheme.
        method_options: options of that method.
    """

    help: str
    method: str
    scheme: str
    scheme_options: Mapping[str, Any] = field(default_factory=dict)
    method_options: Mapping[str, Any] = field(default_factory=dict)

    def complete_scheme(self, scheme: Any, options: Any) -> tuple[Any, Any]:
        """The given scheme and options, completed by the preset; another scheme has its own defaults."""
        if scheme in (None, self.scheme):
            return self.scheme, _completed(options, self.scheme_options)
        return scheme, options

    def complete_options(self, known: Iterable[str], options: Any) -> Any:
        """The given options of a method, completed by those of the preset that the method has."""
        return _completed(options, {key: value for key, value in self.method_options.items() if key in known})


def _completed(given: Any, own: Mapping[str, Any]) -> Any:
    """The given options, completed by the preset's. A value that is not a mapping is rejected later."""
    return {**own, **(given or {})} if given is None or isinstance(given, Mapping) else given


DEFAULT_QUALITY = "default"
# Agreement and time of each: docs/results/benchmarks/conversion.md.
QUALITIES = {
    "fast": Quality(
        "quickest to make, a little less close to the source",
        method="distil",
        scheme=PLAIN_SCHEME,
        method_options={"steps": 150},
    ),
    DEFAULT_QUALITY: Quality(
        "close to the source, and little slower than it",
        method="distil",
        scheme=PLAIN_SCHEME,
        method_options={"steps": 400},
    ),
    "faithful": Quality(
        "closest to the source; slower to make, and to run",
        method="distil",
        scheme=GENERAL_SCHEME,
        method_options={"steps": 1000},
    ),
}
