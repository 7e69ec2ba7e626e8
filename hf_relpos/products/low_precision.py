"""Linear layers that multiply in another precision than their weights have."""

import functools
from typing import NamedTuple

import torch
from torch import nn

from ..host.torch import (
    fits_onednn_linear,
    has_packed_int8,
    multiply_matrices_int8,
    multiply_packed_int8,
    onednn_linear,
    pack_int8,
    pack_weight,
)
from ..host.tracing import is_traced, is_transformed
from .cpu_gemm import HALF, has_gradients, linear, linear_library, packed_rows, seconds_of
from .weight_cache import CachingLinear, cached


LARGEST = 127  # of an int8, on both sides of zero
BLOCK = 2**18  # elements of activations that are rounded at a time, in memory that stays in the cache
TINY = torch.finfo(torch.float32).tiny


class Bfloat16Linear(CachingLinear):
    """`torch.nn.Linear` with float32 weights and products in bfloat16, summed in float32.

    Weights are rounded once (`cached`), and packed where that is faster; in calls with gradients, in graphs and
    transforms, and on accelerators, they are rounded in every call.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.Linear`, the result in the dtype of the input."""
        rows, weight, bias = input.bfloat16(), self.weight, None if self.bias is None else self.bias.bfloat16()
        often = has_gradients(input, weight, self.bias) or is_traced() or is_transformed()
        if weight.device.type != "cpu" or often:
            return nn.functional.linear(rows, weight.bfloat16(), bias).to(input.dtype)
        if packed_rows(torch.bfloat16) and fits_onednn_linear(input, weight, self.bias):
            return onednn_linear(rows, cached(self, _pack_bfloat16), bias).to(input.dtype)
        return nn.functional.linear(rows, cached(self, torch.Tensor.bfloat16), bias).to(input.dtype)


def _pack_bfloat16(weight: torch.Tensor) -> torch.Tensor:
    return pack_weight(weight.bfloat16())


class Int8Linear(CachingLinear):
    """`torch.nn.Linear` with products of int8, for inference; in training and with gradients it computes in float32.

    Activations have a scale for each token and weights one for each output feature: a token with large values, as
    BERTs have them, costs others nothing, and padding changes no number (Dettmers et al. 2022, arXiv 2208.07339, §2).
    The weights are rounded once (`cached`), and in a graph (`torch.compile`) in every call.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.Linear`."""
        weight = self.weight
        fits = weight.dtype == input.dtype == torch.float32 and weight.device.type == "cpu" and weight.numel() > 0
        is_exact = self.training or has_gradients(input, weight, self.bias) or torch.is_autocast_enabled("cpu")
        if is_exact or not fits:
            return linear(input, weight, self.bias)
        if is_traced() or is_transformed():  # a graph that held the kept one would not see that the weight changes
            return multiply_int8(input, round_weight(weight), self.bias)
        return multiply_int8(input, cached(self, pack_rounded if int8_rates().is_packed else round_weight), self.bias)


KINDS: dict[str, type[nn.Linear]] = {"bfloat16": Bfloat16Linear, "int8": Int8Linear}


class HalfLinear(CachingLinear):
    """`torch.nn.Linear` with weights in half precision, and products in float32 in inference, of a kept copy."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.Linear`."""
        weight, bias = self.weight, self.bias
        is_half = input.dtype == weight.dtype and input.dtype in HALF and input.device == torch.device("cpu")
        often = has_gradients(input, weight, bias) or is_traced() or is_transformed()
        if not is_half or often or torch.is_autocast_enabled("cpu"):
            return nn.functional.linear(input, weight, bias)
        rows, wide = input.float(), cached(self, torch.Tensor.float)
        return linear(rows, wide, None if bias is None else bias.float()).to(input.dtype)


class Rounded(NamedTuple):
    """A weight, (E, D), in int8.

    Attributes:
        matrix: transposed, (D, E); or as `pack_int8` has it.
        scales: of each output feature, (E,).
        zeros: as many zeros, if it is packed.
    """

    matrix: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None


def round_weight(weight: torch.Tensor) -> Rounded:
    """Round a weight, (E, D)."""
    scales = weight.abs().amax(1).clamp(min=TINY) / LARGEST
    return Rounded((weight / scales[:, None]).round().to(torch.int8).t().contiguous(), scales)


def pack_rounded(weight: torch.Tensor) -> Rounded:
    """Round a weight, (E, D), and pack it."""
    matrix, scales, _ = round_weight(weight)
    return Rounded(pack_int8(matrix.t().contiguous()), scales, torch.zeros(len(scales), dtype=torch.int64))


def multiply_int8(input: torch.Tensor, weight: Rounded, bias: torch.Tensor | None) -> torch.Tensor:
    """The output of a linear layer, (…, E), of inputs, (…, D)."""
    rows = input.reshape(-1, input.shape[-1])
    # passes without new memory, which costs as much as the arithmetic
    steps = torch.maximum(rows.amax(-1, True), rows.amin(-1, True).neg_()).clamp_(min=TINY).div_(LARGEST)
    if rows.numel() <= BLOCK or is_traced():
        rounded = (rows / steps).round_().to(torch.int8)
    else:
        rounded, count = torch.empty_like(rows, dtype=torch.int8), -(-BLOCK // rows.shape[1])
        for into, *block in zip(*(each.split(count) for each in (rounded, rows, steps)), strict=True):
            into.copy_(torch.div(*block).round_())
    if weight.zeros is None:
        out = multiply_matrices_int8(rounded, weight.matrix).to(rows.dtype).mul_(weight.scales)
    else:
        out = multiply_packed_int8(rounded, weight.matrix, weight.scales, weight.zeros)
    out = out.mul_(steps) if bias is None else torch.addcmul(bias, out, steps, out=out)
    return out.view(*input.shape[:-1], out.shape[1])


class Int8Rates(NamedTuple):
    """Measured rates of linear layers on this machine, in GFLOP/s, with all passes that int8 needs.

    Attributes:
        float32: of the faster library.
        int8: of the faster kind of product.
        is_packed: whether that is oneDNN's, of packed weights, and not `torch._int_mm`.
    """

    float32: float
    int8: float
    is_packed: bool

    def __str__(self) -> str:
        faster = "faster" if self.is_faster else "slower"
        return f"{faster} than float32 on this machine ({self.int8:.0f} against {self.float32:.0f} GFLOP/s)"

    @property
    def is_faster(self) -> bool:
        """Whether int8 is faster than float32."""
        return self.int8 > self.float32


@functools.cache
def int8_rates() -> Int8Rates:
    """Measure the rates, once per process."""
    linear_library()  # measured before, since two measurements exclude each other
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.randn(size, generator=generator) for size in ((64, 768), (1536, 768), (1536,)))
    with torch.no_grad():
        rounded = round_weight(weight)
        runs = {"float32": lambda: linear(rows, weight, bias), "matrices": lambda: multiply_int8(rows, rounded, bias)}
        if has_packed_int8():
            packed = pack_rounded(weight)
            runs["packed"] = lambda: multiply_int8(rows, packed, bias)
            if not torch.allclose(runs["packed"](), runs["matrices"](), rtol=1e-4, atol=1e-3):
                del runs["packed"]
    taken = seconds_of(runs)
    rates = {name: 2 * rows.numel() * len(weight) / each / 1e9 for name, each in taken.items()}
    of_packed = rates.get("packed", 0.0)  # 0 where PyTorch has them not, or they differ from the other
    return Int8Rates(rates["float32"], max(rates["matrices"], of_packed), of_packed > rates["matrices"])
