"""Linear layers that multiply in a lower precision than their weights have, and which of them do harm in int8."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..attention.cpu_gemm import has_gradients, linear
from ..attention.tracing import is_traced, is_transformed
from ..attention.weight_cache import CachingLinear, cached
from ..host.torch import multiply_matrices_int8
from .comparison import Agreement, Comparison


LARGEST = 127  # of an int8, on both sides of zero
TINY = torch.finfo(torch.float32).tiny
# A layer stays in float32 whose output has a larger error, as a share of its norm.
LARGEST_ERROR = 0.1
# So many of the layers with the largest errors stay in float32, one share after the other, until rows agree.
SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
LEAST_COSINE = 0.995  # mean over the rows


class Bfloat16Linear(CachingLinear):
    """`torch.nn.Linear` with float32 weights and products in bfloat16, summed in float32.

    Weights are rounded once (`cached`); in every call with gradients, in graphs and transforms, and on accelerators.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.Linear`, the result in the dtype of the input."""
        weight, bias = self.weight, None if self.bias is None else self.bias.bfloat16()
        often = has_gradients(input, weight, self.bias) or is_traced() or is_transformed()
        once = weight.device.type == "cpu" and not often
        weight = cached(self, torch.Tensor.bfloat16) if once else weight.bfloat16()
        return nn.functional.linear(input.bfloat16(), weight, bias).to(input.dtype)


class Int8Linear(CachingLinear):
    """`torch.nn.Linear` with products of int8, for inference; with gradients it computes in float32.

    Activations have a scale for each token and weights one for each output feature: a token with large values, as
    BERTs have them, costs others nothing, and padding changes no number (Dettmers et al. 2022, arXiv 2208.07339, §2).
    The weights are rounded once (`cached`), and in a graph (`torch.compile`) in every call.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.Linear`."""
        weight = self.weight
        if (
            has_gradients(input, weight, self.bias)
            or input.dtype != torch.float32
            or weight.device.type != "cpu"
            or weight.dtype != input.dtype
        ):
            return linear(input, weight, self.bias)
        if is_traced() or is_transformed():  # a graph that held the kept one would not see that the weight changes
            return multiply_int8(input, *round_weight(weight), self.bias)
        rounded, scales = cached(self, round_weight)
        return multiply_int8(input, rounded, scales, self.bias)


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, (E, D), in int8, (D, E), and the scale of each output feature, (E,)."""
    scales = weight.abs().amax(1).clamp(min=TINY) / LARGEST
    return (weight / scales[:, None]).round().to(torch.int8).t().contiguous(), scales


def multiply_int8(
    input: torch.Tensor, rounded: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The output of a linear layer, (…, E), of inputs, (…, D), and a weight that `round_weight` made."""
    rows = input.reshape(-1, input.shape[-1])
    # passes without new memory, which costs as much as the arithmetic
    steps = torch.maximum(rows.amax(-1, True), rows.amin(-1, True).neg_()).clamp_(min=TINY).div_(LARGEST)
    out = multiply_matrices_int8((rows / steps).round_().to(torch.int8), rounded).to(rows.dtype).mul_(steps)
    out = out.mul_(scales) if bias is None else torch.addcmul(bias, out, scales, out=out)
    return out.view(*input.shape[:-1], out.shape[1])


def quantize(comparison: Comparison, layers: Sequence[nn.Linear]) -> tuple[list[nn.Linear], Agreement]:
    """Find the layers whose int8 products do no harm, on a copy of the model.

    Args:
        layers: linear layers of the model.

    Returns:
        Those for `Int8Linear`, and the agreement of the copy that has them.
    """
    model = comparison.copy()
    copies = dict(zip(comparison.model.modules(), model.modules(), strict=True))
    names = {module: name for name, module in comparison.model.named_modules()}
    errors = _errors(comparison, model, [copies[layer] for layer in layers if layer in copies])
    ranked = sorted(layers, key=lambda layer: errors.get(copies.get(layer), 0.0), reverse=True)
    fewest = sum(error > LARGEST_ERROR for error in errors.values())
    for share in SHARES:
        exact = ranked[: max(fewest, round(share * len(ranked)))]
        for layer in copies.keys() & {*layers}:
            copies[layer].__class__ = type(layer) if layer in exact else Int8Linear
        agreement = comparison.agreement(model, tuple(names.get(layer, "?") for layer in exact))
        if agreement.cosine >= LEAST_COSINE:
            break
    return [layer for layer in layers if layer not in exact], agreement


def _errors(comparison: Comparison, model: nn.Module, layers: Sequence[Any]) -> dict[Any, float]:
    """The error of each layer of a copy alone in int8, as a share of the norm of its output."""
    errors: dict[Any, float] = {}

    def compare(layer: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        rounded = multiply_int8(inputs[0], *round_weight(layer.weight), layer.bias)
        errors[layer] = max(errors.get(layer, 0.0), float((rounded - out).norm() / out.norm().clamp(min=1e-30)))

    hooks = [layer.register_forward_hook(compare) for layer in layers]
    comparison.outputs(model)
    for hook in hooks:
        hook.remove()
    return errors
