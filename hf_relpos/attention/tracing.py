"""Whether a graph is being recorded."""

import torch


def is_traced() -> bool:
    """Whether `torch.compile`, `torch.export` or `torch.jit.trace` records a graph, which must not depend on data."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
