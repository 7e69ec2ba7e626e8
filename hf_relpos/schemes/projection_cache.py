"""Projection cache for inference: projections W·P of position rows, which depend on parameters alone.

A result is used again where the rows are the same bit for bit and the parameters are unchanged. Those of a plain layer
are compared as a whole, so that no way of writing to them is overlooked; the comparison takes a twentieth of the time
of the product. Those of a live layer after `optimize` are compared as its own cached weight is (`weight_cache`).
Results are freed with their layer. Modules, their state and their copies do not contain them.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from ..host.tracing import is_traced, is_transformed
from ..products.cpu_gemm import has_gradients
from ..products.weight_cache import CachingLinear, Snapshot, has_bits, is_unchanged, snapshot


# Limits on the rows of a cached result, and on the results of one weight (for inputs of different lengths). They keep
# the cache small compared with the layer.
MOST_ROWS, MOST_RESULTS = 1024, 4


# Of a layer: snapshots of its parameters, and by number of rows copies of them and their projection. The layer is the
# key, not its weight: `torch.utils.swap_tensors` refuses tensors that have weak references.
_cached: WeakKeyDictionary[nn.Module, tuple[list[Snapshot], dict[int, tuple[torch.Tensor, torch.Tensor]]]]
_cached = WeakKeyDictionary()
# The latest copy by number of rows, which the layers of a model share.
_copies: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()


def project(projection: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return projection(rows); in inference on the CPU, reuse the result of an earlier call with the same contents.

    Args:
        projection: D to H·d.
        rows: (N, D).

    Returns:
        (N, H·d), not to be written to.
    """
    if not isinstance(projection, nn.Linear) or not _may_keep(projection, rows):
        return projection(rows)
    whole = not isinstance(projection, CachingLinear)
    parameters = [*projection.parameters()]
    known, results = _cached.get(projection, ([], {}))
    pairs = zip(parameters, known, strict=False)
    if len(known) != len(parameters) or not all(is_unchanged(each, before, whole) for each, before in pairs):
        known, results = [snapshot(each, whole) for each in parameters], {}
        _cached[projection] = known, results
    found, flat = results.get(len(rows)), rows.detach().flatten()
    if found is None or not has_bits(flat, found[0]):
        copied = _copies.get(len(rows))
        if copied is None or not has_bits(flat, copied):
            copied = _copies[len(rows)] = flat.clone()
        with torch.inference_mode(False), torch.no_grad():  # otherwise autograd could not use the result later
            result = projection(rows)
        if len(results) >= MOST_RESULTS:
            results.pop(next(iter(results)), None)
        found = results[len(rows)] = copied, result
    return found[1]


def forget_projections(module: nn.Module) -> None:
    """Drop the cached projections of a layer."""
    _cached.pop(module, None)


def _may_keep(projection: nn.Linear, rows: torch.Tensor) -> bool:
    """Whether the call is inference on the CPU by a plain linear layer, without hooks or a replaced `forward`."""
    tensors = [rows, *projection.parameters()]
    return (
        not (is_traced() or is_transformed())
        and (type(projection) is nn.Linear or isinstance(projection, CachingLinear))
        and "forward" not in vars(projection)  # accelerate replaces it
        and not (projection._forward_hooks or projection._forward_pre_hooks)
        and not projection.training
        and len(rows) <= MOST_ROWS
        and type(rows) is torch.Tensor
        and all(type(tensor) is nn.Parameter for tensor in tensors[1:])
        and all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
        and all(tensor.dtype == rows.dtype for tensor in tensors)
        and not torch.is_autocast_enabled("cpu")
        and not has_gradients(*tensors)
    )
