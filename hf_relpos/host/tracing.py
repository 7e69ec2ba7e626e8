"""Whether a graph is being recorded, whether the contents of tensors may be looked at, and second derivatives."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from .transformers import is_fake_tensor


def is_traced() -> bool:
    """Whether `torch.compile`, `torch.export` or `torch.jit.trace` records a graph. It must not depend on data."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_transformed() -> bool:
    """Whether derivatives are computed in forward mode, or a transform of `torch.func` is active.

    Results must then not be cached, and functions with a backward pass of their own do not apply.
    """
    if forward_ad._current_level >= 0:
        return True
    return not is_traced() and torch._C._functorch.peek_interpreter_stack() is not None


def may_read(device: torch.device) -> bool:
    """Whether the contents of tensors on that device may decide what is computed.

    On an accelerator the CPU would have to wait for the device. A graph would hold for these contents only.
    """
    return device.type == "cpu" and not is_traced()


def has_contents(tensor: torch.Tensor, may_wait: bool = False) -> bool:
    """Whether the contents of a tensor may decide what is computed.

    They may not in a graph, under a transform of `torch.func`, and of a tensor that is a shape alone.

    Args:
        may_wait: whether the CPU may wait for the tensor of an accelerator.
    """
    readable = not is_traced() if may_wait else may_read(tensor.device)
    return readable and not (tensor.is_meta or is_transformed() or is_fake_tensor(tensor))


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
                'derivative. Use attn_implementation="eager", or undo_optimize(model) after optimize'
            )
        return backward(ctx, *gradients)

    return checked
