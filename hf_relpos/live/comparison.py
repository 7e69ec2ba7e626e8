"""Compare the outputs and the time of a model with those before a change, on a sample of its inputs.

What is measured is a copy of the model that shares its weights, in evaluation mode. The model itself, which another
thread may be calling or training, is left alone.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .arguments import parameters_of
from .find import tokenizer_of
from .guard import Guard
from .probe import Probe, padding_tokens, tensors_in
from .shadow import shadow


ROWS, SHORTEST, LONGEST = 32, 8, 64  # of a batch of random tokens, and their lengths
DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")

Sample = Sequence[str] | Mapping[str, torch.Tensor] | None


@dataclass(frozen=True)
class Agreement:
    """How close the outputs of a model on a sample are to those before a change.

    Attributes:
        rows: how many were compared.
        cosine: mean of the rows' cosines, of logits or of the mean of a row's states.
        least: the smallest.
        largest: the largest difference of a logit, or of a state of a real token, as a share of the largest value.
        padding: the same of the states at padding; None for logits of rows, and without padding.
        decisions: share of rows with the same largest logit, or the same sign of a single one; None for states.
        in_float32: names of the linear layers that stay in float32.
        source: what the rows are.
        seconds: of the wall for the sample, as one batch, before and now.
    """

    rows: int
    cosine: float
    least: float
    largest: float
    padding: float | None
    decisions: float | None
    in_float32: tuple[str, ...]
    source: str
    seconds: tuple[float, float]

    @property
    def cosines(self) -> str:
        """Mean and least cosine, and how many layers stay in float32 for them."""
        kept = f"; {len(self.in_float32)} layers stay in float32" if self.in_float32 else ""
        return f"cosine {self.cosine:.4f}, least {self.least:.4f}{kept}"

    def __str__(self) -> str:
        same = "" if self.decisions is None else f", {100 * self.decisions:.1f} % same decisions"
        at_padding = ""
        if self.padding is not None:
            why = ", as unpadding sets them to zero" if self.padding > self.largest else ""
            at_padding = f"\nstates at padding: largest difference {self.padding:.0e} of the largest value{why}"
        return (
            f"agreement with the model before, on {self.rows} sequences of {self.source}: {self.cosines}{same}; "
            f"largest difference {self.largest:.0e} of the largest value; {self.seconds[0]:.2g} s before, "
            f"{self.seconds[1]:.2g} s now{at_padding}"
        )


class Comparison:
    """The outputs of a model on a sample before a change, to compare later outputs with."""

    def __init__(self, owner: Any, root: nn.Module, sample: Sample) -> None:
        """
        Args:
            owner: what the user gave, which may have a tokenizer.
            root: its module.
            sample: texts, or inputs of the model; None for random tokens of its vocabulary.

        Raises:
            ValueError: for a module that has no model of Transformers inside, or whose forward writes to its weights,
                and for texts without a tokenizer.
        """
        model = next((module for module in root.modules() if isinstance(module, PreTrainedModel)), None)
        if model is None:
            raise ValueError(
                "dtype = 'int8' or 'auto', and a sample, are for a PreTrainedModel; "
                f"{type(root).__name__} has none inside"
            )
        self.batch, self.source = _batch(owner, root, model, sample)
        if getattr(model.config, "is_encoder_decoder", False) and not self.batch.keys() & {*DECODER_INPUTS}:
            model = model.get_encoder()  # which is all that is changed
        self.model = model
        self.expected, self.seconds = self.timed(shadow(self.model))

    def timed(self, model: nn.Module) -> tuple[torch.Tensor, float]:
        """Return the outputs, and the seconds of a second call: the first compiles kernels and allocates memory."""
        with Guard(model):
            self.outputs(model)
        start = time.perf_counter()
        return self.outputs(model), time.perf_counter() - start

    @torch.no_grad()
    def outputs(self, model: nn.Module) -> torch.Tensor:
        """Logits (B, C), or states of all positions (B, L, C)."""
        return next(each for _, each in tensors_in(model(**self.batch)) if each.dim() > 1)

    def agreement(self, model: nn.Module, in_float32: tuple[str, ...] = ()) -> Agreement:
        """Compare the outputs of a copy with those before."""
        outputs, seconds = self.timed(model)
        found, expected = outputs.double(), self.expected.double()
        differences, padding = (found - expected).abs(), None
        mask = self.batch.get("attention_mask")
        if mask is not None and found.dim() == 3 and mask.shape == found.shape[:2]:  # states of positions
            real = mask.bool()[..., None]
            largest = expected.where(real, 0.0).abs().max()
            if not bool(real.all()):
                padding = float(differences.where(~real, 0.0).max() / largest)
            found, expected, differences = (each.where(real, 0.0) for each in (found, expected, differences))
        cosines = nn.functional.cosine_similarity(_means(found), _means(expected), dim=-1)
        return Agreement(
            rows=len(cosines),
            cosine=float(cosines.mean()),
            least=float(cosines.min()),
            largest=float(differences.max() / expected.abs().max()),
            padding=padding,
            decisions=_same_decisions(self.model, found, expected),
            in_float32=in_float32,
            source=self.source,
            seconds=(self.seconds, seconds),
        )


def _batch(owner: Any, root: nn.Module, model: PreTrainedModel, sample: Sample) -> tuple[dict[str, Any], str]:
    """Return inputs of the model, and a description of them."""
    if isinstance(sample, Mapping):
        return {name: value for name, value in sample.items() if name != "labels"}, "the given inputs"
    if sample is not None:
        texts = [sample] if isinstance(sample, str) else list(sample)
        if not texts:
            raise ValueError("sample = []: give at least one text, or leave it out")
        names, takes_others = parameters_of(type(model).forward)
        found = {name: each for name, each in _tokenized(owner, root, texts).items() if torch.is_tensor(each)}
        return {name: each for name, each in found.items() if name in names or takes_others}, "the given texts"
    positions = getattr(model.config, "max_position_embeddings", None) or LONGEST + 2
    longest = min(LONGEST, max(positions - 2, 1))  # two rows of RoBERTa's table are no positions
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(min(SHORTEST, longest), longest + 1, (ROWS,), generator=generator)
    lengths = lengths.sort(descending=True).values
    probe = Probe(model, lengths.tolist(), padding_tokens(None, model), ("right",))
    return {"input_ids": probe.ids, "attention_mask": probe.real.long()}, "random tokens"


def _tokenized(owner: Any, root: nn.Module, texts: list[str]) -> Any:
    """Tokenize texts with the tokenizer of a model or of the object around it."""
    tokenizer = tokenizer_of(owner, root)
    if callable(tokenizer):
        most = getattr(root, "max_seq_length", None) or min(tokenizer.model_max_length, 512)
        return tokenizer(texts, padding=True, truncation=True, max_length=most, return_tensors="pt")
    for holder in (owner, root):
        if callable(tokenize := getattr(holder, "tokenize", None)) and isinstance(made := tokenize(texts), Mapping):
            return made
    raise ValueError(
        f"sample has texts, and {type(owner).__name__} has no tokenizer; give the model's inputs instead: "
        "tokenizer(texts, padding=True, return_tensors='pt')"
    )


def _means(out: torch.Tensor) -> torch.Tensor:
    """(B, C): the logits of a row, or the sum of the states of its tokens, which has the direction of their mean."""
    return out if out.dim() == 2 else out.sum(1)


def _same_decisions(model: PreTrainedModel, found: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Return the share of sequences with the same decision, for sequence classifiers."""
    if "Classification" not in type(model).__name__ or "Token" in type(model).__name__:
        return None
    ours, theirs = (each > 0 if each.shape[1] == 1 else each.argmax(1) for each in (found, expected))
    return float((ours == theirs).double().mean())
