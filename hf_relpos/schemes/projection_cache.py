"""Projections of position rows that inference keeps between calls: W·P depends on parameters alone.

They are kept by value: beside a result lie copies of what it was made from, and a call whose weight, bias and rows are
not the same bit for bit makes its own. So no way of writing to a parameter is overlooked (optimizer steps,
`load_state_dict`, in-place operations, `.data`), and comparing takes a twentieth of the time of the product. Results
belong to the weight, and go with it; modules, their state and their copies know nothing of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..attention.products import FastLinear
from ..attention.tracing import is_traced
from .deberta import PROJECT


# Rows of a result, and results of a weight (for inputs of different lengths), up to which they are kept: what is kept
# shall stay small beside the layer.
MOST_ROWS, MOST_RESULTS = 1024, 4


class _Kept(NamedTuple):
    """Results of one linear layer.

    Attributes:
        parameters: copies of its weight and bias (or None).
        results: by number of rows, copies of the rows, and their projection.
    """

    parameters: tuple[torch.Tensor, torch.Tensor | None]
    results: dict[int, tuple[torch.Tensor, torch.Tensor]]


_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weight: _Kept


def project(projection: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """projection(rows), not to be written to; in inference on the CPU from an earlier call with the same contents.

    Args:
        projection: D to H·d.
        rows: (N, D).

    Returns:
        (N, H·d).
    """
    if not isinstance(projection, nn.Linear) or not _may_keep(projection, rows):
        return projection(rows)
    kept = _kept.get(projection.weight)
    if kept is None or not all(map(_same_bits, kept.parameters, (projection.weight, projection.bias))):
        kept = _Kept((_copy(projection.weight), None if projection.bias is None else _copy(projection.bias)), {})
        _kept[projection.weight] = kept
    source, result = kept.results.get(len(rows), (None, None))
    if result is None or not _same_bits(source, rows):
        with torch.inference_mode(False), torch.no_grad():  # or autograd could never read the result
            result = projection(rows)
        if len(kept.results) >= MOST_RESULTS:
            kept.results.pop(next(iter(kept.results)), None)
        kept.results[len(rows)] = (_copy(rows), result)
    return result


PROJECT.append(project)


def _may_keep(projection: nn.Linear, rows: torch.Tensor) -> bool:
    """Whether the call is inference on the CPU by a plain linear layer, which nobody watches or replaced."""
    weight, bias = projection.weight, projection.bias
    tensors = [rows, weight] if bias is None else [rows, weight, bias]
    return (
        not is_traced()
        and type(projection) in (nn.Linear, FastLinear)
        and "forward" not in vars(projection)  # as accelerate replaces it
        and not (projection._forward_hooks or projection._forward_pre_hooks)
        and not projection.training
        and len(rows) <= MOST_ROWS
        and type(rows) is torch.Tensor
        and all(type(tensor) is nn.Parameter for tensor in tensors[1:])
        and all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
        and all(tensor.dtype == rows.dtype for tensor in tensors)
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().clone()


def _same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two contiguous tensors, or None, have the same type, shape and contents."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_words(one), _words(other))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a contiguous tensor as integers, the longer the faster to compare."""
    size = tensor.element_size()
    whole = tensor.numel() * size % 8 == 0 and tensor.storage_offset() * size % 8 == 0
    return tensor.detach().view(-1).view(torch.int64 if whole else torch.uint8)
