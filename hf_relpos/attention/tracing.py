"""Whether a graph is being recorded, and whether the contents of tensors may be looked at."""

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
