"""Accelerated encoders of T5 and mT5: layers share a bias by offset, (H, 2L − 1), instead of (1, H, L, L)."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers.models.mt5.modeling_mt5 import MT5Attention
from transformers.models.t5.modeling_t5 import T5Attention

from ...attention.formula import Terms, toeplitz_table
from .attention import as_boolean, attend_as_stock, is_worthwhile, offsets_of, split_heads


# Up to Transformers 5.14 the result has attention weights on request only.
ALWAYS_THREE = "output_attentions" not in inspect.signature(T5Attention.forward).parameters


class _ByOffset:
    """Self-attention of an encoder, for both stock modules, which have the same code."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """As stock, whose code runs for short inputs; else `position_bias` and the second result are by offset."""
        module: Any = self
        batch, length = hidden_states.shape[:2]
        by_offset = (
            module.has_relative_attention_bias and is_worthwhile(module, length, length, batch, module.n_heads)
            if position_bias is None
            else position_bias.dim() == 2
        )
        if not by_offset or key_value_states is not None or past_key_values is not None:
            return super().forward(  # type: ignore[misc]
                hidden_states, mask, key_value_states, position_bias, past_key_values, **kwargs
            )
        context = offsets_of(hidden_states)
        if position_bias is None:
            bucket = module._relative_position_bucket(
                context.offsets(hidden_states.device),
                bidirectional=True,
                num_buckets=module.relative_attention_num_buckets,
                max_distance=module.relative_attention_max_distance,
            )
            position_bias = module.relative_attention_bias(bucket).transpose(0, 1)
        query, key, value = (
            split_heads(projection(hidden_states), module.n_heads) for projection in (module.q, module.k, module.v)
        )
        terms = Terms(scale=1.0, bias=(toeplitz_table(position_bias, context),))
        wanted = bool(kwargs.get("output_attentions"))
        wanted = wanted and (not ALWAYS_THREE or module.config._attn_implementation == "eager")  # as stock gives them
        out, weights = attend_as_stock(
            module, query, key, value, terms, context, as_boolean(mask), module.dropout, wanted
        )
        result = (module.o(out), position_bias)
        return (*result, weights) if ALWAYS_THREE or wanted else result


class AcceleratedT5Attention(_ByOffset, T5Attention):
    """T5's self-attention with our backends."""


class AcceleratedMT5Attention(_ByOffset, MT5Attention):
    """mT5's self-attention with our backends."""


def decoder(stack: nn.Module) -> list[str]:
    """Reasons to skip a stack."""
    return ["it is a decoder, whose cache and cross-attention stay with stock"] if stack.is_decoder else []
