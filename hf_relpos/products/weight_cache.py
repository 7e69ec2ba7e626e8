"""Values computed from the weight of a layer, such as a rounded copy, and dropped when the weight changes.

PyTorch counts writes to a tensor, but not those through `.data`, NumPy or another process, nor any to tensors of
inference mode. So a sample of the elements is compared, too: all of a weight of up to `WHOLE` elements, otherwise at
least one of each row and of each column. It shows every write to a whole row or column.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..host.torch import counted_writes


ATTRIBUTE = "_rounded"  # of a layer; `forget` deletes it
PRIVATE = "_hf_relpos_private"  # of a tensor that nobody else has, and that is never written to
WHOLE = 2**16  # comparing so many elements takes 15 µs, a sample of a weight of 768 × 3,072 takes 7
GOLDEN = (5**0.5 - 1) / 2
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CachingLinear(nn.Linear):
    """A linear layer with a cached value, which copies and pickles leave out."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != ATTRIBUTE}


class Snapshot(NamedTuple):
    """What a tensor held; `is_unchanged` compares the tensor with it.

    Attributes:
        identity: the address, the number of writes that PyTorch counted, and the layout; empty if contents decide.
        sample: copies of elements, (n,).
    """

    identity: tuple[Any, ...]
    sample: torch.Tensor


def identity_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What changes when another tensor takes the place of this one, and when PyTorch counts a write to it."""
    return tensor.data_ptr(), counted_writes(tensor), tensor.dtype, tensor.shape, tensor.stride()


def sample_of(tensor: torch.Tensor, whole: bool = False) -> torch.Tensor:
    """Elements of a tensor, (n,); where it is small and contiguous, a view.

    Args:
        whole: take all elements, instead of some of each row and each column if there are more than `WHOLE`.
    """
    if hasattr(tensor, PRIVATE):
        return tensor.new_empty(0)
    flat, places = _flat(tensor, whole)
    return flat if places is None else flat.index_select(0, places)


def _flat(tensor: torch.Tensor, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The elements of a tensor, if it is contiguous or transposed a view, and which are the sample; None for all."""
    matrix = tensor if tensor.is_contiguous() or tensor.dim() != 2 else tensor.t()
    flat = matrix.detach().resolve_neg().flatten()
    is_small = whole or matrix.dim() != 2 or flat.numel() <= WHOLE
    return flat, None if is_small else _places(*matrix.shape)


@functools.cache
def _places(rows: int, columns: int) -> torch.Tensor:
    """Places in a flat matrix, with one or a few adjacent ones of each row, and at least one of each column.

    A share of the golden ratio from row to row spreads them over the matrix. As the step has no factor in common with
    the number of groups of columns, of which there are no more than rows, it meets them all.
    """
    width = -(-columns // rows)
    groups = -(-columns // width)
    step = next(step for step in range(max(1, int(GOLDEN * groups)), 0, -1) if math.gcd(step, groups) == 1)
    row = torch.arange(rows, device="cpu")[:, None]
    column = row * step % groups * width + torch.arange(width, device="cpu")
    return (row * columns + column.clamp(max=columns - 1)).flatten()


def snapshot(tensor: torch.Tensor, whole: bool = False) -> Snapshot:
    """Take a snapshot of a weight."""
    return Snapshot(identity_of(tensor), sample_of(tensor, whole).clone())


def is_unchanged(tensor: torch.Tensor, before: Snapshot, whole: bool = False) -> bool:
    """Whether a weight is the one of a snapshot, with the same contents as far as its sample shows."""
    return identity_of(tensor) == before.identity and has_bits(sample_of(tensor, whole), before.sample)


class Snapshots:
    """Snapshots of many tensors, which are compared at once."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """
        Args:
            tensors: of one dtype, contiguous or transposed.
        """
        self.tensors, self.aliases = tensors, [each.detach() for each in tensors]
        self.writes = [*map(counted_writes, tensors)]
        self.views = [*map(_flat, tensors)]
        self.before = self._sample()

    def _sample(self) -> torch.Tensor:
        taken = [flat if places is None else flat.index_select(0, places) for flat, places in self.views]
        return torch.cat(taken) if taken else torch.empty(0)

    def hold(self, tensors: Sequence[torch.Tensor] | None = None) -> bool:
        """Whether tensors, by default those of before, are unchanged, as `is_unchanged` finds of each."""
        tensors = self.tensors if tensors is None else tensors
        are_same = all(map(torch.Tensor.is_set_to, tensors, self.aliases))
        return are_same and [*map(counted_writes, tensors)] == self.writes and has_bits(self._sample(), self.before)


def has_bits(flat: torch.Tensor, copied: torch.Tensor) -> bool:
    """Whether a tensor, (n,), has the dtype, shape and bits of a contiguous one."""
    if flat.dtype != copied.dtype or flat.shape != copied.shape:
        return False
    size = flat.element_size()
    pairs = flat.is_contiguous() and flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    integers = torch.int64 if pairs else INTEGERS[size]  # the widest compare faster; NaN equals NaN
    return torch.equal(flat.view(integers), copied.view(integers))


def cached(layer: nn.Linear, make: Callable[[torch.Tensor], Any], patient: bool = False) -> Any:
    """What a function makes of a layer's weight, without gradients; made again when the weight has changed.

    Args:
        patient: make it in the second call with the same weight, and return None in the first: weights that change
            between calls, as in training, are not worth it.
    """
    weight = layer.weight
    found: tuple[Any, ...] | None = vars(layer).get(ATTRIBUTE)
    if found is None or found[0] is not make or not is_unchanged(weight, found[1]):
        found = make, snapshot(weight), None
        if patient:
            vars(layer)[ATTRIBUTE] = found
            return None
    if found[2] is None:
        with torch.inference_mode(False), torch.no_grad():
            found = vars(layer)[ATTRIBUTE] = (*found[:2], make(weight.detach()))
    return found[2]


def forget(module: nn.Module) -> None:
    """Drop the cached value of a layer."""
    vars(module).pop(ATTRIBUTE, None)
