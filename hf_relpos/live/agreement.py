"""Compare an optimised model with itself before, and select layers to keep in float32 of one in int8."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .low_precision import Int8Linear, multiply_int8, round_weight


# A layer stays in float32 whose output has a larger error, as a share of its norm.
LARGEST_ERROR = 0.1
# So many of the layers with the largest errors stay in float32, one share after the other, until rows agree.
SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
LEAST_COSINE = 0.995  # mean over the rows
ROWS, SHORTEST, LONGEST = 32, 8, 64  # of a batch of random tokens, and their lengths

Sample = Sequence[str] | Mapping[str, torch.Tensor] | None


@dataclass(frozen=True)
class Agreement:
    """The outputs of a model in int8 beside those in float32.

    Attributes:
        rows: how many were compared.
        cosine: mean of the rows' cosines, of logits or of the mean of a row's states.
        least: the smallest.
        decisions: share of rows with the same largest logit, or the same sign of a single one; None for states.
        in_float32: names of the linear layers that stay in float32.
        source: what the rows are.
    """

    rows: int
    cosine: float
    least: float
    decisions: float | None
    in_float32: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        same = "" if self.decisions is None else f", {100 * self.decisions:.1f} % same decisions"
        kept = f"; {len(self.in_float32)} layers stay in float32" if self.in_float32 else ""
        return (
            f"agreement with float32 on {self.rows} rows of {self.source}: cosine {self.cosine:.4f}, least "
            f"{self.least:.4f}{same}{kept}"
        )


class Before:
    """The outputs of a model on a sample before it is changed.

    Raises:
        ValueError: as `quantize`.
    """

    def __init__(self, owner: Any, root: nn.Module, sample: Sample) -> None:
        self.model = _model_in(root, "a sample")
        self.batch, self.source = _batch(owner, root, self.model, sample)
        self.outputs = self._run()

    def _run(self) -> torch.Tensor:
        with _in_evaluation(self.model):
            return _output(self.model, self.batch)

    def difference(self) -> str:
        """The largest difference of the outputs now, as a sentence."""
        share = float((self._run() - self.outputs).abs().max() / self.outputs.abs().max())
        return f"largest difference on {len(self.outputs)} rows of {self.source}: {share:.0e} of the largest value"


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Without gradients, and each module in evaluation."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in was_training:
            module.training = True


def _model_in(root: nn.Module, what: str) -> PreTrainedModel:
    model = next((module for module in root.modules() if isinstance(module, PreTrainedModel)), None)
    if model is None:
        raise ValueError(f"{what} is measured on a PreTrainedModel; {type(root).__name__} has none inside")
    return model


def quantize(owner: Any, root: nn.Module, layers: Sequence[nn.Linear], sample: Sample) -> Agreement:
    """Give layers the class `Int8Linear`, but for those that do harm.

    Args:
        owner: what the user gave, which may have a tokenizer.
        root: its module.
        layers: candidates.
        sample: texts, or inputs of the model; None for random tokens of its vocabulary.

    Raises:
        ValueError: for a module that has no model of Transformers inside, or texts without a tokenizer.
    """
    model = _model_in(root, "precision = 'int8'")
    batch, source = _batch(owner, root, model, sample)
    names = {module: name for name, module in model.named_modules()}
    before = {layer: type(layer) for layer in layers}
    with _in_evaluation(model):
        expected, errors = _measured(model, layers, batch)
        ranked = sorted(layers, key=lambda layer: errors.get(layer, 0.0), reverse=True)
        fewest = sum(errors.get(layer, 0.0) > LARGEST_ERROR for layer in layers)
        for share in SHARES:
            kept = ranked[: max(fewest, round(share * len(ranked)))]
            for layer in layers:
                layer.__class__ = before[layer] if layer in kept else Int8Linear
            found = _output(model, batch)
            cosines = nn.functional.cosine_similarity(found.double(), expected.double(), dim=-1)
            if float(cosines.mean()) >= LEAST_COSINE:
                break
    return Agreement(
        rows=len(cosines),
        cosine=float(cosines.mean()),
        least=float(cosines.min()),
        decisions=_same_decisions(model, found, expected),
        in_float32=tuple(names.get(layer, "?") for layer in kept),
        source=source,
    )


def _batch(owner: Any, root: nn.Module, model: PreTrainedModel, sample: Sample) -> tuple[dict[str, Any], str]:
    """Inputs of the model, and what they are."""
    if isinstance(sample, Mapping):
        return dict(sample), "the given inputs"
    if sample is not None:
        tokenizer = getattr(owner, "tokenizer", None) or getattr(root, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(
                f"sample has texts, and {type(owner).__name__} has no tokenizer; give the model's inputs instead: "
                "tokenizer(texts, padding=True, return_tensors='pt')"
            )
        most = getattr(root, "max_seq_length", None) or min(tokenizer.model_max_length, 512)
        batch = tokenizer(list(sample), padding=True, truncation=True, max_length=most, return_tensors="pt")
        return dict(batch), "the given texts"
    generator = torch.Generator().manual_seed(0)
    words = model.get_input_embeddings().weight.shape[0]
    lengths = torch.randint(SHORTEST, LONGEST + 1, (ROWS,), generator=generator)
    mask = (torch.arange(LONGEST) < lengths[:, None]).long()
    tokens = torch.randint(words // 4, words, mask.shape, generator=generator)
    padding = getattr(model.config, "pad_token_id", None) or 0
    return {"input_ids": tokens.where(mask == 1, torch.tensor(padding)), "attention_mask": mask}, "random tokens"


def _output(model: PreTrainedModel, batch: Mapping[str, Any]) -> torch.Tensor:
    """(B, C): the logits of a row, or the mean of the states of its tokens."""
    out: torch.Tensor = model(**batch)[0]
    if out.dim() == 2:
        return out
    mask = batch.get("attention_mask")
    mask = torch.ones(out.shape[:2]) if mask is None else mask
    mask = mask.to(out.dtype).flatten(1)[..., None]
    return (out * mask).sum(1) / mask.sum(1)


def _measured(
    model: PreTrainedModel, layers: Sequence[nn.Linear], batch: Mapping[str, Any]
) -> tuple[torch.Tensor, dict[nn.Linear, float]]:
    """The output in float32, and the error of each layer alone in int8, as a share of the norm of its output."""
    errors: dict[nn.Linear, float] = {}

    def compare(layer: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        rounded = multiply_int8(inputs[0], *round_weight(layer.weight), layer.bias)
        errors[layer] = max(errors.get(layer, 0.0), float((rounded - out).norm() / out.norm().clamp(min=1e-30)))

    hooks = [layer.register_forward_hook(compare) for layer in layers]
    try:
        return _output(model, batch), errors
    finally:
        for hook in hooks:
            hook.remove()


def _same_decisions(model: PreTrainedModel, found: torch.Tensor, expected: torch.Tensor) -> float | None:
    """The share of rows with the same decision, for models that decide on rows."""
    if "Classification" not in type(model).__name__ or "Token" in type(model).__name__:
        return None
    if found.shape[1] == 1:
        return float(((found > 0) == (expected > 0)).double().mean())
    return float((found.argmax(1) == expected.argmax(1)).double().mean())
