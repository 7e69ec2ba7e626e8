"""Tensors that hold several of BERT's, such as one projection of queries, keys and values, or hold them otherwise."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoints.errors import ConversionError, check_shape


Tensors = dict[str, torch.Tensor]
# From the configuration, the name of the first tensor and the tensors to other tensors.
Change = Callable[..., Iterable[torch.Tensor]]
QUERY_KEY_VALUE = tuple(f".attention.self.{name}." for name in ("query", "key", "value"))


@dataclass(frozen=True)
class Joint:
    """Tensors of a file, and the tensors of BERT with the same numbers.

    Attributes:
        stored: parts of their names in the file, which follow the number of a layer.
        ours: the same of BERT's names.
        split: from the file's tensors to BERT's.
        join: the inverse of `split`.
    """

    stored: tuple[str, ...]
    ours: tuple[str, ...]
    split: Change
    join: Change

    def inverse(self) -> "Joint":
        """The joint from BERT's tensors to those of a file."""
        return Joint(self.ours, self.stored, self.join, self.split)


def split(joints: Iterable[Joint], config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """Replace the tensors of a file by BERT's; return others unchanged.

    Raises:
        ConversionError: for a tensor without those that belong to it, one that is there under BERT's name, too, and
            shapes that the configuration excludes.
    """
    joints = list(joints)
    found: Tensors = {}
    for name, tensor in tensors.items():
        joint = next((each for each in joints if any(_has(name, part) for part in each.stored)), None)
        if joint is None:
            found[name] = tensor
            continue
        first = joint.stored[0]
        if _has(name, first):  # the others come with the first
            together = [name.replace(first, part) for part in joint.stored]
            for each in together:
                if each not in tensors:
                    raise ConversionError(f"{each} is not there, and {name} is; restore the file")
            ours = [name.replace(first, part) for part in joint.ours]
            if other := next((each for each in ours if each in tensors and each not in together), None):
                raise ConversionError(f"{name} and {other} are two spellings of one tensor; remove one of them")
            found |= zip(ours, joint.split(config, name, *(tensors[each] for each in together)), strict=True)
    return found


def _has(name: str, part: str) -> bool:
    return re.search(rf"\.\d+{re.escape(part)}", name) is not None


def stored_name(joints: Iterable[Joint], name: str) -> str:
    """The name in the file of the tensor that `split` takes this one from; of several, the first."""
    for joint in joints:
        for part in joint.ours:
            if _has(name, part):
                return name.replace(part, joint.stored[0])
    return name


def join(joints: Iterable[Joint], config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """The inverse of `split`."""
    return split((each.inverse() for each in joints), config, tensors)


def projections(stored: str) -> Joint:
    """One tensor of queries, keys and values, in this order.

    Args:
        stored: a part of its name.
    """

    def thirds(config: Mapping[str, Any], name: str, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
        check_shape(name, tensor.shape, (3 * hidden_size(config), *tensor.shape[1:]))
        return tensor.chunk(3)

    return Joint((stored,), QUERY_KEY_VALUE, thirds, lambda config, name, *parts: [torch.cat(parts)])


def hidden_size(config: Mapping[str, Any]) -> int:
    """The `hidden_size` of a configuration, GPT-2's `n_embd`; 768, as in BERT, if the file has none."""
    return int(config.get("n_embd", config.get("hidden_size", 768)))


def exchanged_halves(stored: str, ours: str) -> Joint:
    """A gated unit that activates its second half; this package activates the first."""

    def exchange(config: Mapping[str, Any], name: str, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
        return [tensor.roll(len(tensor) // 2, 0)]

    return Joint((stored,), (ours,), exchange, exchange)


def without_bias(
    stored: str,
    ours: str,
    read: Callable[..., torch.Tensor] = lambda config, name, weight: weight,
    write: Callable[..., torch.Tensor] = lambda config, name, weight: weight,
) -> Joint:
    """The weight of a linear layer that has a bias here, and none in the file.

    Args:
        stored: its name in the file.
        ours: name of the linear layer here.
        read, write: from the file's weight to BERT's, (D, E), and back.
    """

    def add(config: Mapping[str, Any], name: str, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
        return [read(config, name, tensor), tensor.new_zeros(len(tensor))]

    def remove(config: Mapping[str, Any], name: str, weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        if bias.any():
            trained = f"{name.removesuffix('weight')}bias was trained, and the original architecture has no such bias"
            raise ConversionError(f"{trained}; keep the model as it is")
        return [write(config, name, weight)]

    return Joint((stored,), (f"{ours}.weight", f"{ours}.bias"), add, remove)
