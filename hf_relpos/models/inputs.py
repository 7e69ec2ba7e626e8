"""Check kinds, dtypes and shapes of the arguments of `forward`, with errors that name the argument.

The checks never read the contents of tensors on a device. Traced graphs do not contain them.
"""

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig

from ..attention.tracing import is_traced


INDICES = (torch.int64, torch.int32)  # dtypes of ids for embeddings
LABELS = (*INDICES, torch.int16, torch.int8, torch.uint8)
VECTORS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_tensor(name: str, value: Any, dtypes: tuple[torch.dtype, ...] = INDICES) -> None:
    """
    Raises:
        TypeError: for a value that is not a tensor.
        ValueError: for a tensor of another dtype.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} is a {type(value).__name__}; give a tensor, as tokenizers do with return_tensors='pt'"
        )
    if value.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {value.dtype}; give one of {', '.join(map(str, dtypes))}")


def check_inputs(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    required: frozenset[str],
    input_ids: Any,
    inputs_embeds: Any,
    attention_mask: Any,
    token_type_ids: Any,
    position_ids: Any,
    relation_ids: Any,
    has_cache: bool,
) -> None:
    """Check the arguments of `forward` against each other and the configuration; each may be None.

    Args:
        config: a RelPosBertConfig.
        dtype: dtype of the model.
        required: inputs that the scheme reads: `relation_ids`.
        has_cache: whether a mask also covers keys of earlier calls.

    Raises:
        TypeError: for values that are not tensors.
        ValueError: for wrong dtypes and shapes; names the argument and its valid values.
    """
    if is_traced():
        return
    if inputs_embeds is None:
        check_tensor("input_ids", input_ids)
        if input_ids.dim() != 2 or not input_ids.numel():
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)}; give (batch, length), both at least 1"
                + (": a row alone as input_ids[None]" if input_ids.dim() == 1 else "")
            )
        batch, length = input_ids.shape
    else:
        check_tensor("inputs_embeds", inputs_embeds, VECTORS)
        if inputs_embeds.dim() != 3 or not inputs_embeds.numel() or inputs_embeds.shape[2] != config.input_size:
            raise ValueError(
                f"inputs_embeds has shape {tuple(inputs_embeds.shape)}; give (batch, length, {config.input_size}), "
                "batch and length at least 1: the width is that of the word embeddings"
            )
        batch, length = inputs_embeds.shape[:2]
    if token_type_ids is not None:
        check_tensor("token_type_ids", token_type_ids)
        if tuple(token_type_ids.shape) not in ((batch, length), (1, length)):
            raise ValueError(
                f"token_type_ids has shape {tuple(token_type_ids.shape)}; {batch} rows of {length} tokens need "
                f"({batch}, {length})"
            )
    if position_ids is not None:
        check_tensor("position_ids", position_ids)
    if relation_ids is not None and "relation_ids" in required:
        check_tensor("relation_ids", relation_ids, LABELS)
        if tuple(relation_ids.shape) not in ((batch, length, length), (1, length, length)):
            raise ValueError(
                f"relation_ids has shape {tuple(relation_ids.shape)}; {batch} rows of {length} tokens need "
                f"({batch}, {length}, {length})"
            )
    if attention_mask is not None and not isinstance(attention_mask, BlockMask):
        _check_mask(config, dtype, attention_mask, batch, length, has_cache)


def _check_mask(
    config: PreTrainedConfig, dtype: torch.dtype, mask: Any, batch: int, length: int, has_cache: bool
) -> None:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attention_mask is a {type(mask).__name__}; give a tensor, or None")
    keys = mask.shape[-1] if has_cache and mask.dim() else length
    prepared = mask.dim() == 4
    fits = (
        mask.shape[0] in (1, batch)
        and mask.shape[1] in (1, config.num_attention_heads)
        and mask.shape[2] in (1, length)
        and mask.shape[3] == keys
        if prepared
        else tuple(mask.shape) == (batch, keys)
    )
    if not fits:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; {batch} rows of {length} tokens need ({batch}, {keys}), "
            f"nonzero for tokens, or, prepared, ({batch}, 1, {length}, {keys})"
        )
    if prepared and mask.dtype not in (torch.bool, torch.float32, dtype):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; a prepared mask is boolean, True: "
            f"may attend, or is added to the scores, in float32 or the dtype of the model, {dtype}"
        )
