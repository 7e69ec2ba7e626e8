"""Keep padding in calls with labels at padding, for heads whose loss includes them."""

import itertools
from collections.abc import Iterator, Set
from contextvars import ContextVar
from typing import Any

import torch

from ..host.tracing import is_traced
from .arguments import FAMILIAR, OTHERS, parameters_of


IGNORED = -100  # the label of a position that is in no loss
NUMBERS = ("logits_to_keep",)  # of the last positions, or which ones
# Whether the call that is running keeps its padding.
_keeps_padding: ContextVar[bool] = ContextVar("_keeps_padding", default=False)


def are_read(real: torch.Tensor) -> torch.Tensor:
    """Return the positions (B, L) whose labels need states at padding: padding, and what decoders predict from it.

    Args:
        real: (B, L), True for tokens.
    """
    hidden = ~real
    return hidden | hidden.roll(1, 1).index_fill(1, torch.zeros(1, dtype=torch.long), False)


def keep_labelled_padding(head: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Forward of a head that keeps padding in calls with labels there."""
    if is_traced():
        return forward(*args, **kwargs)
    given = dict(zip(parameters_of(type(head).forward)[0], args, strict=False)) | kwargs
    mask = given.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return forward(*args, **kwargs)
    labels = [value for name, value in given.items() if name in labels_of(head) and isinstance(value, torch.Tensor)]
    read = are_read(mask != 0)
    is_read = any(bool((each[read] != IGNORED).any()) for each in labels if each.shape[:2] == mask.shape)
    before = _keeps_padding.set(is_read or _keeps_padding.get())
    try:
        return forward(*args, **kwargs)
    finally:
        _keeps_padding.reset(before)


def keeps_padding() -> bool:
    """Whether the call that is running has labels at padding."""
    return _keeps_padding.get()


def labels_of(head: Any) -> list[str]:
    """Return the arguments of a head that may be labels: those that an encoder does not have."""
    return [name for name in parameters_of(type(head).forward)[0] if name not in {*FAMILIAR, *OTHERS, *NUMBERS}]


def tried_labels(head: Any, known: Set[str], real: torch.Tensor) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    """Labels for a head, and whether they ask for states at padding; first those that do not.

    Args:
        known: names of arguments of the encoder inside.
        real: (B, L), True for tokens.
    """
    names, (rows, columns) = [name for name in labels_of(head) if name not in known], real.shape
    by_token = (torch.arange(columns) % 2).repeat(rows, 1)
    values = (None, torch.arange(rows) % 2, by_token.masked_fill(are_read(real), IGNORED), by_token)
    if len(names) <= 2:
        choices = list(itertools.product(range(4), repeat=len(names)))
    else:  # each alone, and all
        chosen = [*([name] for name in names), names]
        choices = [tuple(kind * (name in each) for name in names) for each in chosen for kind in (1, 2, 3)]
    for choice in sorted(choices, key=lambda choice: 3 in choice):
        given = {name: each for name, kind in zip(names, choice, strict=True) if (each := values[kind]) is not None}
        if given:
            yield given, 3 in choice
