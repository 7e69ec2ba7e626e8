"""Choose the dtype of linear layers, and find those that int8 harms."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..products.cpu_gemm import seconds_of
from ..products.low_precision import KINDS, int8_rates, multiply_int8, round_weight
from .comparison import Agreement, Comparison
from .shadow import shadow


# A layer stays in float32 whose output has a larger error, as a share of its norm.
LARGEST_ERROR = 0.1
# So many of the layers with the largest errors stay in float32, one share after the other, until rows agree.
SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
LEAST_COSINE = 0.995  # mean over the rows
TAKEN = f"; taken, the fastest with a mean cosine of {LEAST_COSINE} or more"


class Candidate(NamedTuple):
    """A dtype of linear layers, tried on a copy of the model.

    Attributes:
        precision: "float32", "bfloat16" or "int8".
        layers: those of the model that get the class of this precision.
        model: the copy.
        agreement: of its outputs with those before.
        choices: a line for each precision that was compared with it.
    """

    precision: str
    layers: list[nn.Linear]
    model: Any
    agreement: Agreement
    choices: str = ""


def candidate(comparison: Comparison, layers: Sequence[nn.Linear], precision: str) -> Candidate:
    """Measure a dtype of linear layers on a copy of the model; for int8, of the layers that it does not harm."""
    model = shadow(comparison.model)
    copies = dict(zip(comparison.model.modules(), model.modules(), strict=True))
    names = {module: name for name, module in comparison.model.named_modules()}
    is_int8 = precision == "int8"
    errors = _errors(comparison, model, [copies[each] for each in layers if each in copies]) if is_int8 else {}
    ranked = sorted(layers, key=lambda layer: errors.get(copies.get(layer), 0.0), reverse=True)
    fewest = sum(error > LARGEST_ERROR for error in errors.values()) if precision in KINDS else len(layers)
    for share in SHARES if is_int8 else SHARES[:1]:
        exact = ranked[: max(fewest, round(share * len(ranked)))]
        found = [layer for layer in layers if layer not in exact]
        for layer in copies.keys() & {*layers}:
            copies[layer].__class__ = KINDS[precision] if layer in found else type(layer)
        agreement = comparison.agreement(model, tuple(names.get(layer, "?") for layer in exact if is_int8))
        if agreement.cosine >= LEAST_COSINE:
            break
    return Candidate(precision, found, model, agreement)


def choose(comparison: Comparison, layers: Sequence[nn.Linear], precision: str) -> Candidate:
    """Return the requested dtype; for "auto" the fastest one whose outputs agree."""
    if precision != "auto":
        return candidate(comparison, layers, precision)
    names = ["float32", "bfloat16", *(["int8"] if int8_rates().is_faster else [])]
    found = [candidate(comparison, layers, name) for name in names]
    taken = seconds_of({each.precision: partial(comparison.outputs, each.model) for each in found}, rounds=3)
    right = [each for each in found if each.agreement.cosine >= LEAST_COSINE] or found[:1]
    best = min(right, key=lambda each: taken[each.precision])
    lines = [
        f"{each.precision}: {taken[each.precision]:.2g} s, {each.agreement.cosines}{TAKEN if each is best else ''}"
        for each in found
    ]
    return best._replace(choices="\n".join(lines if "int8" in names else [*lines, f"int8: {int8_rates()}"]))


def _errors(comparison: Comparison, model: nn.Module, layers: Sequence[Any]) -> dict[Any, float]:
    """Return the int8 error of each layer by itself, relative to the norm of its output."""
    errors: dict[Any, float] = {}

    def compare(layer: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        rounded = multiply_int8(inputs[0], round_weight(layer.weight), layer.bias)
        errors[layer] = max(errors.get(layer, 0.0), float((rounded - out).norm() / out.norm().clamp(min=1e-30)))

    hooks = [layer.register_forward_hook(compare) for layer in layers]
    comparison.outputs(model)
    for hook in hooks:
        hook.remove()
    return errors
