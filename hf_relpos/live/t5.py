"""Accelerated encoders of T5 and mT5: layers share a bias by offset, (H, 2L − 1), instead of (1, H, L, L)."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from ..attention.formula import Terms, toeplitz_table
from ..attention.unpadding import UnpaddedBatch
from ..host.live import MT5Attention, MT5Stack, T5Attention, T5Stack, records_of
from .attention import as_boolean, attend_as_stock, offsets_of, prefer_backend, split_heads
from .batch import take_batch
from .foreign import is_stock


# Up to Transformers 5.14 the result has attention weights on request only.
ALWAYS_THREE = "output_attentions" not in inspect.signature(T5Attention.forward).parameters

ARGUMENTS = tuple(inspect.signature(T5Stack.forward).parameters)[3:]  # after the mask


class _ByOffset:
    """Self-attention of an encoder, for both stock modules, which have the same code."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | UnpaddedBatch | None = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """As stock, whose code runs unless the stack wants positions by offset; then so are the first two results."""
        module: Any = self
        length = hidden_states.shape[1]
        by_offset = kwargs.pop("by_offset", False)
        if isinstance(mask, UnpaddedBatch):
            length = mask.groups[0].length
        elif not (by_offset if position_bias is None else position_bias.dim() == 2):
            given = {"mask": mask, "key_value_states": key_value_states, "position_bias": position_bias}
            return super().forward(hidden_states, **given, **kwargs)  # type: ignore[misc]
        context = offsets_of(hidden_states, length)
        if position_bias is None:
            bucket = module._relative_position_bucket(
                context.offsets(hidden_states.device),
                bidirectional=True,
                num_buckets=module.relative_attention_num_buckets,
                max_distance=module.relative_attention_max_distance,
            )
            position_bias = module.relative_attention_bias(bucket).transpose(0, 1)
        terms = Terms(scale=1.0, bias=(toeplitz_table(position_bias, context),))
        vectors = [projection(hidden_states) for projection in (module.q, module.k, module.v)]
        rate = module.dropout if module.training else 0.0  # here it is a number
        config = getattr(module, "config", None)  # which modules of Transformers 5.14 do not have
        wanted = bool(kwargs.get("output_attentions", getattr(config, "output_attentions", False)))
        wanted = wanted and (not ALWAYS_THREE or module.config._attn_implementation == "eager")  # as stock gives them

        def attend(mask: torch.Tensor | None, *vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            query, key, value = (split_heads(each, module.n_heads) for each in vectors)
            return attend_as_stock(module, query, key, value, terms, mask, rate, wanted)

        weights = None
        if isinstance(mask, UnpaddedBatch):
            out = mask.by_group(lambda group, *rows: attend(group.visible, *rows)[0], *vectors)
        else:
            is_added = getattr(config, "_attn_implementation", "eager") == "eager"
            out, weights = attend(as_boolean(mask, hidden_states if is_added else None), *vectors)
        result = (module.o(out), position_bias)
        return (*result, weights) if ALWAYS_THREE or wanted else result


class _Stack:
    """An encoder whose layers have positions by offset where that is faster and no code of others is on the way."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As stock."""
        stack: Any = self
        records_of(stack)
        given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        if (batch := take_batch()) is not None:

            def run(states: torch.Tensor) -> torch.Tensor:
                bias = None
                for block in stack.block:
                    states, bias = block(states, batch, bias)[:2]
                return states

            return run_unpadded(stack, input_ids, given, run)
        tokens = given.get("inputs_embeds") if input_ids is None else input_ids
        # up to Transformers 5.14 nothing gets from here to the attention
        may = ALWAYS_THREE and not given.get("is_causal") and not is_refused(stack, attention_mask)
        if tokens is not None and may:
            rows, length = tokens.shape[:2]
            is_long = prefer_backend(stack, length, length, rows, stack.config.num_heads)
            if is_long and is_stock(stack):
                kwargs["by_offset"] = True
        return super().forward(input_ids, attention_mask, *args, **kwargs)  # type: ignore[misc]


def run_unpadded(
    stack: Any, input_ids: Any, given: dict[str, Any], run: Callable[[torch.Tensor], torch.Tensor]
) -> BaseModelOutputWithPastAndCrossAttentions:
    """The outputs of an encoder of tokens without padding, (1, T).

    Args:
        given: the arguments of its forward by name, but for `input_ids`.
        run: its blocks, from states (1, T, D) to such states.
    """
    vectors = given.get("inputs_embeds")
    states = stack.embed_tokens(input_ids) if vectors is None else vectors
    states = stack.dropout(stack.final_layer_norm(run(stack.dropout(states))))
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states)


def is_refused(stack: Any, mask: torch.Tensor | None) -> bool:
    """Whether stock's attention raises an error for a mask of this dtype."""
    return (
        isinstance(mask, torch.Tensor)
        and mask.dim() == 4
        and stack.config._attn_implementation != "eager"
        and mask.dtype not in (torch.bool, stack.dtype)
    )


class AcceleratedT5Stack(_Stack, T5Stack):
    """`T5Stack` of an encoder with positions by offset."""


class AcceleratedMT5Stack(_Stack, MT5Stack):
    """`MT5Stack` of an encoder with positions by offset."""


# `save_pretrained` of a stack by itself writes this name as the architecture.
AcceleratedT5Stack.__name__ = T5Stack.__name__
AcceleratedMT5Stack.__name__ = MT5Stack.__name__


class AcceleratedT5Attention(_ByOffset, T5Attention):
    """T5's self-attention with our backends."""


class AcceleratedMT5Attention(_ByOffset, MT5Attention):
    """mT5's self-attention with our backends."""
