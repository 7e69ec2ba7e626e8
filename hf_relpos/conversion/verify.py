"""Verify the result against its source: all written tensors, and the outputs if they must be equal."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from ..checkpoints.errors import ConversionError, conversion_errors
from ..families.bert import Own
from ..families.family import FIELD_ERRORS, NOT_KEPT, Family
from ..families.joints import Tensors
from ..families.tensors import Checkpoint
from .build import ARCHITECTURES
from .plan import Conversion
from .report import Step


# Sums of tensors are rounded to the weights' dtype; outputs may then differ by this many times its precision.
ROUNDING = 32


def compare_tensors(
    model: PreTrainedModel, reloaded: PreTrainedModel, source: Checkpoint, steps: tuple[Step, ...]
) -> None:
    """Check that reloaded tensors equal the written ones, and reused tensors those of the source.

    Raises:
        ConversionError: names the first tensor that differs.
    """
    written, read = model.state_dict(), reloaded.state_dict()
    reused = {step.target for step in steps if step.kind == "reused"}
    for name in written.keys() | read.keys():
        intact = name in written and name in read and identical(written[name], read[name])
        if not intact or (name in reused and not identical(read[name], source.tensors[name])):
            damage = f"{name} differs from what was written when it is read back, so the result was removed"
            raise ConversionError(f"{damage}; check the disk, and report this if it happens again")


def identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtypes, shapes and values are equal."""
    return one.dtype == other.dtype and torch.equal(one, other)


@torch.no_grad()
def compare_outputs(conversion: Conversion, model: PreTrainedModel, rounded: bool) -> float:
    """Run the source and the result on one random batch, both in float64.

    Args:
        conversion: with a source that has a class.
        model: the result, which is left in float64.
        rounded: whether the result has sums of tensors, which are rounded to the dtype of the source.

    Returns:
        Largest difference of an output, relative to the largest value of that output. Outputs at padding are ignored
        if padding has other positions, or attends to nothing.

    Raises:
        ConversionError: for a difference that is not due to rounding.
    """
    source, spec = conversion.source, conversion.spec
    tolerance = max(spec.tolerance, ROUNDING * torch.finfo(source.dtype).eps if rounded else 0.0)
    config = model.config
    length = min(16, config.max_position_embeddings, spec.fields["max_position_embeddings"])
    shape = (1, 2, length) if spec.architecture == "BertForMultipleChoice" else (2, length)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        original = source_model(conversion, model)
        mask = torch.ones(shape, dtype=torch.long)
        mask[..., -1, length // 2 + 1 :] = 0  # the last row is padded
        batch: dict[str, Any] = {
            "input_ids": torch.randint(config.vocab_size, shape),
            "token_type_ids": torch.randint(max(config.type_vocab_size, 1), shape),
            "attention_mask": mask,
            "return_dict": True,  # overrides the configuration
        }
        if config.is_decoder and config.add_cross_attention:
            batch["encoder_hidden_states"] = torch.randn(2, 5, config.hidden_size, dtype=torch.float64)
    real = mask.bool()
    real_only = bool(spec.cut) or spec.masks_queries
    if spec.cut:
        padding = spec.cut - 1
        ids = batch["input_ids"]
        ids[ids == padding] = (padding + 1) % config.vocab_size
        ids[~real] = padding
    if not spec.has_token_types:
        del batch["token_type_ids"]
    expected = original(**batch)
    del original  # only one float64 model is kept in memory
    outputs = model.double().eval()(**batch)
    differences = []
    for name, one in expected.items():
        if not isinstance(one, torch.Tensor):  # a memory, a cache, or the states of all layers
            continue
        other = outputs[name]
        if real_only and (one.dim() == 3 or name in ("start_logits", "end_logits")):  # outputs per token
            one, other = one[real], other[real]
        differences.append((one - other).abs().max() / one.abs().max().clamp_min(1e-30))
    worst = float(torch.stack(differences).max())  # keeps NaN
    if not worst <= tolerance:
        gap = f"outputs of the result differ from the source's by {worst:.1e} of the largest value"
        raise ConversionError(f"{gap}, so it was removed; please report this")
    return worst


def source_model(conversion: Conversion, model: PreTrainedModel) -> PreTrainedModel:
    """The source as a model of its own class.

    That is the class in Transformers, with relative attention as it was until 4.57: not the schemes of this package
    but `LegacySelfAttention` computes the relative terms. A source of this package is loaded with `from_pretrained`.

    Args:
        conversion: with a source that has a class.
        model: the result, for tensors that the source lacks (a new pooler).

    Returns:
        A model in float64, eval mode.
    """
    source, spec = conversion.source, conversion.spec
    if isinstance(spec, Own):
        kind = ARCHITECTURES[spec.architecture]
        given: dict[str, Any] = {"attn_implementation": "eager", "local_files_only": True}
        own = kind.from_pretrained(spec.folder, dtype=torch.float64, **given)
        for name, tensor in own.state_dict().items():
            if name not in source.tensors:
                tensor.copy_(model.state_dict()[name])
        return own.eval()
    kept = {name: value for name, value in spec.config.items() if name not in NOT_KEPT}
    with conversion_errors(f"{spec.folder / 'config.json'}: ", FIELD_ERRORS):  # values that Transformers rejects
        config = CONFIG_MAPPING[str(spec.stock)].from_dict(kept)
    config._attn_implementation = "eager"
    base = spec.architecture == "BertModel"
    name = spec.architecture if spec.stock == "bert" else spec.head
    stock = getattr(transformers, name)(config)
    tensors = {**model.state_dict(), **source.tensors}
    tensors |= {name: torch.cat([front, source.tensors[name]]) for name, front in source.cut.items()}
    if (terms := spec.legacy_terms) is not None:
        stock.base_model.embeddings.position_embeddings = NoPositions()
        prefix = "" if base else "bert."
        for number, layer in enumerate(stock.base_model.encoder.layer):
            table = source.tensors.get(f"{prefix}encoder.layer.{number}.attention.self.distance_embedding.weight")
            layer.attention.self = LegacySelfAttention(layer.attention.self, terms, spec.positions.options, table)
    stock = stock.double().eval()
    stock.load_state_dict(under_own_names(spec, stock.state_dict(), tensors))
    return stock


def under_own_names(spec: Family, own: Tensors, tensors: Tensors) -> Tensors:
    """Convert tensors to the names and layout of the source's class.

    Args:
        spec: description of the source.
        own: state dict of that class, for its names and shapes.
        tensors: tensors with the names of stock BERT.
    """
    base = spec.architecture == "BertModel"
    return spec.pack({name: tensors[spec.rename(name, base)[0]] for name in spec.unpack(own)})


class NoPositions(nn.Module):
    """Placeholder for the absolute position embeddings of a model without them."""

    def forward(self, position_ids: torch.Tensor) -> float:
        """Zero, which is added to the embeddings."""
        return 0.0


class LegacySelfAttention(nn.Module):
    """The relative self-attention of Transformers 4.57, with a vector for every pair: slow, but easy to read."""

    def __init__(self, stock: Any, terms: str, options: Mapping[str, Any], table: torch.Tensor | None):
        """
        Args:
            stock: the absolute self-attention, with the same projections.
            terms: letters of its terms, as in `LEGACY_TERMS`.
            options: options of its scheme.
            table: (2N − 1, d), vectors for query index − key index = −N + 1 to N − 1; None if they are computed.
        """
        super().__init__()
        self.query, self.key, self.value = stock.query, stock.key, stock.value
        self.head_size = int(stock.attention_head_size)
        self.terms = terms
        self.clip: int = options.get("max_relative_position", 0)
        self.table = None if table is None else table.double()

    def relations(self, length: int) -> torch.Tensor:
        """The vector of every pair i, j: (L, L, d)."""
        positions = torch.arange(length)
        if self.table is not None:
            return self.table[positions[:, None] - positions[None] + len(self.table) // 2]
        row = (positions[None] - positions[:, None]).clamp(-self.clip, self.clip) + self.clip
        steps = torch.arange(0, self.head_size, 2, dtype=torch.float64)
        angles = row[..., None] * torch.exp(steps * (-math.log(10000.0) / self.head_size))
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map hidden_states (B, L, D) and an additive mask to (B, L, D) and the weights (B, H, L, L)."""
        projected = (linear(hidden_states) for linear in (self.query, self.key, self.value))
        query, key, value = (each.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for each in projected)
        relations = self.relations(hidden_states.shape[1])
        scores = query @ key.transpose(-1, -2)
        if "A" in self.terms:
            scores = scores + torch.einsum("bhid,ijd->bhij", query, relations)
        if "B" in self.terms:
            scores = scores + torch.einsum("bhjd,ijd->bhij", key, relations)
        scores = scores / math.sqrt(self.head_size)
        weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
        out = weights @ value
        if "V" in self.terms:
            out = out + torch.einsum("bhij,ijd->bhid", weights, relations)
        return out.transpose(1, 2).flatten(2), weights
