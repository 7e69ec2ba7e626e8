"""Errors by what callers rely on: the type, and the names in the message. Its prose may change."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], *names: object
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """As `pytest.raises`, for a message that names all of these: fields, values, schemes, files.

    Args:
        kind: of the error.
        names: as the message has them.
    """
    with pytest.raises(kind) as raised:
        yield raised
    message = str(raised.value)
    missing = [name for name in map(str, names) if name not in message]
    assert not missing, f"{missing} are not in: {message}"
