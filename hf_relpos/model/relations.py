"""From what `forward` is given to what attention needs: the relations of the pairs, the mask, the temperature."""

import math

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import and_masks, create_bidirectional_mask, create_causal_mask

from .context import AttentionContext


def packed_position_ids(tokens: torch.Tensor, cu_seq_lens: torch.Tensor) -> torch.Tensor:
    """Position ids of the documents of one packed row, as Transformers' flattening collator describes it.

    Args:
        tokens: (1, L) or (1, L, D); only its shape and device are read.
        cu_seq_lens: where the documents begin, and L at last, (documents + 1,).

    Returns:
        (1, L), from 0 on in every document.

    Raises:
        ValueError: for several rows, and for lengths that are not those of the row (where the host can see them).
    """
    rows, length = tokens.shape[:2]
    if rows != 1 or cu_seq_lens.dim() != 1:
        raise ValueError(
            f"cu_seq_lens_q has shape {tuple(cu_seq_lens.shape)} and the input {rows} rows: it describes one row; "
            "give position_ids, which begin anew with each document"
        )
    if cu_seq_lens.device.type == "cpu" and not torch.compiler.is_compiling() and int(cu_seq_lens[-1]) != length:
        raise ValueError(f"cu_seq_lens_q ends at {int(cu_seq_lens[-1])}, and the row has {length} tokens")
    begins = cu_seq_lens.to(tokens.device)
    places = torch.arange(length, device=tokens.device)
    return (places - begins[torch.bucketize(places, begins[1:], right=True)])[None]


def relations_of(
    config: PreTrainedConfig,
    tokens: torch.Tensor,
    past_key_values: Cache | None,
    past_length: int | torch.Tensor,
    decoder_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    token_type_ids: torch.Tensor | None,
    relation_ids: torch.Tensor | None,
) -> tuple[AttentionContext, torch.Tensor | None]:
    """What this call knows about its pairs, and which document each token belongs to.

    Args:
        config: a RelPosBertConfig.
        tokens: (B, L) or (B, L, D); only its shape and device are read.
        past_length: tokens in the cache.
        decoder_mask: a decoder's attention mask, which tells where rows padded on the left begin, in a cache too.
        position_ids: (B, L) or (1, L), or (B, L, 2) for a grid; None with a cache, whose keys have no ids.
        token_type_ids: (B, L), or None.
        relation_ids: (B, L, L), or None.

    Returns:
        The context, without what the layers share, and the document of each token, (B, L), or None where no row
        holds more than one.

    Raises:
        ValueError: for inputs that the scheme requires and does not get, and for ids of another shape.
    """
    batch, length = tokens.shape[:2]
    # a static cache has all of its keys from the beginning, whatever it holds
    key_length = length if past_key_values is None else past_key_values.get_mask_sizes(length, 0)[0]
    requires, name = config.required_inputs, config.position_scheme_name
    if position_ids is not None and (
        position_ids.dim() not in (2, 3) or position_ids.shape[1] != length or position_ids.shape[0] not in (1, batch)
    ):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; {batch} rows of {length} tokens need "
            f"({batch}, {length}) or (1, {length})"
        )
    grid = None
    if "grid" in requires:
        if position_ids is None or position_ids.dim() != 3:
            raise ValueError(
                f"position_embedding_type = {name!r} needs position_ids of shape (batch, length, 2): the row and "
                "column of each token"
            )
        grid, position_ids = position_ids.expand(batch, -1, -1), None
    elif position_ids is not None and position_ids.dim() == 3:
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; position_embedding_type = {name!r} takes "
            "(batch, length)"
        )
    if "relation_ids" in requires and relation_ids is None:
        raise ValueError(
            f"position_embedding_type = {name!r} needs relation_ids of shape (batch, length, length): the label of "
            "the edge from each token to each other"
        )
    absolute = config.uses_absolute_positions
    positions = segments = None
    max_distance = 0
    if position_ids is not None and (length > 1 or absolute):
        steps = position_ids[:, 1:] - position_ids[:, :-1]
        restarts = nn.functional.pad((steps <= 0).long().cumsum(-1), (1, 0)).expand(batch, -1)
        # a traced graph cannot look at the data: it takes documents to be numbered 0, 1, 2, … and rows as packed
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            segments = restarts
            if absolute:
                positions, max_distance = position_ids.expand(batch, -1), length - 1
        else:
            if absolute:
                apart = bool((position_ids != torch.arange(length, device=position_ids.device)).any())
            else:
                apart = bool((steps > 1).any())
            if apart:
                positions = position_ids.expand(batch, -1)
                max_distance = int((position_ids.amax(-1) - position_ids.amin(-1)).max())
            if bool(restarts[:, -1].any()):
                segments = restarts
    elif absolute and isinstance(decoder_mask, torch.Tensor):
        # rows padded on the left begin where their mask does; in a prepared mask, at the first key that a query sees.
        # (One query with a window does not see its beginning: the mask of a static cache then counts from the window.)
        seen = decoder_mask
        seen = seen > torch.finfo(seen.dtype).min / 2 if seen.is_floating_point() else seen != 0
        seen = seen if seen.dim() == 2 else seen[:, 0].any(-2)
        places = (seen.long().cumsum(-1) - 1).clamp(min=0)[:, :key_length].expand(batch, -1)
        positions = nn.functional.pad(places, (0, key_length - places.shape[1]))
        max_distance = key_length - 1
    context = AttentionContext(
        length,
        key_length,
        past_length,
        positions=positions,
        max_distance=max_distance,
        grid=grid,
        token_type_ids=token_type_ids,
        relation_ids=relation_ids,
    )
    return context, segments


def self_attention_mask(
    config: PreTrainedConfig,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    segments: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> torch.Tensor | None:
    """The mask for the chosen backend: padding, causality, borders of packed documents, windows.

    Args:
        config: a RelPosBertConfig.
        hidden_states: (B, L, D); only shape, dtype and device are read.
        attention_mask: (B, K), or prepared (B, 1, L, K), which is passed through.
        segments: the document of each token, (B, L), or None.
        position_ids: (B, L) or (1, L), where global tokens are counted within documents; or None.
    """
    overlays = []
    if segments is not None:

        def within_document(batch, head, query, key):
            return segments[batch, query] == segments[batch, key]

        overlays.append(within_document)
    if config.attention_window is not None:
        window = config.attention_window
        everywhere = config.global_tokens if config.global_tokens is not None else [0]
        place = None
        if segments is not None and position_ids is not None:
            place = position_ids.expand(hidden_states.shape[0], -1)
        elif attention_mask is not None and attention_mask.dim() == 2:
            # rows padded on the left begin where their mask does
            length = hidden_states.shape[1]
            keys = length if past_key_values is None else past_key_values.get_mask_sizes(length, 0)[0]
            begin = attention_mask.long().argmax(-1, keepdim=True)
            place = torch.arange(keys, device=hidden_states.device) - begin

        def within_window(batch, head, query, key):
            visible = (query - key).abs() <= window
            at_query, at_key = (query, key) if place is None else (place[batch, query], place[batch, key])
            for token in everywhere:
                visible = visible | (at_query == token) | (at_key == token)
            return visible

        overlays.append(within_window)
    if config.memory_same_length:
        max_distance = config.memory_length

        def within_memory(batch, head, query, key):
            return query - key < max_distance

        overlays.append(within_memory)
    overlay = None
    if overlays:
        overlay = overlays[0] if len(overlays) == 1 else and_masks(*overlays)
    given = {"config": config, "inputs_embeds": hidden_states, "attention_mask": attention_mask}
    if config.is_decoder:
        return create_causal_mask(**given, past_key_values=past_key_values, and_mask_function=overlay)
    return create_bidirectional_mask(**given, and_mask_function=overlay)


def visible_keys(
    mask: torch.Tensor | BlockMask | None, context: AttentionContext, is_causal: bool, device: torch.device
) -> torch.Tensor:
    """How many keys each query may attend to.

    Args:
        mask: as `self_attention_mask` returns it: boolean or additive (B, 1 or H, L, K), a block mask, or None.
        is_causal: that without a mask a query sees no later key.

    Returns:
        (1 or B, 1 or H, L), integers.
    """
    length, keys = context.query_length, context.key_length
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, mask.shape[0], None, length, keys, device)
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        return seen.sum(-1)
    if is_causal:
        return (torch.arange(1, length + 1, device=device) + context.start)[None, None]
    return torch.full((1, 1, length), keys, device=device)


def temperature(
    config: PreTrainedConfig, mask: torch.Tensor | BlockMask | None, context: AttentionContext, device: torch.device
) -> torch.Tensor | None:
    """τ of the formula: max(1, log n / log n₀) for a query that may attend to n keys, with n₀ the trained length.

    A softmax over more keys is flatter; a factor that grows with log n keeps its entropy about where training put it
    (Chiang and Cholak 2022, arXiv 2202.12172; Su 2021, kexue.fm/archives/8823; YaRN's attention factor, Peng et
    al. 2023, arXiv 2309.00071, §3.4, serves the same end). Rows of at most n₀ keys are left exactly as they are. It
    depends on n alone, so that padding and the rest of a batch change nothing. Keys that a scheme itself hides
    (`disan`) are counted.

    Args:
        config: a RelPosBertConfig.
        mask: as `visible_keys` takes it.

    Returns:
        (1 or B, 1 or H, L) in float32; None where every τ is 1, which costs nothing.
    """
    if config.attention_temperature == "none":
        return None
    trained = config.attention_temperature_length or config.max_position_embeddings
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # such a graph may meet longer rows
    if not traced and context.key_length <= trained:
        return None
    count = visible_keys(mask, context, config.is_decoder, device)
    return (count.clamp(min=1).float().log() / math.log(trained)).clamp(min=1.0)
