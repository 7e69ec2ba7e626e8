"""The rows of one forward call: where their tokens stand, of which documents they are, and which keys a query sees.

Keys are, in this order: the memory of earlier segments (`recurrence.py`), the keys in a cache, and the tokens of the
call. A document ends where position ids stop increasing. Padding, causality, borders of packed documents and windows
decide which keys a query sees.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from ..attention.call import LazyMask
from ..attention.context import AttentionContext, Positions, TokenInputs
from ..attention.masks import Visibility, is_visible
from ..attention.sliding_window import SlidingWindowMask
from ..attention.unpadding import RowGroup
from ..host.torch import assert_later
from ..host.tracing import has_contents, is_traced
from ..host.transformers import MASK_CACHE, create_bidirectional_mask, create_causal_mask
from ..schemes.registry import scheme_parts
from ..schemes.scheme import MAX_COUNT


@dataclass(frozen=True)
class PositionInputs:
    """Inputs that the position scheme of a model reads; made once per model.

    Attributes:
        required: required inputs of `forward`: `grid`, `relation_ids`.
        absolute: whether terms depend on absolute positions, not only on offsets.
        terms: whether there are terms at all.
    """

    required: frozenset[str]
    absolute: bool
    terms: bool

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "PositionInputs":
        """The inputs that the scheme of a RelPosBertConfig reads."""
        schemes = [scheme for scheme, _ in scheme_parts(config)]
        absolute = any(scheme.uses_absolute_positions for scheme in schemes)
        return cls(config.required_inputs, absolute, absolute or any(scheme.relative for scheme in schemes))


class Rows(NamedTuple):
    """What the caller of a forward says about B rows of L tokens, with K keys up to the last of them.

    Attributes:
        tokens: (B, L) or (B, L, D); only shape and device are read.
        attention_mask: (B, K), nonzero for tokens, or prepared, (B, 1, L, K); without a memory. Or None.
        token_type_ids: (B, L); or None.
        position_ids: (B, L) or (1, L), or (B, L, 2) for a grid; or None.
        relation_ids: (B, L, L); or None.
    """

    tokens: torch.Tensor
    attention_mask: Any = None
    token_type_ids: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    relation_ids: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        """B."""
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """L."""
        return self.tokens.shape[1]

    @property
    def key_mask(self) -> torch.Tensor | None:
        """The mask (B, K); None for a prepared one, which may hide tokens, too."""
        is_of_keys = isinstance(self.attention_mask, torch.Tensor) and self.attention_mask.dim() == 2
        return self.attention_mask if is_of_keys else None

    def of_group(self, group: RowGroup) -> "Rows":
        """The rows of a group of an unpadded batch, up to the longest."""
        pairs = group.of(self.relation_ids)
        return Rows(
            self.tokens.new_empty(len(group.rows), group.length),
            None if group.mask is None else group.mask[:, 0, 0],
            group.of(self.token_type_ids),
            group.of(self.position_ids),
            None if pairs is None else pairs[:, :, : group.length],
        )


@dataclass(frozen=True)
class SequenceMetadata:
    """What a forward knows of `Rows` before its layers run: B rows of L queries and K keys.

    Attributes:
        config: a RelPosBertConfig.
        rows: what the caller said.
        context: positions of queries and keys, and the other relations between them.
        visibility: which keys queries see, besides a mask that the caller prepared.
        cache: the cache of keys and values; or None.
    """

    config: PreTrainedConfig
    rows: Rows
    context: AttentionContext
    visibility: Visibility
    cache: Cache | None = None

    def mask(self, states: torch.Tensor) -> torch.Tensor | LazyMask | BlockMask | None:
        """The attention mask of the call, for the backend of the configuration: `window_mask`, or `tensor_mask`.

        Args:
            states: (B, L, D); only shape, dtype and device are read.
        """
        mask = window_mask(self)
        return self.tensor_mask(states) if mask is None else mask

    def tensor_mask(self, states: torch.Tensor) -> torch.Tensor | BlockMask | None:
        """The mask of all pairs; arguments as those of `mask`.

        Returns:
            The mask that Transformers makes for that backend; with a memory, boolean (1 or B, 1, L, K). None if every
            query attends to every key, or, in a decoder, to all keys before it.
        """
        config, visible, window = self.config, self.visibility.is_token, self.config.attention_window
        rules = replace(self.visibility, is_causal=False, is_token=None)  # Transformers adds these two
        has_rules = window is not None or rules.documents is not None
        is_plain = not (has_rules or config.is_decoder or config._attn_implementation == "flex_attention")
        if is_plain and visible is not None and has_contents(visible, may_wait=True):
            return None if bool(visible.all()) else visible[:, None, None]
        arguments = {"config": config, "inputs_embeds": states, "attention_mask": self.rows.attention_mask}
        and_mask = (lambda row, head, query, key: rules.sees(row, query, key, window)) if has_rules else None
        if config.is_decoder:
            return create_causal_mask(**arguments, **{MASK_CACHE: self.cache}, and_mask_function=and_mask)
        return create_bidirectional_mask(**arguments, and_mask_function=and_mask)


def window_mask(sequence: SequenceMetadata) -> SlidingWindowMask | None:
    """The mask of an attention window as vectors, for backends that read only the keys in the window.

    Returns:
        None without a window, and if the mask must be a tensor.
    """
    config, context, rows = sequence.config, sequence.context, sequence.rows
    if (
        config.attention_window is None
        or config._attn_implementation == "flex_attention"
        or isinstance(context.start, torch.Tensor)
        or (rows.attention_mask is not None and rows.key_mask is None)
        or is_traced()
    ):
        return None
    return SlidingWindowMask(
        context.query_length,
        context.key_length,
        config.attention_window,
        rows.tokens.device,
        context.start,
        **vars(sequence.visibility),
    )


def indexed_sequence(
    config: PreTrainedConfig, rows: Rows, cache: Cache | None = None, past_length: int | torch.Tensor = 0
) -> SequenceMetadata:
    """Rows of one document each, with indices as positions.

    Args:
        config: a RelPosBertConfig.
        past_length: tokens in the cache.
    """
    # a static cache always has all of its keys, filled or not
    keys = rows.length if cache is None else cache.get_mask_sizes(rows.length, 0)[0]
    device, is_token, index = rows.tokens.device, None, None
    if rows.key_mask is not None:
        is_token = token_mask(rows.key_mask, rows.batch, keys, device)
        if config.attention_window is not None:  # a row padded on the left begins where its mask does
            index = torch.arange(keys, device=device) - rows.key_mask.long().argmax(-1, keepdim=True)
    visibility = Visibility(
        global_tokens=(0,) if config.global_tokens is None else tuple(dict.fromkeys(config.global_tokens)),
        is_causal=config.is_decoder,
        index_in_document=index,
        is_token=is_token,
    )
    context = AttentionContext(rows.length, keys, past_length, tokens=TokenInputs(real=is_token))
    return SequenceMetadata(config, rows, context, visibility, cache)


def read_sequence(
    config: PreTrainedConfig,
    inputs: PositionInputs,
    rows: Rows,
    cache: Cache | None = None,
    past_length: int | torch.Tensor = 0,
    memory: Any = None,
    caller_has_cache: bool = False,
) -> SequenceMetadata:
    """Where the tokens of a call stand.

    Args:
        config: a RelPosBertConfig.
        past_length: tokens in the cache.
        memory: a SegmentMemory that precedes the keys; or None.
        caller_has_cache: whether the caller gave the cache. The ids are then those of the new tokens only, whose
            distances to the keys in the cache follow from `past_length`.

    Raises:
        ValueError: for missing inputs that the scheme requires, ids of another shape, and a prepared mask together
            with a memory if it does not show where rows begin.
    """
    sequence = indexed_sequence(config, rows, cache, past_length)
    if caller_has_cache and rows.position_ids is not None and rows.position_ids.dim() != 3:
        is_empty = isinstance(cache, DynamicCache) and isinstance(past_length, int) and past_length == 0
        if memory is not None or not is_empty:
            rows = rows._replace(position_ids=None)
    grid, position_ids = _grid_and_ids(inputs, rows, config.position_scheme_name)
    tokens = TokenInputs(grid, rows.token_type_ids, rows.relation_ids, sequence.visibility.is_token)
    sequence = replace(sequence, context=replace(sequence.context, tokens=tokens))
    if memory is not None:
        return memory.before(sequence, position_ids)
    if position_ids is not None and (rows.length > 1 or inputs.absolute):
        return _with_position_ids(sequence, inputs, position_ids)
    if inputs.absolute and config.is_decoder and isinstance(rows.attention_mask, torch.Tensor):
        return _with_positions_of_mask(sequence)
    return sequence


def _grid_and_ids(inputs: PositionInputs, rows: Rows, scheme: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The grid, (B, L, 2), and the position ids, (B or 1, L); each may be None."""
    position_ids, batch, length = rows.position_ids, rows.batch, rows.length
    shape = None if position_ids is None else tuple(position_ids.shape)
    if shape is not None and (len(shape) not in (2, 3) or shape[1] != length or shape[0] not in (1, batch)):
        raise ValueError(
            f"position_ids has shape {shape}; {batch} rows of {length} tokens need ({batch} or 1, {length})"
        )
    if "relation_ids" in inputs.required and rows.relation_ids is None:
        raise ValueError(
            f"position_embedding_type = {scheme!r} needs relation_ids of shape (batch, length, length): the "
            "label of the edge from each token to each other"
        )
    if "grid" in inputs.required:
        if position_ids is None or shape is None or len(shape) != 3 or shape[2] != 2:
            raise ValueError(
                f"position_embedding_type = {scheme!r} needs position_ids of shape (batch, length, 2)"
                f"{'' if shape is None else f', not {shape}'}: the row and column of each token"
            )
        return position_ids.expand(batch, -1, -1), None
    if shape is not None and len(shape) == 3:
        raise ValueError(f"position_ids has shape {shape}; position_embedding_type = {scheme!r} takes (batch, length)")
    return None, position_ids


def _with_position_ids(
    sequence: SequenceMetadata, inputs: PositionInputs, position_ids: torch.Tensor
) -> SequenceMetadata:
    """Add documents, and positions if the ids have gaps."""
    ids, positions, visibility = position_ids.expand(sequence.rows.batch, -1), None, sequence.visibility
    documents, has_gaps = documents_and_gaps(position_ids, may_have_gaps=not inputs.terms)
    if inputs.absolute:
        usual = torch.arange(ids.shape[1], device=ids.device)
        has_gaps = is_traced() or bool((position_ids != usual).any())
    if has_gaps:
        positions = Positions(ids, ids.shape[1] - 1 if is_traced() else largest_distance(position_ids))
    if documents is not None:
        visibility = replace(visibility, documents=documents.expand_as(ids), index_in_document=ids)
    return replace(sequence, context=replace(sequence.context, positions=positions), visibility=visibility)


def documents_and_gaps(
    position_ids: torch.Tensor, is_token: torch.Tensor | None = None, may_have_gaps: bool = False
) -> tuple[torch.Tensor | None, bool]:
    """The number of each token's document, (B, L), or None for one in each row; whether positions in one have gaps.

    A graph cannot read the data. It always has numbers, and its distances are those of indices: it raises an error for
    gaps, unless `may_have_gaps`.

    Args:
        position_ids: as of `position_steps`, and `is_token`.
    """
    steps, follows = position_steps(position_ids, is_token)
    documents, gaps = document_numbers(steps, follows), (follows & (steps > 1)).any()
    if not is_traced():
        return documents if bool(documents.any()) else None, bool(gaps)
    if not may_have_gaps:
        assert_later(~gaps, "position_ids have gaps, which a graph does not follow; run the model without one")
        if torch.compiler.is_exporting():  # ONNX drops the assertion, and has an error for the second row of one
            documents = documents + documents.new_zeros(1).index_select(0, gaps.long().view(1))
    return documents, False


def _with_positions_of_mask(sequence: SequenceMetadata) -> SequenceMetadata:
    """Add positions of rows padded on the left, which begin where their mask does.

    In a prepared mask, a row begins at the first key to which a query attends. (A single query with a window does not
    attend to the beginning: the mask of a static cache then counts from the window.)
    """
    seen = is_visible(sequence.rows.attention_mask)
    seen = seen if seen.dim() == 2 else seen[:, 0].any(-2)
    keys = sequence.context.key_length
    positions = (seen.long().cumsum(-1) - 1).clamp(min=0)[:, :keys].expand(sequence.rows.batch, -1)
    positions = nn.functional.pad(positions, (0, keys - positions.shape[1]))
    return replace(sequence, context=replace(sequence.context, positions=Positions(positions, keys - 1)))


def largest_distance(positions: torch.Tensor) -> int:
    """The largest distance within a row of (B, K).

    Raises:
        ValueError: for distances larger than schemes support.
    """
    largest = (positions.amax(-1) - positions.amin(-1)).aminmax()
    smallest, distance = int(largest.min), int(largest.max)
    if smallest < 0 or distance > MAX_COUNT:  # below zero: int64 overflows
        raise ValueError(f"position_ids of a row differ by more than {MAX_COUNT:,}; give a smaller range")
    return distance


def token_mask(attention_mask: torch.Tensor | None, batch: int, keys: int, device: torch.device) -> torch.Tensor:
    """Which keys are real tokens, boolean (B, K). A prepared mask hides padding from every query."""
    if attention_mask is None:
        return torch.ones(batch, keys, dtype=torch.bool, device=device)
    if attention_mask.dim() == 2:
        is_token = (attention_mask != 0)[:, :keys].expand(batch, -1)
        return nn.functional.pad(is_token, (0, keys - is_token.shape[1]))
    return is_visible(attention_mask).any(-2).any(1).expand(batch, -1)


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
