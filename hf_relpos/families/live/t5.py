"""Accelerated encoders of T5 and mT5: layers share a bias by offset, (H, 2L − 1), instead of (1, H, L, L)."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers.models.mt5.modeling_mt5 import MT5Attention, MT5Stack
from transformers.models.t5.modeling_t5 import T5Attention, T5Stack

from ...attention.formula import Terms, toeplitz_table
from ...host.transformers import has_cache
from .attention import as_boolean, attend_as_stock, is_worthwhile, offsets_of, split_heads
from .unpadding import UnpaddedBatch, records_of, unpadded, with_states


# Up to Transformers 5.14 the result has attention weights on request only.
ALWAYS_THREE = "output_attentions" not in inspect.signature(T5Attention.forward).parameters

OUTPUTS = ("output_hidden_states", "output_attentions")


class _ByOffset:
    """Self-attention of an encoder, for both stock modules, which have the same code."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """As stock, whose code runs for short inputs; else `position_bias` and the second result are by offset."""
        module: Any = self
        unpadded_batch: UnpaddedBatch | None = kwargs.pop("unpadded_batch", None)
        batch, length = hidden_states.shape[:2]
        by_offset = (
            module.has_relative_attention_bias and is_worthwhile(module, length, length, batch, module.n_heads)
            if position_bias is None
            else position_bias.dim() == 2
        )
        if unpadded_batch is not None:
            length = unpadded_batch.groups[0].length
        elif not by_offset or kwargs.get("is_causal") or key_value_states is not None or has_cache(kwargs):
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
        config = getattr(module, "config", None)  # which modules of Transformers 5.14 do not have
        wanted = bool(kwargs.get("output_attentions", getattr(config, "output_attentions", False)))
        wanted = wanted and (not ALWAYS_THREE or module.config._attn_implementation == "eager")  # as stock gives them

        def attend(mask: torch.Tensor | None, *vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            query, key, value = (split_heads(each, module.n_heads) for each in vectors)
            return attend_as_stock(
                module, query, key, value, terms, offsets_of(vectors[0]), mask, module.dropout, wanted
            )

        weights = None
        if unpadded_batch is not None:
            out = unpadded_batch.by_group(lambda group, *rows: attend(group.visible, *rows)[0], *vectors)
        else:
            is_added = getattr(config, "_attn_implementation", "eager") == "eager"
            out, weights = attend(as_boolean(mask, hidden_states if is_added else None), *vectors)
        result = (module.o(out), position_bias)
        return (*result, weights) if ALWAYS_THREE or wanted else result


class _Unpadding:
    """An encoder that takes padding out; the states of padding are zeros."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As stock. Its layers get no mask, and the batch by a keyword argument."""
        stack: Any = self
        records_of(stack)
        batch = None
        asked = {name: kwargs.get(name, getattr(stack.config, name, False)) for name in (*OUTPUTS, "is_causal")}
        like = inputs_embeds if input_ids is None else input_ids[..., None]
        is_encoder = encoder_hidden_states is None and (input_ids is None or inputs_embeds is None)
        if like is not None and is_encoder:
            batch = unpadded(stack, like, attention_mask, {**kwargs, **asked})
        if batch is None:
            rest = (encoder_hidden_states, encoder_attention_mask, inputs_embeds)
            return super().forward(input_ids, attention_mask, *rest, **kwargs)  # type: ignore[misc]
        assert like is not None, "there is a batch"
        states = batch.remove(like)
        if inputs_embeds is None:
            states = stack.embed_tokens(states[..., 0])
        outputs = super().forward(inputs_embeds=states, unpadded_batch=batch, **kwargs)  # type: ignore[misc]
        return with_states(outputs, batch)


class UnpaddingT5Stack(_Unpadding, T5Stack):
    """`T5Stack` of an encoder without padding."""


class UnpaddingMT5Stack(_Unpadding, MT5Stack):
    """`MT5Stack` of an encoder without padding."""


# `save_pretrained` of a stack by itself writes this name as the architecture.
UnpaddingT5Stack.__name__ = T5Stack.__name__
UnpaddingMT5Stack.__name__ = MT5Stack.__name__


class AcceleratedT5Attention(_ByOffset, T5Attention):
    """T5's self-attention with our backends."""


class AcceleratedMT5Attention(_ByOffset, MT5Attention):
    """mT5's self-attention with our backends."""


def decoder(stack: nn.Module) -> list[str]:
    """Reasons to skip a stack."""
    return ["it is a decoder, whose cache and cross-attention stay with stock"] if stack.is_decoder else []
