"""Linear layers that multiply in a lower precision than their weights have, and which of them do harm in int8."""

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..attention.cpu_gemm import has_gradients, linear, linear_library, packed_rows, seconds_of
from ..attention.tracing import is_traced, is_transformed
from ..attention.weight_cache import CachingLinear, cached
from ..host.torch import (
    fits_onednn_linear,
    has_packed_int8,
    multiply_matrices_int8,
    multiply_packed_int8,
    onednn_linear,
    pack_int8,
    pack_weight,
)
from .comparison import Agreement, Comparison
from .shadow import shadow


LARGEST = 127  # of an int8, on both sides of zero
BLOCK = 2**18  # elements of activations that are rounded at a time, in memory that stays in the cache
TINY = torch.finfo(torch.float32).tiny
# A layer stays in float32 whose output has a larger error, as a share of its norm.
LARGEST_ERROR = 0.1
# So many of the layers with the largest errors stay in float32, one share after the other, until rows agree.
SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
LEAST_COSINE = 0.995  # mean over the rows
TAKEN = f"; taken, the fastest with a mean cosine of {LEAST_COSINE} or more"


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
            or weight.numel() == 0
            or torch.is_autocast_enabled("cpu")
        ):
            return linear(input, weight, self.bias)
        if is_traced() or is_transformed():  # a graph that held the kept one would not see that the weight changes
            return multiply_int8(input, round_weight(weight), self.bias)
        return multiply_int8(input, cached(self, pack_rounded if int8_rates().is_packed else round_weight), self.bias)


KINDS: dict[str, type[nn.Linear]] = {"bfloat16": Bfloat16Linear, "int8": Int8Linear}


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


class Candidate(NamedTuple):
    """A precision, as a copy of the model has it.

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
    """Measure a precision of linear layers on a copy of the model; in int8 of those whose products do no harm."""
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
    """The precision that is asked for; for "auto" the fastest one whose rows agree."""
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
    """The error of each layer of a copy alone in int8, as a share of the norm of its output."""
    errors: dict[Any, float] = {}

    def compare(layer: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        rounded = multiply_int8(inputs[0], round_weight(layer.weight), layer.bias)
        errors[layer] = max(errors.get(layer, 0.0), float((rounded - out).norm() / out.norm().clamp(min=1e-30)))

    hooks = [layer.register_forward_hook(compare) for layer in layers]
    comparison.outputs(model)
    for hook in hooks:
        hook.remove()
    return errors
