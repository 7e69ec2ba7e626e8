"""Rows of an embedding, with an error that names the input and its range."""

from collections.abc import Callable

import torch

from ..attention.tracing import is_traced


def look_up(
    embedding: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, name: str, field: str, size: int
) -> torch.Tensor:
    """The rows of an embedding.

    Args:
        embedding: a module, or the function of one.
        ids: row numbers, of any shape.
        name: of the argument that `ids` is.
        field: of the configuration, that sets the number of rows, `size`.

    Raises:
        IndexError: for numbers without a row, on the CPU; other devices have errors of their own, later.
    """
    if is_traced():
        return embedding(ids)
    try:
        return embedding(ids)
    except IndexError as error:
        low, high = (int(number) for number in ids.aminmax())
        raise IndexError(
            f"{name} has numbers from {low} to {high}; {field} = {size}: give numbers from 0 to {size - 1}"
        ) from error
