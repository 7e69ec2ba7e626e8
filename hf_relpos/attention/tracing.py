"""Whether a graph is being recorded, whether the contents of tensors may be looked at, and second derivatives."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..host.torch import has_transforms


def is_traced() -> bool:
    """Whether `torch.compile`, `torch.export` or `torch.jit.trace` records a graph. It must not depend on data."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_transformed() -> bool:
    """Whether derivatives are computed in forward mode, or a transform of `torch.func` is active.

    Results must then not be cached, and functions with a backward pass of their own do not apply.
    """
    return has_transforms(is_traced())


def may_read(device: torch.device) -> bool:
    """Whether the contents of tensors on that device may decide what is computed.

    On an accelerator the CPU would have to wait for the device. A graph would hold for these contents only.
    """
    return device.type == "cpu" and not is_traced()


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward of a `torch.autograd.Function` raise under `create_graph=True`.

    PyTorch's `once_differentiable` may be silent: `torch.autograd.grad(…, create_graph=True)` then returns gradients
    that are constants or are cut off from inputs, and second derivatives lack a part of their terms.

    Raises:
        NotImplementedError: in the backward pass, if a second derivative may follow.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # in a backward pass only with create_graph
            raise NotImplementedError(
                "create_graph=True: the attention backends for large calls, and the attention loss, have no second "
                'derivative. Use attn_implementation="eager", or restore_attention(model) for a live model'
            )
        return backward(ctx, *gradients)

    return checked
