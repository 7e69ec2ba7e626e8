"""Tensors that hold several of BERT's: one projection of queries, keys and values, both halves of a gated unit."""

from collections.abc import Mapping
from typing import Any

import torch

from .errors import ConversionError
from .family import Tensors


PROJECTIONS = tuple(f".attention.self.{name}." for name in ("query", "key", "value"))
ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")


def split_projections(tensors: Tensors, fused: str, size: int) -> dict[str, torch.Tensor]:
    """Split tensors of queries, keys and values, in this order, into those of each.

    Args:
        tensors: by name; those whose name does not contain `fused` are returned as they are.
        fused: a part of the names to split, which `PROJECTIONS` replace.
        size: number of rows of each projection.

    Raises:
        ConversionError: for a tensor with another number of rows.
    """
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if fused not in name:
            split[name] = tensor
            continue
        if len(tensor) != 3 * size:
            raise ConversionError(
                f"{name} has {len(tensor)} rows, and hidden_size = {size} makes it {3 * size}; correct config.json or "
                "take the weights that belong to it"
            )
        split |= {name.replace(fused, own): part for own, part in zip(PROJECTIONS, tensor.chunk(3), strict=True)}
    return split


def join_projections(tensors: Tensors, fused: str) -> dict[str, torch.Tensor]:
    """The inverse of `split_projections`."""
    joined: dict[str, torch.Tensor] = {}
    query = PROJECTIONS[0]
    for name, tensor in tensors.items():
        if query in name:
            joined[name.replace(query, fused)] = torch.cat([tensors[name.replace(query, own)] for own in PROJECTIONS])
        elif not any(own in name for own in PROJECTIONS):
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
