"""Tensors that hold several of BERT's, such as one projection of queries, keys and values, or hold them otherwise."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .errors import ConversionError
from .family import Tensors


QUERY_KEY_VALUE = tuple(f".attention.self.{name}." for name in ("query", "key", "value"))
# Values of `rope_type` that Transformers' classes compute from the length of a batch alone, as the scheme `rope` does.
SCALINGS = ("linear", "yarn", "llama3", "proportional", "longrope")
ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")
# From the configuration, the name of the first tensor and the tensors to other tensors.
Change = Callable[..., Iterable[torch.Tensor]]


@dataclass(frozen=True)
class Joint:
    """Tensors of a file, and the tensors of BERT with the same numbers.

    Attributes:
        stored: parts of their names in the file.
        ours: parts of BERT's names, which stand in the same places.
        split: from the file's tensors to BERT's.
        join: the inverse of `split`.
    """

    stored: tuple[str, ...]
    ours: tuple[str, ...]
    split: Change
    join: Change


def split(joints: Iterable[Joint], config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    """Replace the tensors of a file by BERT's; return others unchanged.

    Raises:
        ConversionError: for a tensor without those that belong to it, and for shapes that the configuration excludes.
    """
    return _regroup(tensors, [(each.stored, each.ours, partial(each.split, config)) for each in joints])


def join(joints: Iterable[Joint], config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    """The inverse of `split`."""
    return _regroup(tensors, [(each.ours, each.stored, partial(each.join, config)) for each in joints])


def _regroup(
    tensors: Tensors, moves: list[tuple[tuple[str, ...], tuple[str, ...], Change]]
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        move = next((each for each in moves if any(part in name for part in each[0])), None)
        if move is None:
            found[name] = tensor
            continue
        old, new, change = move
        if old[0] in name:  # the others come with the first
            together = [name.replace(old[0], part) for part in old]
            for each in together:
                if each not in tensors:
                    raise ConversionError(f"{each} is not there, and {name} is; restore the file")
            made = change(name, *(tensors[each] for each in together))
            found |= {name.replace(old[0], part): each for part, each in zip(new, made, strict=True)}
    return found


def projections(stored: str, size: Callable[[Mapping[str, Any]], int]) -> Joint:
    """One tensor of queries, keys and values, in this order.

    Args:
        stored: a part of its name.
        size: from the configuration to the number of rows of each.
    """

    def thirds(config: Mapping[str, Any], name: str, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
        rows = size(config)
        if len(tensor) != 3 * rows:
            raise ConversionError(
                f"{name} has {len(tensor)} rows, and hidden_size = {rows} makes it {3 * rows}; correct config.json or "
                "take the weights that belong to it"
            )
        return tensor.chunk(3)

    return Joint((stored,), QUERY_KEY_VALUE, thirds, lambda config, name, *parts: [torch.cat(parts)])


def hidden_size(config: Mapping[str, Any]) -> int:
    """The `hidden_size` of a configuration; 768, as in BERT, if the file has none."""
    return int(config.get("hidden_size", 768))


def exchanged_halves(stored: str, ours: str) -> Joint:
    """A gated unit that activates its second half; this package activates the first."""

    def exchange(config: Mapping[str, Any], name: str, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
        return [tensor.roll(len(tensor) // 2, 0)]

    return Joint((stored,), (ours,), exchange, exchange)


def other_value(config: Mapping[str, Any], only: Mapping[str, Any]) -> str:
    """Why a configuration has no counterpart here: a field with another value than these; empty if there is none."""
    for name, value in only.items():
        if config.get(name) not in (None, value):
            return f"{name} = {config[name]!r}: only {value!r} has a counterpart here; its own code reads the others"
    return ""


def rope_options(config: Mapping[str, Any], base: float) -> dict[str, Any]:
    """Options of the scheme `rope` for rotations of the first half of a head's features with the second.

    Args:
        config: config.json, with `rope_theta` and `rope_scaling`, or `rope_parameters`.
        base: the default of `rope_theta`.
    """
    scaling, own = _scaling(config), config.get("rope_parameters") or {}
    theta = own.get("rope_theta", config.get("rope_theta", base))
    kind, factor = rope_scaling(config)
    if kind == "ntk":  # of the original code of `new`: a larger base, and all frequencies lower
        size = hidden_size(config) // config.get("num_attention_heads", 12)
        parameters = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / size)}
    elif kind is None:
        parameters = {"rope_theta": theta}
    else:
        parameters = {**scaling, "rope_type": kind, "rope_theta": theta}
        parameters.pop("type", None)
        trained = config.get("original_max_position_embeddings")
        if trained and kind in ("llama3", "longrope", "yarn"):  # where Transformers prefers the outer field
            parameters["original_max_position_embeddings"] = trained
    return {"pairing": "half", "rope_parameters": parameters}


def other_scaling(config: Mapping[str, Any], known: Iterable[str] = SCALINGS) -> str:
    """Why a scaling of rotations has no counterpart here; empty if it has one."""
    if rope_scaling(config)[0] in (None, *known):
        return ""
    return f"rope_parameters = {dict(_scaling(config))!r}: of the scalings {', '.join(map(repr, known))} are read here"


def rope_scaling(config: Mapping[str, Any]) -> tuple[str | None, float]:
    """Kind and factor of the scaling of rotations; None for no scaling."""
    scaling = _scaling(config)
    kind = scaling.get("rope_type", scaling.get("type"))
    return (None if kind == "default" else kind), float(scaling.get("factor") or 1.0)


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}
