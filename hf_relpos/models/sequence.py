"""Sequence metadata of one forward call: keys, documents, positions, and the masks that follow from them.

Keys are, in this order: the memory of earlier segments, the keys in a cache, and the tokens of the call. A document
ends where position ids stop increasing. This module decides which keys a query attends to: by padding, causality,
borders of packed documents, windows and memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from ..attention.call import LazyMask
from ..attention.context import AttentionContext
from ..attention.masks import is_visible
from ..attention.sliding_window import SlidingWindowMask, in_window
from ..attention.tracing import is_traced
from ..host.torch import assert_later
from ..host.transformers import MASK_CACHE, and_masks, create_bidirectional_mask, create_causal_mask
from ..schemes.registry import scheme_parts
from ..schemes.scheme import MAX_COUNT
from .recurrence import SegmentMemory


# Whether a query attends to a key, from index tensors (batch, head, query, key), as in Transformers' masking
# utilities.
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PositionInputs:
    """Inputs that the position scheme of a model reads; made once per model.

    Attributes:
        required: required inputs of `forward`: `grid`, `relation_ids`.
        absolute: whether terms depend on absolute positions, not only on offsets.
        terms: whether there are terms at all.
        numbers: whether it has `Scheme.token_numbers`, and has to know which tokens are padding.
        scheme: name of the scheme, for messages.
    """

    required: frozenset[str]
    absolute: bool
    terms: bool
    numbers: bool
    scheme: str

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "PositionInputs":
        """The inputs that the scheme of a RelPosBertConfig reads."""
        terms = any(scheme.relative or scheme.uses_absolute_positions for scheme, _ in scheme_parts(config))
        numbers = any(scheme.has_token_numbers() for scheme, _ in scheme_parts(config))
        return cls(config.required_inputs, config.uses_absolute_positions, terms, numbers, config.position_scheme_name)


@dataclass(frozen=True)
class SequenceMetadata:
    """The tokens of one call, B rows of L queries and K keys.

    Attributes:
        query_length: L.
        key_length: K, memory and cache included.
        start: index of the first query among the keys; a tensor of one element for a static cache.
        positions: (B, K), position of each key; None for consecutive tokens, whose positions are their indices.
        max_distance: largest |r| of `positions`; read only with `positions`.
        documents: (B, K), number of each key's document; None if no row has more than one.
        index_in_document: (B, K), the index (packed: position id) of each key within its document or row, which
            selects global tokens; None if that is its index among the keys.
        grid: (B, L, 2), row and column of each token; or None.
        memory: recurrence memory of earlier segments; or None.
        is_token: boolean (B, K), False for padding; only with a memory.
        prepared_mask: boolean (1 or B, 1, L, K − M), a mask that the caller prepared; only with a memory.
    """

    query_length: int
    key_length: int
    start: int | torch.Tensor = 0
    positions: torch.Tensor | None = None
    max_distance: int = 0
    documents: torch.Tensor | None = None
    index_in_document: torch.Tensor | None = None
    grid: torch.Tensor | None = None
    memory: SegmentMemory | None = None
    is_token: torch.Tensor | None = None
    prepared_mask: torch.Tensor | None = None

    def context(self, token_type_ids: torch.Tensor | None, relation_ids: torch.Tensor | None) -> AttentionContext:
        """The context for attention, with token_type_ids (B, L) and relation_ids (B, L, L)."""
        return AttentionContext(
            self.query_length,
            self.key_length,
            self.start,
            positions=self.positions,
            max_distance=self.max_distance,
            grid=self.grid,
            token_type_ids=token_type_ids,
            relation_ids=relation_ids,
        )

    def mask(
        self,
        config: PreTrainedConfig,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Cache | None = None,
    ) -> torch.Tensor | LazyMask | BlockMask | None:
        """The attention mask of the call, for the backend of the configuration: `window_mask`, or `tensor_mask`.

        Args:
            hidden_states: (B, L, D); only shape, dtype and device are read.
            attention_mask: (B, K), or prepared (B, 1, L, K), without the memory; or None.
        """
        mask = window_mask(self, config, hidden_states, attention_mask)
        return self.tensor_mask(config, hidden_states, attention_mask, cache) if mask is None else mask

    def tensor_mask(
        self,
        config: PreTrainedConfig,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Cache | None = None,
    ) -> torch.Tensor | BlockMask | None:
        """The mask of all pairs; arguments as those of `mask`.

        Returns:
            The mask that Transformers makes for that backend; with a memory, boolean (1 or B, 1, L, K). None if every
            query attends to every key, or, in a decoder, to all keys before it.
        """
        functions = self._mask_functions(config)
        if self.memory is not None:
            batch, device = hidden_states.shape[0], hidden_states.device
            return _mask_with_memory(self, functions, config, self.memory, batch, device)
        arguments = {"config": config, "inputs_embeds": hidden_states, "attention_mask": attention_mask}
        and_mask = and_masks(*functions) if functions else None
        if config.is_decoder:
            return create_causal_mask(**arguments, **{MASK_CACHE: cache}, and_mask_function=and_mask)
        return create_bidirectional_mask(**arguments, and_mask_function=and_mask)

    def _mask_functions(self, config: PreTrainedConfig) -> list[MaskFunction]:
        """Mask functions besides padding and causality: borders of documents, the window, the length of the memory."""
        functions: list[MaskFunction] = []
        documents, index_in_document, window = self.documents, self.index_in_document, config.attention_window
        # padding between a memory and the segment must not count as distance
        positions = self.positions if self.memory is not None else None

        if documents is not None:
            functions.append(lambda batch, head, query, key: documents[batch, query] == documents[batch, key])
        if window is not None:
            global_tokens = global_tokens_of(config)
            functions.append(
                lambda batch, head, query, key: in_window(
                    window, global_tokens, positions, index_in_document, batch, query, key
                )
            )
        return functions


def _mask_with_memory(
    metadata: SequenceMetadata,
    functions: list[MaskFunction],
    config: PreTrainedConfig,
    memory: SegmentMemory,
    batch: int,
    device: torch.device,
) -> torch.Tensor | None:
    """`SequenceMetadata.mask` of a call with a memory, boolean (1 or B, 1, L, K)."""
    is_token = metadata.is_token
    assert is_token is not None, "metadata with a memory tell which keys are tokens"
    # a single last query attends to all keys, as in an encoder
    causal = config.is_decoder and (metadata.query_length > 1 or isinstance(metadata.start, torch.Tensor))
    if not (causal or functions or metadata.prepared_mask is not None or is_traced()) and bool(is_token.all()):
        return None
    rows = torch.arange(batch, device=device)[:, None, None, None]
    heads = torch.zeros(1, dtype=torch.long, device=device)
    keys = torch.arange(metadata.key_length, device=device)
    queries = (torch.arange(metadata.query_length, device=device) + metadata.start)[:, None]
    visible = is_token[:, None, None, :]
    if metadata.prepared_mask is not None:
        prepared = metadata.prepared_mask.expand(batch, -1, metadata.query_length, -1)
        memory_mask = memory.mask.to(device)[:, None, None, :].expand(*prepared.shape[:-1], -1)
        visible = torch.cat([memory_mask, prepared], dim=-1)
    elif config.is_decoder:
        visible = visible & (keys <= queries)
    for function in functions:
        visible = visible & function(rows, heads, queries, keys)
    return visible.expand(-1, -1, metadata.query_length, -1)


def window_mask(
    metadata: SequenceMetadata,
    config: PreTrainedConfig,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> SlidingWindowMask | None:
    """The mask of an attention window as vectors, for backends that read only the keys in the window.

    Returns:
        None without a window, and if the mask must be a tensor.
    """
    if (
        config.attention_window is None
        or config._attn_implementation == "flex_attention"
        or isinstance(metadata.start, torch.Tensor)
        or metadata.prepared_mask is not None
        or (attention_mask is not None and (not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2))
        or is_traced()
    ):
        return None
    is_token = metadata.is_token
    if metadata.memory is None and attention_mask is not None:
        is_token = token_mask(attention_mask, hidden_states.shape[0], metadata.key_length, hidden_states.device)
    return SlidingWindowMask(
        metadata.query_length,
        metadata.key_length,
        config.attention_window,
        hidden_states.device,
        start=metadata.start,
        global_tokens=global_tokens_of(config),
        is_causal=config.is_decoder,
        positions=metadata.positions if metadata.memory is not None else None,
        documents=metadata.documents,
        index_in_document=metadata.index_in_document,
        is_token=is_token,
    )


def global_tokens_of(config: PreTrainedConfig) -> tuple[int, ...]:
    """The global tokens of an attention window, as indices in a document."""
    return (0,) if config.global_tokens is None else tuple(dict.fromkeys(config.global_tokens))


def row_metadata(
    config: PreTrainedConfig,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None = None,
    past_length: int | torch.Tensor = 0,
) -> SequenceMetadata:
    """The metadata of rows of one document each, with indices as positions.

    Args:
        config: a RelPosBertConfig.
        tokens: (B, L) or (B, L, D); only its shape and device are read.
        attention_mask: (B, K), or prepared (B, 1, L, K); or None.
        past_length: tokens in the cache.
    """
    length = tokens.shape[1]
    # a static cache always has all of its keys, filled or not
    keys = length if cache is None else cache.get_mask_sizes(length, 0)[0]
    index_in_document = None
    if config.attention_window is not None and attention_mask is not None and attention_mask.dim() == 2:
        # a row padded on the left begins where its mask does
        begins = attention_mask.long().argmax(-1, keepdim=True)
        index_in_document = torch.arange(keys, device=tokens.device) - begins
    return SequenceMetadata(length, keys, past_length, index_in_document=index_in_document)


def sequence_metadata(
    config: PreTrainedConfig,
    inputs: PositionInputs,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    relation_ids: torch.Tensor | None,
    cache: Cache | None,
    past_length: int | torch.Tensor,
    memory: SegmentMemory | None,
    caller_has_cache: bool = False,
) -> SequenceMetadata:
    """The metadata of a call. In masks, K are the keys without the memory.

    Args:
        position_ids: (B, L) or (1, L), or (B, L, 2) for a grid; or None.
        relation_ids: (B, L, L), or None; only its presence is checked.
        caller_has_cache: whether the caller gave the cache. The ids are then those of the new tokens only, whose
            distances to the keys in the cache follow from `past_length`.

    Raises:
        ValueError: for missing inputs that the scheme requires, ids of another shape, and a prepared mask together
            with a memory if it does not show where rows begin.
    """
    metadata = row_metadata(config, tokens, attention_mask, cache, past_length)
    if caller_has_cache and position_ids is not None and position_ids.dim() != 3:
        is_empty = isinstance(cache, DynamicCache) and isinstance(past_length, int) and past_length == 0
        position_ids = position_ids if is_empty and memory is None else None
    grid, position_ids = _check_inputs(inputs, tokens, position_ids, relation_ids)
    metadata = replace(metadata, grid=grid)
    if memory is not None:
        return _with_memory(config, metadata, memory, tokens, attention_mask, position_ids)
    if position_ids is not None and (metadata.query_length > 1 or inputs.absolute):
        return _with_position_ids(metadata, inputs, tokens, position_ids)
    if inputs.absolute and config.is_decoder and isinstance(attention_mask, torch.Tensor):
        return _with_positions_of_mask(metadata, tokens.shape[0], attention_mask)
    return metadata


def _check_inputs(
    inputs: PositionInputs, tokens: torch.Tensor, position_ids: torch.Tensor | None, relation_ids: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The grid, (B, L, 2), and the position ids, (B or 1, L); each may be None."""
    batch, length = tokens.shape[:2]
    if position_ids is not None and (
        position_ids.dim() not in (2, 3) or position_ids.shape[1] != length or position_ids.shape[0] not in (1, batch)
    ):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; {batch} rows of {length} tokens need "
            f"({batch}, {length}) or (1, {length})"
        )
    if "relation_ids" in inputs.required and relation_ids is None:
        raise ValueError(
            f"position_embedding_type = {inputs.scheme!r} needs relation_ids of shape (batch, length, length): the "
            "label of the edge from each token to each other"
        )
    if "grid" in inputs.required:
        if position_ids is None or position_ids.dim() != 3 or position_ids.shape[2] != 2:
            shape = "" if position_ids is None else f", not {tuple(position_ids.shape)}"
            raise ValueError(
                f"position_embedding_type = {inputs.scheme!r} needs position_ids of shape (batch, length, 2){shape}: "
                "the row and column of each token"
            )
        return position_ids.expand(batch, -1, -1), None
    if position_ids is not None and position_ids.dim() == 3:
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; position_embedding_type = {inputs.scheme!r} takes "
            "(batch, length)"
        )
    return None, position_ids


def _with_position_ids(
    metadata: SequenceMetadata, inputs: PositionInputs, tokens: torch.Tensor, position_ids: torch.Tensor
) -> SequenceMetadata:
    """Add documents, and positions if the ids have gaps."""
    batch, length = tokens.shape[:2]
    steps, follows = position_steps(position_ids)
    numbers = document_numbers(steps, follows).expand(batch, -1)
    documents: torch.Tensor | None = numbers
    positions, max_distance = None, 0
    # a graph cannot read the data: it assumes packed rows whose documents count from 0, 1, 2, …
    if is_traced():
        if inputs.terms:
            documents = _without_gaps(numbers, steps, follows)
        if inputs.absolute:
            positions, max_distance = position_ids.expand(batch, -1), length - 1
    else:
        usual = torch.arange(length, device=position_ids.device)
        if bool(((position_ids != usual) if inputs.absolute else steps > 1).any()):
            positions = position_ids.expand(batch, -1)
            max_distance = _largest_distance(position_ids)
        if not bool((follows & (steps <= 0)).any()):
            documents = None
    index = metadata.index_in_document if documents is None else position_ids.expand(batch, -1)
    return replace(
        metadata, positions=positions, max_distance=max_distance, documents=documents, index_in_document=index
    )


def _without_gaps(documents: torch.Tensor, steps: torch.Tensor, follows: torch.Tensor) -> torch.Tensor:
    """The documents in a graph, whose distances are those of indices; it raises an error if positions have gaps."""
    gaps = (follows & (steps > 1)).any()
    assert_later(~gaps, "position_ids have gaps, which a graph does not follow; run the model without one")
    if torch.compiler.is_exporting():  # ONNX drops the assertion, and has an error for the second row of one
        documents = documents + documents.new_zeros(1).index_select(0, gaps.long().view(1))
    return documents


def _with_positions_of_mask(metadata: SequenceMetadata, batch: int, attention_mask: torch.Tensor) -> SequenceMetadata:
    """Add positions of rows padded on the left, which begin where their mask does.

    In a prepared mask, a row begins at the first key to which a query attends. (A single query with a window does not
    attend to the beginning: the mask of a static cache then counts from the window.)
    """
    seen = is_visible(attention_mask)
    seen = seen if seen.dim() == 2 else seen[:, 0].any(-2)
    keys = metadata.key_length
    positions = (seen.long().cumsum(-1) - 1).clamp(min=0)[:, :keys].expand(batch, -1)
    positions = nn.functional.pad(positions, (0, keys - positions.shape[1]))
    return replace(metadata, positions=positions, max_distance=keys - 1)


def _largest_distance(positions: torch.Tensor) -> int:
    """Raise a ValueError for distances larger than schemes support."""
    largest = (positions.amax(-1) - positions.amin(-1)).aminmax()
    smallest, distance = int(largest.min), int(largest.max)
    if smallest < 0 or distance > MAX_COUNT:  # below zero: int64 overflows
        raise ValueError(f"position_ids of a row differ by more than {MAX_COUNT:,}; give a smaller range")
    return distance


def _with_memory(
    config: PreTrainedConfig,
    metadata: SequenceMetadata,
    memory: SegmentMemory,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> SequenceMetadata:
    """Add the memory's keys in front of `metadata`, which covers the segment and the cache only."""
    batch, device = tokens.shape[0], tokens.device
    keys, before = metadata.key_length, memory.length
    memory_mask = memory.mask.to(device)
    if attention_mask is not None and attention_mask.dim() == 4 and config.attention_window:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, as `generate` prepares it for a static cache; a "
            "memory with attention_window requires (batch, length): use a dynamic cache, or give that shape"
        )
    is_token = token_mask(attention_mask, batch, keys, device)
    with_memory = torch.cat([memory_mask, is_token], dim=-1)
    documents, positions, max_distance = None, None, 0
    ids, has_gaps = None, False
    if position_ids is not None:
        ids = position_ids.expand(batch, -1).to(device)
        steps, follows = position_steps(ids, is_token)
        documents = nn.functional.pad(document_numbers(steps, follows), (before, 0))
        if is_traced():
            documents = _without_gaps(documents, steps, follows)
        else:
            documents = documents if bool(documents[:, -1].any()) else None
            has_gaps = bool((follows & (steps > 1)).any())
    # padding between the memory and the segment, or within it
    begins = with_memory & ~nn.functional.pad(with_memory, (1, 0))[:, :-1]
    has_holes = attention_mask is not None and (is_traced() or bool((begins.sum(-1) > 1).any()))
    if has_holes or has_gaps:
        if ids is None or is_traced():  # a graph cannot read the ids: it assumes consecutive tokens
            ids = (is_token.long().cumsum(-1) - 1).clamp(min=0)
        positions, max_distance = _positions_with_memory(memory_mask, is_token, ids)
    return replace(
        metadata,
        key_length=before + keys,
        start=metadata.start + before,
        positions=positions,
        max_distance=max_distance,
        documents=documents,
        index_in_document=None,
        memory=memory,
        is_token=with_memory,
        prepared_mask=None if attention_mask is None or attention_mask.dim() == 2 else is_visible(attention_mask),
    )


def token_mask(attention_mask: torch.Tensor | None, batch: int, keys: int, device: torch.device) -> torch.Tensor:
    """Which keys are real tokens, boolean (B, K). A prepared mask hides padding from every query."""
    if attention_mask is None:
        return torch.ones(batch, keys, dtype=torch.bool, device=device)
    if attention_mask.dim() == 2:
        is_token = (attention_mask != 0)[:, :keys].expand(batch, -1)
        return nn.functional.pad(is_token, (0, keys - is_token.shape[1]))
    return is_visible(attention_mask).any(-2).any(1).expand(batch, -1)


def _positions_with_memory(
    memory_mask: torch.Tensor, is_token: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Positions of all keys, (B, M + K), and their largest distance; `ids` are those of the keys after the memory."""
    first = ids.gather(1, is_token.long().argmax(-1, keepdim=True))
    left = first - memory_mask.long().flip(-1).cumsum(-1).flip(-1)
    positions, real = torch.cat([left, ids], dim=-1), torch.cat([memory_mask, is_token], dim=-1)
    # padding gets the position of a token, so that it does not increase the largest distance
    positions = torch.where(real, positions, positions.gather(1, real.long().argmax(-1, keepdim=True)))
    if is_traced():
        return positions, positions.shape[1] - 1
    return positions, _largest_distance(positions)


def tokens_to_keep(
    tokens: torch.Tensor,
    memory: SegmentMemory | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, bool]:
    """Which tokens of the memory and of the segment after it the next segment may attend to.

    Args:
        tokens: (B, L) or (B, L, D), the segment; only its shape and device are read.
        attention_mask: (B, L), or prepared (B, 1, L, L), where a token to which no query attends is padding; or None.
        position_ids: (B, L) or (1, L), or None. Only the last document of a row is kept.

    Returns:
        Boolean (B, M + L); and whether every row keeps consecutive tokens up to its end.
    """
    batch, length = tokens.shape[:2]
    device = tokens.device
    is_token = token_mask(attention_mask, batch, length, device)
    keep = is_token
    before = 0 if memory is None else memory.length
    if memory is not None:
        keep = torch.cat([memory.mask.to(device), is_token], dim=-1)
    if position_ids is not None:
        ids = position_ids.expand(batch, -1).to(device)
        documents = nn.functional.pad(document_numbers(*position_steps(ids, is_token)), (before, 0))
        keep = keep & (documents == documents[:, -1:])
    return keep, attention_mask is None and position_ids is None


# Packed documents --------------------------------------------------------------------------------------------------


INDICES = (torch.int64, torch.int32)  # dtypes of ids for embeddings


def check_tensor(name: str, value: Any, dtypes: tuple[torch.dtype, ...] = INDICES) -> None:
    """Raise a TypeError for what is not a tensor, and a ValueError for a tensor of another dtype."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} is a {type(value).__name__}; give a tensor, as tokenizers do with return_tensors='pt'"
        )
    if value.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {value.dtype}; give one of {', '.join(map(str, dtypes))}")


def packed_position_ids(tokens: torch.Tensor, cu_seq_lens: torch.Tensor) -> torch.Tensor:
    """Position ids of the documents of one packed row, from the output of Transformers' flattening collator.

    Args:
        tokens: (1, L) or (1, L, D); only its shape and device are read.
        cu_seq_lens: starts of the documents, then L, (documents + 1,).

    Returns:
        (1, L), from 0 in every document.

    Raises:
        TypeError: for a value that is not a tensor.
        ValueError: for several rows, and for lengths that do not fit the row (if the host can read them).
    """
    check_tensor("cu_seq_lens_q", cu_seq_lens)
    rows, length = tokens.shape[:2]
    if rows != 1 or cu_seq_lens.dim() != 1 or cu_seq_lens.shape[0] < 2:
        raise ValueError(
            f"cu_seq_lens_q has shape {tuple(cu_seq_lens.shape)} and the input {rows} rows: it describes one row; "
            "give position_ids, which restart with each document"
        )
    if cu_seq_lens.device.type == "cpu" and not torch.compiler.is_compiling():
        if int(cu_seq_lens[-1]) != length:
            raise ValueError(f"cu_seq_lens_q ends at {int(cu_seq_lens[-1])}, and the row has {length} tokens")
    begins = cu_seq_lens.to(tokens.device)
    indices = torch.arange(length, device=tokens.device)
    return (indices - begins[torch.bucketize(indices, begins[1:], right=True)])[None]


def position_steps(
    position_ids: torch.Tensor, is_token: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The difference of each token's position to that of the previous token, and which tokens have a previous one.

    Args:
        position_ids: (B, L).
        is_token: boolean (B, L), False for padding, which is skipped; None for no padding.

    Returns:
        Steps (B, L), and boolean (B, L). A document begins where a step is not positive.
    """
    if is_token is None:
        steps = nn.functional.pad(position_ids[:, 1:] - position_ids[:, :-1], (1, 0))
        return steps, (torch.arange(position_ids.shape[1], device=position_ids.device) > 0).expand_as(position_ids)
    indices = torch.arange(is_token.shape[1], device=is_token.device)
    last = torch.where(is_token, indices, -1).cummax(-1).values
    previous = nn.functional.pad(last, (1, 0), value=-1)[:, :-1]
    return position_ids - position_ids.gather(1, previous.clamp(min=0)), is_token & (previous >= 0)


def document_numbers(steps: torch.Tensor, follows: torch.Tensor) -> torch.Tensor:
    """The number of each token's document in its row, from 0, (B, L), from the result of `position_steps`."""
    return (follows & (steps <= 0)).long().cumsum(-1)
