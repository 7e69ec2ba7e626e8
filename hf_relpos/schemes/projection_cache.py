"""Projection cache for inference: projections W·P of position rows, which depend on parameters alone.

Each result is stored with copies of its inputs. A call whose weight, bias and rows are not the same bit for bit
computes its own result. So no way of writing to a parameter is overlooked (optimizer steps, `load_state_dict`,
in-place operations, `.data`). The comparison takes a twentieth of the time of the product. Results are attached to the
weight and freed with it. Modules, their state and their copies do not contain them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..attention.cpu_gemm import FastLinear, has_gradients
from ..attention.tracing import is_traced, is_transformed


# Limits on the rows of a cached result, and on the results of one weight (for inputs of different lengths). They keep
# the cache small compared with the layer.
MOST_ROWS, MOST_RESULTS = 1024, 4


# Maps a weight to copies of the parameters of its layer, and copies of rows with their projection by number of rows.
_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()


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
    parameters = [*projection.parameters()]
    known, results = _kept.get(projection.weight, ([], {}))
    if not _same_bits(known, parameters):
        known, results = [each.detach().clone() for each in parameters], {}
        _kept[projection.weight] = known, results
    source, result = results.get(len(rows), ([], None))
    if not _same_bits(source, [rows]):
        with torch.inference_mode(False), torch.no_grad():  # otherwise autograd could not use the result later
            result = projection(rows)
        if len(results) >= MOST_RESULTS:
            results.pop(next(iter(results)), None)
        results[len(rows)] = [rows.detach().clone()], result
    return result


def _may_keep(projection: nn.Linear, rows: torch.Tensor) -> bool:
    """Whether the call is inference on the CPU by a plain linear layer, without hooks or a replaced `forward`."""
    tensors = [rows, *projection.parameters()]
    return (
        not (is_traced() or is_transformed())
        and type(projection) in (nn.Linear, FastLinear)
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


def _same_bits(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether these are as many contiguous tensors, of the same dtypes, shapes and bits."""
    return len(ones) == len(others) and all(
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(_words(one), _words(other))
        for one, other in zip(ones, others, strict=True)
    )


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """View the bits of a contiguous tensor as integers, the widest possible: they compare faster."""
    size = tensor.element_size()
    whole = tensor.numel() * size % 8 == 0 and tensor.storage_offset() * size % 8 == 0
    return tensor.detach().view(-1).view(torch.int64 if whole else torch.uint8)
