"""Embedding lookup with an error that names the input and its range."""

from collections.abc import Callable

import torch

from ..attention.tracing import is_traced


def look_up(
    embedding: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, name: str, field: str, size: int
) -> torch.Tensor:
    """Look up rows of an embedding.

    Args:
        embedding: a module, or its function.
        ids: row numbers, any shape.
        name: name of the argument that holds `ids`.
        field: name of the configuration field that sets the number of rows.
        size: number of rows.

    Raises:
        IndexError: on the CPU, for numbers without a row. Other devices raise their own errors, later.
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
