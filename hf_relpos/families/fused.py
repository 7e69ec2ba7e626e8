"""Tensors that hold several of BERT's: one projection of queries, keys and values, both halves of a gated unit."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .errors import ConversionError
from .family import Tensors


PROJECTIONS = tuple(f".attention.self.{name}." for name in ("query", "key", "value"))
ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")


def split_rows(tensors: Tensors, fused: str, parts: Sequence[str], rows: int) -> dict[str, torch.Tensor]:
    """Split tensors of several rows each into equal parts, in order.

    Args:
        tensors: by name; those whose name does not contain `fused` are returned as they are.
        fused: a part of the names to split.
        parts: what the parts have in its place.
        rows: number of rows of a part.

    Raises:
        ConversionError: for a tensor with another number of rows.
    """
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if fused not in name:
            split[name] = tensor
            continue
        if len(tensor) != rows * len(parts):
            raise ConversionError(
                f"{name} has {len(tensor)} rows, and hidden_size = {rows} makes it {rows * len(parts)}; correct "
                "config.json or take the weights that belong to it"
            )
        chunks = tensor.chunk(len(parts))
        split |= {name.replace(fused, own): part for own, part in zip(parts, chunks, strict=True)}
    return split


def join_rows(tensors: Tensors, fused: str, parts: Sequence[str]) -> dict[str, torch.Tensor]:
    """The inverse of `split_rows`."""
    joined: dict[str, torch.Tensor] = {}
    first, *others = parts
    for name, tensor in tensors.items():
        if first in name:
            joined[name.replace(first, fused)] = torch.cat(
                [tensor, *(tensors[name.replace(first, other)] for other in others)]
            )
        elif not any(other in name for other in others):
            joined[name] = tensor
    return joined


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
    parameters = config.get("rope_parameters") or {}
    options: dict[str, Any] = {"pairing": "half"}
    options["base"] = float(parameters.get("rope_theta", config.get("rope_theta", base)))
    kind, factor = rope_scaling(config)
    size = config.get("hidden_size", 768) // config.get("num_attention_heads", 12)
    if kind == "linear":
        options |= {"scaling": "linear", "factor": factor}
    elif kind == "ntk":  # of the original code of `new`: a larger base, and all frequencies lower
        options |= {"base": options["base"] * factor, "scaling": "linear", "factor": factor ** (2 / size)}
    return options


def rope_scaling(config: Mapping[str, Any]) -> tuple[str | None, float]:
    """Kind and factor of the scaling of rotations; None for no scaling."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    return (None if kind == "default" else kind), float(scaling.get("factor", 1.0))
