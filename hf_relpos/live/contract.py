"""Level `contract`: an encoder without padding, by the interfaces of Transformers that its attention goes through.

The encoder runs unchanged on one row with the real tokens of all rows, (1, T). Two functions are registered with
Transformers under `NAME`: the mask function hands the layers a `GroupMask` in place of a mask of T × T, and the
attention function computes the groups of rows of about the same length that it holds, each as Transformers would
compute a batch of these rows, with the mask that Transformers makes for them. So causal masks, windows and
two-sided attention need no code here. All other calls go to `sdpa`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..attention.formula import Table, Terms, toeplitz_table
from ..attention.sliding_window import SlidingWindowMask
from ..attention.unpadding import UnpaddedBatch
from ..host.transformers import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
from .attention import attend_as_stock, offsets_in
from .batch import MismatchError, running, take_batch
from .foreign import modules_in


NAME = "hf_relpos"  # of both functions, and so the value of `config._attn_implementation`
DELEGATE = "sdpa"
# Rows of so many windows are computed by window. See docs/results/benchmarks/cpu-encoder.md.
MANY_WINDOWS = 8


@dataclass(frozen=True)
class GroupMask:
    """Stands for the attention mask of a batch without padding, or of one that is long enough for our backends.

    Attributes:
        batch: the batch.
        masks: for each of its groups, what Transformers' `sdpa` takes for these rows: (b, 1, l, l), (b, 1, 1, l), a
            `SlidingWindowMask` for long rows, or None.
    """

    batch: UnpaddedBatch
    masks: tuple[torch.Tensor | SlidingWindowMask | None, ...]

    def to(self, *args: Any, **kwargs: Any) -> "GroupMask":
        """As it is: accelerate and models ask for masks of another device or dtype."""
        return self

    @classmethod
    def of(cls, batch: UnpaddedBatch, given: Mapping[str, Any]) -> "GroupMask":
        """The masks of the groups.

        Args:
            given: arguments of Transformers' mask functions; "mask_function" is the one from indices of batch, head,
                query and key to whether the query sees the key.
        """
        mask_function, local, longest = given.get("mask_function"), given.get("local_size"), batch.groups[0].length
        window = window_of(mask_function, local) if local and longest > local else None
        is_plain = getattr(mask_function, "__name__", "") == "bidirectional_mask_function"
        masks: list[torch.Tensor | SlidingWindowMask | None] = []
        for group in batch.groups:
            length, is_token = group.length, None if group.visible is None else group.visible[:, 0, 0]
            if is_plain or (window is not None and length <= window + 1):
                masks.append(group.visible)
            elif window is not None and length >= MANY_WINDOWS * window:
                device = group.rows.device
                masks.append(SlidingWindowMask(length, length, window, device, global_tokens=(), is_token=is_token))
            else:
                sizes = {"batch_size": len(group.rows), "q_length": length, "kv_length": length}
                own = {**given, **sizes, "q_offset": 0, "kv_offset": 0, "attention_mask": is_token}
                masks.append(ALL_MASK_ATTENTION_FUNCTIONS[DELEGATE](**own))
        return cls(batch, tuple(masks))


def window_of(mask_function: Any, about: int) -> int | None:
    """The largest distance between a query and the keys that it sees on both sides; None for any other pattern.

    Transformers composes its mask functions of closures, so it is read off some rows of the pattern.

    Args:
        about: the size of the window as the configuration counts it.
    """
    keys, zero = torch.arange(4 * about + 8), torch.zeros((), dtype=torch.long)
    try:
        window = int(mask_function(zero, zero, zero, keys).sum()) - 1
        queries = (0, 1, about, len(keys) // 2, len(keys) - 1)
        near = [(keys - query).abs() <= window for query in queries]
        seen = [mask_function(zero, zero, torch.tensor(query), keys) for query in queries]
    except (IndexError, RuntimeError, TypeError):  # closures over tensors of a batch
        return None
    return window if 0 < window <= about and all(map(torch.equal, seen, near)) else None


def make_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask function: the running batch's `GroupMask`, or Transformers' own mask."""
    batch = take_batch()
    if batch is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[DELEGATE](*args, **kwargs)
    return GroupMask.of(batch, kwargs)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function, with the arguments of Transformers' own.

    Args:
        query: (1, H, T, d) with a `GroupMask`; keys and values may have fewer heads.
        position_bias: of T5 and its like; of the offsets of the longest row, (H, 2L − 1), with a `GroupMask`.

    Returns:
        (1, T, H, d), and None for the weights.
    """
    delegate = ALL_ATTENTION_FUNCTIONS[DELEGATE]
    if not isinstance(attention_mask, GroupMask):
        return delegate(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    masks, position_bias = iter(attention_mask.masks), kwargs.pop("position_bias", None)
    bias: tuple[Table, ...] = ()
    if position_bias is not None:
        bias = (toeplitz_table(position_bias, offsets_in(attention_mask.batch, query)),)
    sizes = [each.shape[-1] for each in (query, key, value)]

    def one(group: Any, *rows: torch.Tensor) -> torch.Tensor:
        mask = next(masks)
        query, key, value = (
            each.unflatten(-1, (-1, size)).transpose(1, 2) for each, size in zip(rows, sizes, strict=True)
        )
        if bias or isinstance(mask, SlidingWindowMask):
            repeats = query.shape[1] // key.shape[1]  # of keys and values that several queries share
            if repeats > 1:
                key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
            terms = Terms(scale=scaling if scaling is not None else sizes[0] ** -0.5, bias=bias)
            return attend_as_stock(module, query, key, value, terms, mask, dropout)
        out: torch.Tensor = delegate(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)[0]
        return out.flatten(2)

    out = attention_mask.batch.by_group(one, *(each.transpose(1, 2).flatten(2) for each in (query, key, value)))
    return out.unflatten(-1, (-1, sizes[2])), None


def call(encoder: Any, forward: Any, given: dict[str, Any], by_token: Iterable[str], batch: UnpaddedBatch) -> Any:
    """The outputs of an encoder; states of padding are zeros.

    Args:
        forward: of the encoder's class, bound to it.
        given: its arguments by name.
        by_token: names of those that are tensors (B, L, …).

    Raises:
        MismatchError: if the encoder takes its masks otherwise, or has other outputs than states and a pooled state.
    """
    inside = {name: batch.remove(given[name]) for name in by_token}
    # with a mask, position ids that begin again are not taken for documents in a row
    inside["attention_mask"] = torch.ones(1, len(batch.indices), dtype=torch.long)
    with running(batch) as found:
        outputs = forward(**{**given, **inside})
    fields = {name for name in outputs if outputs[name] is not None} if isinstance(outputs, Mapping) else set()
    if not found.is_used or not {"last_hidden_state"} <= fields <= {"last_hidden_state", "pooler_output"}:
        raise MismatchError(f"{type(encoder).__name__} has other masks or outputs than the contract")
    outputs["last_hidden_state"] = batch.restore(outputs["last_hidden_state"])
    if "pooler_output" in fields:
        outputs["pooler_output"] = encoder.pooler(outputs["last_hidden_state"])
    return outputs


def replace_attention(encoder: nn.Module, old: str, new: str) -> None:
    """Replace the name of an attention function in the configurations of an encoder."""
    for part in modules_in(encoder):
        config: Any = getattr(part, "config", None)
        if getattr(config, "_attn_implementation_internal", None) == old:
            config._attn_implementation_internal = new


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, make_mask)
