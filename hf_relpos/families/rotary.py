"""Options of the scheme `rope` from the fields of rotary encoders."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..models.checks import number
from .joints import hidden_size


# Values of `rope_type` that Transformers' classes compute from the length of a batch alone, as the scheme `rope` does.
SCALINGS = ("linear", "yarn", "llama3", "proportional", "longrope")
BASE = number(1, 1e12, optional=True)


def rope_options(config: Mapping[str, Any], base: float) -> dict[str, Any]:
    """Options of the scheme `rope` for rotations of the first half of a head's features with the second.

    Args:
        config: config.json, with `rope_theta` and `rope_scaling`, or `rope_parameters`.
        base: the default of `rope_theta`.
    """
    scaling, own = _scaling(config), config.get("rope_parameters") or {}
    theta = own.get("rope_theta") or config.get("rope_theta") or base
    kind, factor = _kind(scaling), float(scaling.get("factor") or 1.0)
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
    scaling = _scaling(config)
    if _kind(scaling) in (None, *known):
        return ""
    return f"rope_parameters = {dict(scaling)!r}: of the scalings {', '.join(map(repr, known))} are read here"


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _kind(scaling: Mapping[str, Any]) -> str | None:
    """The `rope_type` of a scaling; None for no scaling."""
    kind = scaling.get("rope_type", scaling.get("type"))
    return None if kind == "default" else kind
