"""The error of a conversion, and how its messages list names."""

from collections.abc import Iterable


class ConversionError(ValueError):
    """A checkpoint that cannot be converted, or a folder that cannot be written; says what to do about it."""


class PoorConversionWarning(UserWarning):
    """A result that was written, and is far from its source by its own check or was not checked; says how far."""


def abbreviate(names: Iterable[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
