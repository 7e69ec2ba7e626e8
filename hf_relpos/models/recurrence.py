"""Segment recurrence with memory (Dai et al., Transformer-XL, arXiv 1901.02860, §3.2).

Every layer also attends to its inputs for earlier segments, to the left of the current segment. They are constants:
gradients reach the key and value projections through them, but not earlier segments. A memory holds real tokens only,
without padding, and no tokens of a document that has ended.
"""

import functools
import inspect
from dataclasses import dataclass, make_dataclass
from typing import Any

import torch
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

from ..attention.tracing import is_traced
from ..host.transformers import BertForPreTrainingOutput
from .saved_code.remote_code import installed


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
    checks = None if is_traced() else installed("models.checks")
    if checks is not None:
        checks.check_memory_settings(config)  # memory_length may have been set since
    rows, length = memory.mask.shape
    if len(memory.states) != config.num_hidden_layers:
        raise ValueError(
            f"memory has states of {len(memory.states)} layers, but this model has {config.num_hidden_layers}; pass "
            "the memory of this model"
        )
    shapes = {tuple(state.shape) for state in memory.states}
    if shapes != {(rows, length, config.hidden_size)}:
        raise ValueError(
            f"memory has states of shape {', '.join(map(str, shapes))}; with a mask of shape {(rows, length)} and "
            f"hidden_size = {config.hidden_size} they have {(rows, length, config.hidden_size)}; does it come from "
            "another model?"
        )
    if rows != batch:
        raise ValueError(f"memory has {rows} rows, but the segment has {batch}; select rows with memory.select(rows)")
    if length > config.memory_length:
        raise ValueError(
            f"memory has {length} tokens, but config.memory_length = {config.memory_length}; raise it, or start "
            "without memory"
        )


@torch.no_grad()
def next_memory(
    memory: SegmentMemory | None, inputs: tuple[torch.Tensor, ...], keep: torch.Tensor, in_order: bool, length: int
) -> SegmentMemory:
    """The memory for the next segment: the last tokens of a memory and of the segment after it.

    Args:
        inputs: the input of each layer, (B, L, D).
        keep: boolean (B, M + L), which tokens to keep.
        in_order: whether these tokens are consecutive up to the end of each row.
        length: maximum number of tokens to keep.
    """
    joined = [
        state.detach() if memory is None else torch.cat([old.to(state.device, state.dtype), state.detach()], dim=1)
        for old, state in zip(inputs if memory is None else memory.states, inputs, strict=True)
    ]
    if in_order:
        return SegmentMemory(tuple(state[:, -length:].clone() for state in joined), keep[:, -length:].clone())
    # moves tokens to the right, in their order
    order = keep.to(torch.uint8).argsort(dim=-1, stable=True)[:, -length:]
    states = tuple(
        state.gather(1, order.to(state.device)[..., None].expand(-1, -1, state.shape[-1])) for state in joined
    )
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


def carries_memory(head: Any) -> Any:
    """Class decorator that adds `memory` to the arguments and outputs of the inherited `forward`."""
    stock = head.forward
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
    head.forward = forward
    return head


__all__ = ["SegmentMemory"]
