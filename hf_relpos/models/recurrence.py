"""Segment recurrence with memory (Dai et al., Transformer-XL, arXiv 1901.02860, §3.2).

Every layer also attends to its inputs for earlier segments, to the left of the current segment. They are constants:
gradients reach the key and value projections through them, but not earlier segments. A memory holds real tokens only,
without padding, and no tokens of a document that has ended.
"""

import functools
import inspect
from dataclasses import dataclass, make_dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput

from ..attention.context import Positions
from ..attention.masks import is_visible
from ..host.tracing import is_traced
from ..host.transformers import BertForPreTrainingOutput
from .installed import INSTALLED
from .sequence import (
    Rows,
    SequenceMetadata,
    document_numbers,
    documents_and_gaps,
    largest_distance,
    position_steps,
    token_mask,
)


@dataclass
class SegmentMemory(ModelOutput):
    """The layer inputs of the last M tokens of every row.

    Attributes:
        states: one tensor (B, M, D) per layer, without a gradient.
        mask: boolean (B, M), True for a token. The tokens of a row are at its end, without gaps, so that the next
            segment follows on the right.
    """

    # always set; ModelOutput requires defaults
    states: tuple[torch.Tensor, ...] = None  # type: ignore[assignment]
    mask: torch.Tensor = None  # type: ignore[assignment]

    @property
    def length(self) -> int:
        """M, tokens of the longest row."""
        return self.mask.shape[1]

    def reset(self, rows: torch.Tensor) -> "SegmentMemory":
        """A memory in which some rows are empty.

        Args:
            rows: boolean (B,), True for rows to empty, where a new document begins.
        """
        return SegmentMemory(self.states, self.mask & ~rows.to(self.mask.device)[:, None])

    def select(self, rows: torch.Tensor) -> "SegmentMemory":
        """Select or reorder rows, such as the remaining beams.

        Args:
            rows: numbers of rows, (N,), which may repeat.
        """
        rows = rows.to(self.mask.device)
        return SegmentMemory(tuple(state.index_select(0, rows) for state in self.states), self.mask[rows])

    def with_segment(self, hidden_states: torch.Tensor, layer: int) -> torch.Tensor:
        """The states of this memory for a layer, and after them those of a segment, (B, L, D): (B, M + L, D)."""
        states = self.states[layer].detach().to(hidden_states.device, hidden_states.dtype)
        return torch.cat([states, hidden_states], dim=1)

    def before(self, sequence: SequenceMetadata, position_ids: torch.Tensor | None) -> "MetadataWithMemory":
        """The keys of this memory in front of those of a sequence, which covers the segment and the cache only.

        Raises:
            ValueError: for a prepared mask that does not show where rows begin.
        """
        rows, context = sequence.rows, sequence.context
        batch, device, attention_mask = rows.batch, rows.tokens.device, rows.attention_mask
        keys, before, memory_mask = context.key_length, self.length, self.mask.to(device)
        if attention_mask is not None and attention_mask.dim() == 4 and sequence.config.attention_window:
            needs = "a memory with attention_window needs (batch, length); of `generate`, a dynamic cache"
            raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; {needs}")
        is_token = token_mask(attention_mask, batch, keys, device)
        with_memory = torch.cat([memory_mask, is_token], dim=-1)
        ids, documents, positions, has_gaps = None, None, None, False
        if position_ids is not None:
            ids = position_ids.expand(batch, -1).to(device)
            documents, has_gaps = documents_and_gaps(ids, is_token)
            documents = None if documents is None else nn.functional.pad(documents, (before, 0))
        # padding between the memory and the segment, or within it
        begins = with_memory & ~nn.functional.pad(with_memory, (1, 0))[:, :-1]
        has_holes = attention_mask is not None and (is_traced() or bool((begins.sum(-1) > 1).any()))
        if has_holes or has_gaps:
            if ids is None or is_traced():  # a graph cannot read the ids: it assumes consecutive tokens
                ids = (is_token.long().cumsum(-1) - 1).clamp(min=0)
            positions = _positions_with_memory(memory_mask, is_token, ids)
        rules = replace(sequence.visibility, documents=documents, index_in_document=None, is_token=with_memory)
        if positions is not None:  # padding between the memory and the segment must not count as distance
            rules = replace(rules, positions=positions.of_keys)
        prepared = None
        if attention_mask is not None and rows.key_mask is None:
            rules = replace(rules, is_causal=False)  # the caller's mask says which keys are later
            prepared = is_visible(attention_mask).expand(batch, -1, context.query_length, -1)
            prepared = torch.cat([memory_mask[:, None, None].expand(*prepared.shape[:-1], -1), prepared], dim=-1)
        tokens, start = context.tokens._replace(real=with_memory), context.start + before
        context = replace(context, key_length=before + keys, start=start, positions=positions, tokens=tokens)
        return MetadataWithMemory(sequence.config, rows, context, rules, prepared=prepared)


@dataclass(frozen=True)
class MetadataWithMemory(SequenceMetadata):
    """A sequence whose first keys are those of a memory.

    Attributes:
        prepared: boolean (B, 1 or H, L, K), a mask that the caller prepared, after the memory's; or None.
    """

    prepared: torch.Tensor | None = None

    def tensor_mask(self, states: torch.Tensor) -> torch.Tensor | None:
        """The mask of all pairs, boolean (B, 1 or H, L, K); None if every query attends to every key."""
        context, rules, window, device = self.context, self.visibility, self.config.attention_window, states.device
        # a single last query attends to all keys, as in an encoder
        causal = rules.is_causal and (context.query_length > 1 or isinstance(context.start, torch.Tensor))
        is_plain = not causal and window is None and rules.documents is None and self.prepared is None
        if is_plain and not is_traced() and rules.is_token is not None and bool(rules.is_token.all()):
            return None
        row = torch.arange(self.rows.batch, device=device)[:, None, None]
        key = torch.arange(context.key_length, device=device)
        query = (torch.arange(context.query_length, device=device) + context.start)[:, None]
        visible = rules.sees(row, query, key, window)[:, None]
        if self.prepared is not None:
            visible = visible & self.prepared
        return visible.expand(-1, -1, context.query_length, -1)


def _positions_with_memory(memory_mask: torch.Tensor, is_token: torch.Tensor, ids: torch.Tensor) -> Positions:
    """Positions of all keys, (B, M + K); `ids` are those of the keys after the memory."""
    first = ids.gather(1, is_token.long().argmax(-1, keepdim=True))
    left = first - memory_mask.long().flip(-1).cumsum(-1).flip(-1)
    positions, real = torch.cat([left, ids], dim=-1), torch.cat([memory_mask, is_token], dim=-1)
    # padding gets the position of a token, so that it does not increase the largest distance
    positions = torch.where(real, positions, positions.gather(1, real.long().argmax(-1, keepdim=True)))
    return Positions(positions, positions.shape[1] - 1 if is_traced() else largest_distance(positions))


def check_memory(config: PreTrainedConfig, memory: SegmentMemory, batch: int) -> None:
    """Reject a memory that does not fit the model or the rows of the segment.

    Raises:
        TypeError: for a value that is not a SegmentMemory.
        ValueError: for a model without memory, a different number of layers, rows or features, or more tokens than
            `memory_length`.
    """
    if not isinstance(memory, SegmentMemory):
        raise TypeError(f"memory is a {type(memory).__name__}; give the `memory` of the outputs of the last segment")
    if not config.memory_length:
        raise ValueError("memory was given, and config.memory_length = 0; set it to the number of tokens to keep")
    if INSTALLED.checks is not None and not is_traced():
        INSTALLED.checks.check_memory_settings(config)  # memory_length may have been set since
    rows, length = memory.mask.shape
    if (layers := len(memory.states)) != config.num_hidden_layers:
        raise ValueError(f"memory has {layers} layers, but the model has {config.num_hidden_layers}; pass its own")
    shapes, expected = {tuple(state.shape) for state in memory.states}, (rows, length, config.hidden_size)
    if shapes != {expected}:
        needs = f"hidden_size = {config.hidden_size} needs {expected}"
        raise ValueError(f"memory has states of shapes {shapes}, and {needs}; does it come from another model?")
    if rows != batch:
        raise ValueError(f"memory has {rows} rows, but the segment has {batch}; select rows with memory.select(rows)")
    if length > config.memory_length:
        raise ValueError(f"memory has {length} tokens, but config.memory_length = {config.memory_length}; raise it")


def _tokens_to_keep(memory: SegmentMemory | None, rows: Rows) -> torch.Tensor:
    """Which tokens of a memory and of the segment after it the next segment may attend to, boolean (B, M + L).

    Only the last document of a row is kept. A token to which no query attends by a prepared mask is padding.
    """
    device = rows.tokens.device
    is_token = token_mask(rows.attention_mask, rows.batch, rows.length, device)
    keep = is_token if memory is None else torch.cat([memory.mask.to(device), is_token], dim=-1)
    if rows.position_ids is not None:
        ids = rows.position_ids.expand(rows.batch, -1).to(device)
        documents = document_numbers(*position_steps(ids, is_token))
        documents = nn.functional.pad(documents, (keep.shape[1] - rows.length, 0))
        keep = keep & (documents == documents[:, -1:])
    return keep


@torch.no_grad()
def next_memory(
    memory: SegmentMemory | None, inputs: tuple[torch.Tensor, ...], rows: Rows, length: int
) -> SegmentMemory:
    """The memory for the next segment: the last tokens of a memory and of the segment after it.

    Args:
        inputs: the input of each layer, (B, L, D).
        rows: the segment.
        length: maximum number of tokens to keep.
    """
    keep = _tokens_to_keep(memory, rows)
    joined = [
        state.detach() if memory is None else torch.cat([old.to(state.device, state.dtype), state.detach()], dim=1)
        for old, state in zip(inputs if memory is None else memory.states, inputs, strict=True)
    ]
    if rows.attention_mask is None and rows.position_ids is None:  # consecutive tokens up to the end of each row
        return SegmentMemory(tuple(state[:, -length:].clone() for state in joined), keep[:, -length:].clone())
    # moves tokens to the right, in their order
    order = keep.to(torch.uint8).argsort(dim=-1, stable=True)[:, -length:]
    states = tuple(state.take_along_dim(order.to(state.device)[..., None], 1) for state in joined)
    return SegmentMemory(states, keep.gather(1, order))


# Outputs -----------------------------------------------------------------------------------------------------------


def _outputs_with_memory(kind: type[ModelOutput]) -> type[ModelOutput]:
    """A class of outputs of Transformers with a field `memory` more."""
    field = ("memory", SegmentMemory | None, None)
    made = make_dataclass(f"{kind.__name__}WithMemory", [field], bases=(kind,), namespace={"__module__": __name__})
    globals()[made.__name__] = made  # where pickles look
    return made


WITH_MEMORY: dict[type[ModelOutput], type[ModelOutput]] = {
    kind: _outputs_with_memory(kind)
    for kind in (
        BaseModelOutputWithPoolingAndCrossAttentions,
        BertForPreTrainingOutput,
        CausalLMOutputWithCrossAttentions,
        MaskedLMOutput,
        MultipleChoiceModelOutput,
        NextSentencePredictorOutput,
        QuestionAnsweringModelOutput,
        SequenceClassifierOutput,
        TokenClassifierOutput,
    )
}


def with_memory(stock: Any) -> Any:
    """The `forward` of a head with `memory` among its arguments and outputs."""
    signature = inspect.signature(stock)
    own = inspect.Parameter("memory", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=SegmentMemory | None)
    parameters = list(signature.parameters.values())
    index = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, memory: SegmentMemory | None = None, **kwargs: Any) -> Any:
        if memory is None and not self.config.memory_length:
            return stock(self, *args, **kwargs)
        left: list[SegmentMemory] = []  # filled by the base model, since stock heads build their own outputs
        outputs = stock(self, *args, memory=memory, memory_sink=left, **kwargs)
        if not left:
            return outputs
        if isinstance(outputs, tuple):
            return (*outputs, left[0])
        return WITH_MEMORY[type(outputs)](**outputs, memory=left[0])

    replaced = signature.replace(parameters=[*parameters[:index], own, *parameters[index:]])
    forward.__signature__ = replaced  # type: ignore[attr-defined]
    return forward


__all__ = ["SegmentMemory"]
