"""Backward passes that have no derivative themselves say so, where PyTorch's `once_differentiable` may be silent.

With it, `torch.autograd.grad(…, create_graph=True)` returns gradients that are constants or are cut off from inputs,
and second derivatives lack a part of their terms without an error.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward of a `torch.autograd.Function` raise under `create_graph=True`.

    Raises:
        NotImplementedError: in the backward pass, if a second derivative may follow.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # in a backward pass only with create_graph
            raise NotImplementedError(
                "create_graph=True: the attention backends for large calls have no second derivative. "
                'Use attn_implementation="eager", or restore_attention(model) for a live model'
            )
        return backward(ctx, *gradients)

    return checked
