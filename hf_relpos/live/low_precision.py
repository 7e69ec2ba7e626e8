"""Linear layers that multiply in a lower precision than their weights have."""

from typing import Any

import torch
from torch import nn

from ..attention.cpu_gemm import has_gradients, linear
from ..attention.tracing import is_traced
from ..host.torch import multiply_matrices_int8


LARGEST = 127  # of an int8, on both sides of zero
SAMPLE = 64
TINY = torch.finfo(torch.float32).tiny


class Bfloat16Linear(nn.Linear):
    """`torch.nn.Linear` with float32 weights and products in bfloat16, summed in float32.

    Weights are rounded in every call, which takes a fraction of the product's time: any change of them is seen.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.Linear`, the result in the dtype of the input."""
        bias = None if self.bias is None else self.bias.bfloat16()
        return nn.functional.linear(input.bfloat16(), self.weight.bfloat16(), bias).to(input.dtype)


class Int8Linear(nn.Linear):
    """`torch.nn.Linear` with products of int8, for inference; with gradients it computes in float32.

    Activations have a scale for each token and weights one for each output feature: a token with large values, as
    BERTs have them, costs others nothing, and padding changes no number (Dettmers et al. 2022, arXiv 2208.07339, §2).
    The weights are rounded once, and in a graph (`torch.compile`) in every call. They are rounded anew where PyTorch
    counted a write to them, and where one of the elements that `sample_of` takes is another: adapters are merged, and
    averages of weights loaded, by writes through `.data`, which are not counted.
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
        if is_traced():  # a graph that held the kept one would not see that the weight changes
            return multiply_int8(input, *round_weight(weight), self.bias)
        key = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        sample = sample_of(weight)
        kept: tuple[Any, ...] | None = vars(self).get("_int8")
        if kept is None or kept[0] != key or not torch.equal(kept[1], sample):
            kept = vars(self)["_int8"] = (key, sample.clone(), *round_weight(weight))
        return multiply_int8(input, kept[2], kept[3], self.bias)


def sample_of(weight: torch.Tensor) -> torch.Tensor:
    """Elements of a weight in rows and columns all over it, `SAMPLE` at most.

    A merged adapter, an average or a step of an optimizer changes nearly all of them.
    """
    flat = weight.detach().flatten()  # a view of a contiguous one
    return flat[:: flat.numel() // SAMPLE + 1]


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, (E, D), in int8, (D, E), and the scale of each output feature, (E,)."""
    with torch.inference_mode(False), torch.no_grad():
        weight = weight.detach()
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
    return out.unflatten(0, input.shape[:-1]) if input.dim() != 2 else out
