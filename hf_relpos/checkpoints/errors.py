"""Errors and warnings of checkpoints and of their conversion."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class ConversionError(ValueError):
    """Raised for a checkpoint that cannot be converted, or a folder that cannot be written; names the remedy."""


class UnsupportedError(ConversionError):
    """Raised for a checkpoint that may be sound, and that has no counterpart here."""


class PoorConversionWarning(UserWarning):
    """Warns that a written result is far from its source by its own check, or was not checked."""


def abbreviate(names: Iterable[str], limit: int = 4) -> str:
    """The first names, one for all layers, and the number of further names."""
    names = list(names)
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(re.sub(r"\.\d+\.", ".*.", name), name)
    shown = list(first.values())[:limit]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def check_shape(name: str, shape: Iterable[int], expected: Iterable[int]) -> None:
    """
    Raises:
        ConversionError: for a tensor whose shape is not that of its configuration.
    """
    if (found := tuple(shape)) != (wanted := tuple(expected)):
        both = f"{name} has shape {found}, and config.json makes it {wanted}"
        raise ConversionError(f"{both}; correct config.json or take the weights that belong to it")


@contextmanager
def conversion_errors(prefix: str = "", kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Raise errors of a block as a ConversionError, with a prefix; a ConversionError as it is."""
    try:
        yield
    except ConversionError:
        raise
    except kinds as error:
        raise ConversionError(f"{prefix}{error}") from error
