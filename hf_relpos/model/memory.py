"""Segment recurrence (Dai et al., Transformer-XL, arXiv 1901.02860, §3.2): what earlier segments leave behind.

Every layer attends to its own inputs of the segments before as well, to the left of the segment at hand. They are
constants: gradients reach the key and value projections through them, and never the layers that made them. A memory
holds real tokens only. Padding is not kept, nothing stands in for segments that were not there, and a row whose
document has ended holds nothing that the next one could see.
"""

import dataclasses
import functools
import inspect
from dataclasses import dataclass, replace

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
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.utils import ModelOutput

from .context import AttentionContext


@dataclass
class SegmentMemory(ModelOutput):
    """The layer inputs of the last M tokens of every row.

    Attributes:
        states: one tensor (B, M, D) per layer, without a gradient.
        mask: boolean (B, M), True for a token. The tokens of a row are its last ones, without gaps, so that the next
            segment follows on the right.
    """

    states: tuple[torch.Tensor, ...] | None = None
    mask: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """M, tokens of the longest row."""
        return self.mask.shape[1]

    def reset(self, rows: torch.Tensor) -> "SegmentMemory":
        """A memory in which some rows are empty.

        Args:
            rows: boolean (B,), True for a row to empty: one in which a new document begins.
        """
        return SegmentMemory(self.states, self.mask & ~rows.to(self.mask.device)[:, None])

    def select(self, rows: torch.Tensor) -> "SegmentMemory":
        """The memory of other rows: of the beams that were kept, of a batch in another order.

        Args:
            rows: numbers of rows, (N,), which may repeat.
        """
        rows = rows.to(self.mask.device)
        return SegmentMemory(tuple(state.index_select(0, rows) for state in self.states), self.mask[rows])

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors by name, as a safetensors file takes them."""
        tensors = {f"states.{layer}": state.contiguous() for layer, state in enumerate(self.states)}
        return {**tensors, "mask": self.mask.contiguous()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> "SegmentMemory":
        """The memory of which these are `to_tensors()`.

        Raises:
            ValueError: for tensors of something else.
        """
        names = [f"states.{layer}" for layer in range(len(tensors) - 1)]
        if set(tensors) != {*names, "mask"}:
            raise ValueError(
                f"these tensors are no memory of segments: {', '.join(sorted(tensors))}; it has mask, states.0, …"
            )
        return cls(tuple(tensors[name] for name in names), tensors["mask"])


def check_memory(config: PreTrainedConfig, memory: SegmentMemory, batch: int) -> None:
    """Refuse a memory that this model cannot have made of this batch.

    Args:
        config: a RelPosBertConfig.
        batch: B, rows of the segment.

    Raises:
        TypeError: for something else than a SegmentMemory.
        ValueError: for a model without memory, another number of layers, rows or features, or more tokens than
            `memory_length`.
    """
    if not isinstance(memory, SegmentMemory):
        raise TypeError(f"memory is a {type(memory).__name__}; give the `memory` of the outputs of the last segment")
    if not config.memory_length:
        raise ValueError("memory was given, and config.memory_length = 0; set it to the tokens to remember")
    if not is_traced():
        config.validate_memory()  # memory_length may have been set since
    rows, length = memory.mask.shape
    if len(memory.states) != config.num_hidden_layers:
        raise ValueError(
            f"memory holds the inputs of {len(memory.states)} layers, and this model has "
            f"{config.num_hidden_layers}; it comes from another model"
        )
    shapes = {tuple(state.shape) for state in memory.states}
    if shapes != {(rows, length, config.hidden_size)}:
        raise ValueError(
            f"memory has states of shape {', '.join(map(str, shapes))}; with a mask of shape {(rows, length)} and "
            f"hidden_size = {config.hidden_size} they have {(rows, length, config.hidden_size)}; does it come from "
            "another model?"
        )
    if rows != batch:
        raise ValueError(
            f"memory has {rows} rows, and the segment has {batch}; memory.select(rows) takes those that go on"
        )
    if length > config.memory_length:
        raise ValueError(
            f"memory holds {length} tokens, and config.memory_length = {config.memory_length}; raise that, or begin "
            "again without memory"
        )


def is_traced() -> bool:
    """Whether a graph is being recorded, which cannot look at the data."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def beside_memory(
    config: PreTrainedConfig,
    memory: SegmentMemory,
    context: AttentionContext,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> tuple[AttentionContext, torch.Tensor | None]:
    """Context and mask of a call whose keys are the memory, what a cache holds, and the segment, in this order.

    Args:
        config: a RelPosBertConfig.
        context: of the segment and the cache alone, by places.
        tokens: (B, L) or (B, L, D); only its shape and device are read.
        attention_mask: (B, K), or prepared (B, 1, L, K), K the keys without the memory; or None.
        position_ids: (B, L) or (1, L); None with a cache, beside which the places of its tokens count.

    Returns:
        The context, and a boolean mask (1 or B, 1, L, M + K), or None where every query may attend to every key.

    Raises:
        ValueError: for a prepared mask in which places cannot be told.
    """
    batch, length = tokens.shape[:2]
    device, keys, before = tokens.device, context.key_length, memory.length
    remembered = memory.mask.to(device)
    limits = (config.attention_window, config.memory_same_length)
    prepared = None
    if attention_mask is None:
        real = torch.ones(batch, keys, dtype=torch.bool, device=device)
    elif attention_mask.dim() == 2:
        real = (attention_mask != 0)[:, :keys].expand(batch, -1)
        real = torch.nn.functional.pad(real, (0, keys - real.shape[1]))
    else:
        if any(limits):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, as `generate` prepares it for a static "
                "cache; beside a memory, with attention_window or memory_same_length, it does not tell where a row "
                "begins: use a dynamic cache, or give (batch, length)"
            )
        prepared = _allowed(attention_mask)
        real = prepared.any(-2).any(1).expand(batch, -1)
    seen = torch.cat([remembered, real], dim=-1)

    # the document of each key, counted from that of the memory, and their positions where places do not tell them
    documents, positions, max_distance = None, None, 0
    holes = attention_mask is not None and (is_traced() or bool(_runs(seen).gt(1).any()))
    if position_ids is not None:
        ids = position_ids.expand(batch, -1).to(device)
        previous = _previous(real)
        steps = ids - ids.gather(1, previous.clamp(min=0))
        within = real & (previous >= 0)
        documents = torch.nn.functional.pad((within & (steps <= 0)).long().cumsum(-1), (before, 0))
        if not is_traced():
            if not bool(documents[:, -1].any()):
                documents = None
            apart = bool((within & (steps > 1)).any())
            if holes or apart:
                positions = ids
    if holes and positions is None:
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    if positions is not None:
        positions, max_distance = _positions(remembered, real, positions)
    context = replace(
        context, key_length=before + keys, start=context.start + before, positions=positions, max_distance=max_distance
    )

    # a single query that comes last sees all, as in an encoder
    plain = not config.is_decoder or (length == 1 and not isinstance(context.start, torch.Tensor))
    plain = plain and not any(limits) and documents is None and prepared is None
    if plain and not is_traced() and bool(seen.all()):
        return context, None
    distance = -context.matrix(device)  # i − j
    distance = distance if distance.dim() == 3 else distance[None]
    places = torch.arange(before + keys, device=device)
    visible = seen[:, None, :]
    if prepared is not None:
        prepared = prepared.expand(batch, -1, length, -1)
        visible = torch.cat([remembered[:, None, None, :].expand(*prepared.shape[:-1], -1), prepared], dim=-1)
    elif config.is_decoder:
        visible = visible & (places <= (torch.arange(length, device=device) + context.start)[:, None])
    if documents is not None:
        visible = visible & (documents[:, before:, None] == documents[:, None, :])
    if config.memory_same_length:
        visible = visible & (distance < config.memory_length)
    if config.attention_window is not None:
        visible = visible & (distance.abs() <= config.attention_window)
    visible = visible if visible.dim() == 4 else visible[:, None]
    return context, visible.expand(-1, -1, length, -1)


def _positions(remembered: torch.Tensor, real: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Positions of all keys, (B, M + K), and how far they reach; the memory ends where the first real token begins.

    Args:
        remembered: the mask of the memory, (B, M).
        real: which of the other keys are no padding, (B, K).
        ids: positions of these, (B, K).
    """
    first = ids.gather(1, real.long().argmax(-1, keepdim=True))
    left = first - remembered.long().flip(-1).cumsum(-1).flip(-1)
    positions, seen = torch.cat([left, ids], dim=-1), torch.cat([remembered, real], dim=-1)
    # padding is put where a real token is, so that it reaches no further
    some = positions.gather(1, seen.long().argmax(-1, keepdim=True))
    positions = torch.where(seen, positions, some)
    if is_traced():
        return positions, positions.shape[1] - 1
    return positions, int((positions.amax(-1) - positions.amin(-1)).max())


def _allowed(mask: torch.Tensor) -> torch.Tensor:
    """A prepared mask as a boolean one."""
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0


def _runs(real: torch.Tensor) -> torch.Tensor:
    """How many runs of real tokens each row has, (B,)."""
    return (real & ~torch.nn.functional.pad(real, (1, 0))[:, :-1]).sum(-1)


def _previous(real: torch.Tensor) -> torch.Tensor:
    """The place of the last real token before each, −1 where there is none, (B, L)."""
    places = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, places, -1).cummax(-1).values
    return torch.nn.functional.pad(last, (1, 0), value=-1)[:, :-1]


@torch.no_grad()
def remember(
    memory: SegmentMemory | None,
    inputs: tuple[torch.Tensor, ...],
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    length: int,
) -> SegmentMemory:
    """The last tokens of the memory and the segment after it.

    Args:
        inputs: the input of each layer, (B, L, D).
        attention_mask: (B, L), or prepared (B, 1, L, L): a token that none may attend to is padding; or None.
        position_ids: (B, L) or (1, L), or None. Where they stop increasing a new document begins, and of a row with
            several only the last is kept.
        length: how many to keep at most.
    """
    batch, segment = inputs[0].shape[:2]
    device = inputs[0].device
    ragged = attention_mask is not None or position_ids is not None
    if attention_mask is None:
        real = torch.ones(batch, segment, dtype=torch.bool, device=device)
    elif attention_mask.dim() == 2:
        real = (attention_mask != 0).expand(batch, -1)
    else:
        real = _allowed(attention_mask).any(-2).any(1).expand(batch, -1)
    keep = real
    before = 0 if memory is None else memory.length
    if memory is not None:
        keep = torch.cat([memory.mask.to(device), real], dim=-1)
    if position_ids is not None:
        ids = position_ids.expand(batch, -1).to(device)
        previous = _previous(real)
        begins = real & (previous >= 0) & (ids <= ids.gather(1, previous.clamp(min=0)))
        documents = torch.nn.functional.pad(begins.long().cumsum(-1), (before, 0))
        keep = keep & (documents == documents[:, -1:])
    joined = [
        state.detach() if memory is None else torch.cat([old.to(device, state.dtype), state.detach()], dim=1)
        for old, state in zip(inputs if memory is None else memory.states, inputs, strict=True)
    ]
    if not ragged:
        return SegmentMemory(tuple(state[:, -length:].clone() for state in joined), keep[:, -length:].clone())
    # tokens to the right, in their order
    order = keep.to(torch.uint8).argsort(dim=-1, stable=True)[:, -length:]
    states = tuple(state.gather(1, order[..., None].expand(-1, -1, state.shape[-1])) for state in joined)
    return SegmentMemory(states, keep.gather(1, order))


# Outputs -----------------------------------------------------------------------------------------------------------


def _with_memory(output: type[ModelOutput]) -> type[ModelOutput]:
    """That class of outputs with one more field, `memory`."""
    made = dataclasses.make_dataclass(
        f"{output.__name__}WithMemory",
        [("memory", SegmentMemory | None, None)],
        bases=(output,),
        namespace={"__module__": __name__, "__doc__": f"{output.__name__}, and the memory for the next segment."},
    )
    globals()[made.__name__] = made  # where pickle looks for it
    return made


WITH_MEMORY: dict[type[ModelOutput], type[ModelOutput]] = {
    output: _with_memory(output)
    for output in (
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


def carries_memory(head: type) -> type:
    """Class decorator: the `forward` that the head inherits, with `memory` as an argument and in what it returns."""
    stock = head.forward
    signature = inspect.signature(stock)
    own = inspect.Parameter("memory", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=SegmentMemory | None)
    parameters = list(signature.parameters.values())
    place = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)

    @functools.wraps(stock)
    def forward(self, *args, memory: SegmentMemory | None = None, **kwargs):
        if memory is None and not self.config.memory_length:
            return stock(self, *args, **kwargs)
        left: list[SegmentMemory] = []  # the base model puts it here, since stock heads build their own outputs
        outputs = stock(self, *args, memory=memory, memory_sink=left, **kwargs)
        if not left:
            return outputs
        if isinstance(outputs, tuple):
            return (*outputs, left[0])
        return WITH_MEMORY[type(outputs)](**outputs, memory=left[0])

    forward.__signature__ = signature.replace(parameters=[*parameters[:place], own, *parameters[place:]])
    head.forward = forward
    return head


__all__ = ["SegmentMemory"]
