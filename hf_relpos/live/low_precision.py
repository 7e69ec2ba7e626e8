"""Linear layers that multiply in a lower precision than their weights have, and which of them do harm in int8."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention.cpu_gemm import has_gradients, linear
from ..attention.tracing import is_traced, is_transformed
from ..attention.weight_cache import CachingLinear, cached, forget
from ..host.torch import multiply_matrices_int8


LARGEST = 127  # of an int8, on both sides of zero
TINY = torch.finfo(torch.float32).tiny
# A layer stays in float32 whose output has a larger error, as a share of its norm.
LARGEST_ERROR = 0.1
# So many of the layers with the largest errors stay in float32, one share after the other, until rows agree.
SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
LEAST_COSINE = 0.995  # mean over the rows
ROWS, SHORTEST, LONGEST = 32, 8, 64  # of a batch of random tokens, and their lengths

Sample = Sequence[str] | Mapping[str, torch.Tensor] | None


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


@dataclass(frozen=True)
class Agreement:
    """The outputs of a model on a sample beside those that it had before.

    Attributes:
        rows: how many were compared.
        cosine: mean of the rows' cosines, of logits or of the mean of a row's states.
        least: the smallest.
        largest: the largest difference of a logit or state, as a share of the largest value.
        decisions: share of rows with the same largest logit, or the same sign of a single one; None for states.
        in_float32: names of the linear layers that stay in float32.
        source: what the rows are.
        seconds: of the wall for the sample, as one batch, before and now.
    """

    rows: int
    cosine: float
    least: float
    largest: float
    decisions: float | None
    in_float32: tuple[str, ...]
    source: str
    seconds: tuple[float, float]

    def __str__(self) -> str:
        same = "" if self.decisions is None else f", {100 * self.decisions:.1f} % same decisions"
        kept = f"; {len(self.in_float32)} layers stay in float32" if self.in_float32 else ""
        return (
            f"agreement with the model before, on {self.rows} rows of {self.source}: cosine {self.cosine:.4f}, least "
            f"{self.least:.4f}{same}; largest difference {self.largest:.0e} of the largest value{kept}; "
            f"{self.seconds[0]:.2g} s before, {self.seconds[1]:.2g} s now"
        )


class Comparison:
    """The outputs of a model on a sample before a change, to compare those after it with."""

    def __init__(self, owner: Any, root: nn.Module, sample: Sample) -> None:
        """
        Args:
            owner: what the user gave, which may have a tokenizer.
            root: its module.
            sample: texts, or inputs of the model; None for random tokens of its vocabulary.

        Raises:
            ValueError: for a module that has no model of Transformers inside, or texts without a tokenizer.
        """
        model = next((module for module in root.modules() if isinstance(module, PreTrainedModel)), None)
        if model is None:
            raise ValueError(
                f"precision = 'int8' and a sample are for a PreTrainedModel; {type(root).__name__} has none inside"
            )
        self.model = model
        self.batch, self.source = _batch(owner, root, model, sample)
        self.expected, self.seconds = self.timed()

    def timed(self) -> tuple[torch.Tensor, float]:
        """The outputs, and the seconds of a second call: in the first, kernels are compiled and memory is new."""
        self.outputs()
        start = time.perf_counter()
        return self.outputs(), time.perf_counter() - start

    @torch.no_grad()
    def outputs(self) -> torch.Tensor:
        """Logits (B, C), or states of tokens (B, L, C), zeros where there is padding."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            out: torch.Tensor = self.model(**self.batch)[0]
        finally:
            for module in training:
                module.training = True
        mask = self.batch.get("attention_mask")
        return out if out.dim() == 2 or mask is None else out * mask.flatten(1)[..., None].to(out.dtype)

    def agreement(self, in_float32: tuple[str, ...] = ()) -> Agreement:
        """Of today's outputs with those before."""
        outputs, seconds = self.timed()
        found, expected = outputs.double(), self.expected.double()
        cosines = nn.functional.cosine_similarity(_means(found), _means(expected), dim=-1)
        return Agreement(
            rows=len(cosines),
            cosine=float(cosines.mean()),
            least=float(cosines.min()),
            largest=float((found - expected).abs().max() / expected.abs().max()),
            decisions=_same_decisions(self.model, found, expected),
            in_float32=in_float32,
            source=self.source,
            seconds=(self.seconds, seconds),
        )


def quantize(comparison: Comparison, layers: Sequence[nn.Linear]) -> Agreement:
    """Give layers the class `Int8Linear`, but for those that do harm."""
    names = {module: name for name, module in comparison.model.named_modules()}
    before = {layer: type(layer) for layer in layers}
    errors = _errors(comparison, layers)
    ranked = sorted(layers, key=lambda layer: errors.get(layer, 0.0), reverse=True)
    fewest = sum(errors.get(layer, 0.0) > LARGEST_ERROR for layer in layers)
    for share in SHARES:
        kept = ranked[: max(fewest, round(share * len(ranked)))]
        for layer in layers:
            layer.__class__ = before[layer] if layer in kept else Int8Linear
            forget(layer)
        agreement = comparison.agreement(tuple(names.get(layer, "?") for layer in kept))
        if agreement.cosine >= LEAST_COSINE:
            break
    return agreement


def _batch(owner: Any, root: nn.Module, model: PreTrainedModel, sample: Sample) -> tuple[dict[str, Any], str]:
    """Inputs of the model, and what they are."""
    if isinstance(sample, Mapping):
        return {name: value for name, value in sample.items() if name != "labels"}, "the given inputs"
    if sample is not None:
        tokenizer = getattr(owner, "tokenizer", None) or getattr(root, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(
                f"sample has texts, and {type(owner).__name__} has no tokenizer; give the model's inputs instead: "
                "tokenizer(texts, padding=True, return_tensors='pt')"
            )
        most = getattr(root, "max_seq_length", None) or min(tokenizer.model_max_length, 512)
        texts = [sample] if isinstance(sample, str) else list(sample)
        if not texts:
            raise ValueError("sample = []: give at least one text, or leave it out")
        batch = tokenizer(texts, padding=True, truncation=True, max_length=most, return_tensors="pt")
        return dict(batch), "the given texts"
    generator = torch.Generator().manual_seed(0)
    words = model.get_input_embeddings().weight.shape[0]
    lengths = torch.randint(SHORTEST, LONGEST + 1, (ROWS,), generator=generator)
    mask = (torch.arange(LONGEST) < lengths[:, None]).long()
    tokens = torch.randint(words // 4, words, mask.shape, generator=generator)
    padding = getattr(model.config, "pad_token_id", None) or 0
    return {"input_ids": tokens.where(mask == 1, torch.tensor(padding)), "attention_mask": mask}, "random tokens"


def _means(out: torch.Tensor) -> torch.Tensor:
    """(B, C): the logits of a row, or the sum of the states of its tokens, which has the direction of their mean."""
    return out if out.dim() == 2 else out.sum(1)


def _errors(comparison: Comparison, layers: Sequence[nn.Linear]) -> dict[nn.Linear, float]:
    """The error of each layer alone in int8, as a share of the norm of its output."""
    errors: dict[nn.Linear, float] = {}

    def compare(layer: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        rounded = multiply_int8(inputs[0], *round_weight(layer.weight), layer.bias)
        errors[layer] = max(errors.get(layer, 0.0), float((rounded - out).norm() / out.norm().clamp(min=1e-30)))

    hooks = [layer.register_forward_hook(compare) for layer in layers]
    try:
        comparison.outputs()
    finally:
        for hook in hooks:
            hook.remove()
    return errors


def _same_decisions(model: PreTrainedModel, found: torch.Tensor, expected: torch.Tensor) -> float | None:
    """The share of rows with the same decision, for models that decide on rows."""
    if "Classification" not in type(model).__name__ or "Token" in type(model).__name__:
        return None
    if found.shape[1] == 1:
        return float(((found > 0) == (expected > 0)).double().mean())
    return float((found.argmax(1) == expected.argmax(1)).double().mean())
