"""Settings that are declared once: a dataclass field that also says what it accepts and how it is explained.

Checks, error messages and `METHODS[name].options` follow from the field.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from .schemes.scheme import Option


OPTION = "option"


def setting(default: Any, help: str, accepts: Callable[[Any], bool], optional: bool = False) -> Any:
    """A field of a dataclass of settings.

    Args:
        default: its value when not given.
        help: one line that says what is accepted.
        accepts: whether a value is acceptable.
        optional: also accept None.
    """

    def accepted(value: Any) -> bool:
        return (optional and value is None) or accepts(value)

    return dataclasses.field(default=default, metadata={OPTION: Option(default, help, accepted)})


def options_of(kind: type[Any]) -> dict[str, Option]:
    """The settings of a dataclass by name, without the fields that are declared in another way."""
    return {field.name: field.metadata[OPTION] for field in dataclasses.fields(kind) if OPTION in field.metadata}
