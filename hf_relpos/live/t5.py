"""Accelerated encoders of T5, mT5 and UMT5: a bias by offset, (H, 2L − 1), instead of (1, H, L, L).

The layers of T5 and mT5 share the bias of the first one, those of UMT5 have one each.
"""

import inspect
from functools import partial
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from ..attention.context import AttentionContext
from ..attention.formula import Terms, toeplitz_table
from ..attention.unpadding import UnpaddedBatch
from ..host.live import MT5Attention, MT5Stack, T5Attention, T5Stack, UMT5Attention, UMT5Stack, records_of
from .attention import attend_to_batch, offsets_in, split_heads
from .batch import Batch, PaddedBatch, take_batch


# Up to Transformers 5.14 the result has attention weights on request only, and layers get no other arguments.
ALWAYS_THREE = "output_attentions" not in inspect.signature(T5Attention.forward).parameters

ARGUMENTS = tuple(inspect.signature(T5Stack.forward).parameters)[3:]  # after the mask


def attend_with_bias(
    module: Any, states: torch.Tensor, batch: Batch, bias: torch.Tensor, context: AttentionContext
) -> torch.Tensor:
    """Attention of one layer.

    Args:
        bias: of each offset of the context, (H, 2L − 1).
    """
    terms = Terms(scale=1.0, bias=(toeplitz_table(bias, context),))
    vectors = [projection(states) for projection in (module.q, module.k, module.v)]
    rate = module.dropout if module.training else 0.0  # here it is a number
    out: torch.Tensor = module.o(
        attend_to_batch(module, batch, vectors, partial(split_heads, module.n_heads), terms, rate)
    )
    return out


class _ByOffset:
    """Self-attention of an encoder, for the stock modules of T5 and mT5, which have the same code."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | Batch | None = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """As stock, whose code runs without a batch; the bias that it returns is by offset."""
        module: Any = self
        batch = kwargs.pop("batch", mask)
        if not isinstance(batch, UnpaddedBatch | PaddedBatch):
            given = {"mask": mask, "key_value_states": key_value_states, "position_bias": position_bias}
            return super().forward(hidden_states, **given, **kwargs)  # type: ignore[misc]
        context = offsets_in(batch, hidden_states)
        if position_bias is None:
            bucket = module._relative_position_bucket(
                context.offsets(hidden_states.device),
                bidirectional=True,
                num_buckets=module.relative_attention_num_buckets,
                max_distance=module.relative_attention_max_distance,
            )
            position_bias = module.relative_attention_bias(bucket).transpose(0, 1)
        result = (attend_with_bias(module, hidden_states, batch, position_bias, context), position_bias)
        return (*result, None) if ALWAYS_THREE else result


class _Stack:
    """An encoder whose layers have positions by offset."""

    shares_bias = True

    def forward(self, input_ids: Any = None, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As stock."""
        records_of(self)
        batch = take_batch()
        if isinstance(batch, UnpaddedBatch):
            given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
            return self.run_unpadded(batch, input_ids, given.get("inputs_embeds"))
        if batch is not None and ALWAYS_THREE:
            kwargs["batch"] = batch
        return super().forward(input_ids, attention_mask, *args, **kwargs)  # type: ignore[misc]

    def run_unpadded(
        self: Any, batch: UnpaddedBatch, tokens: torch.Tensor | None, vectors: torch.Tensor | None
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """The outputs for tokens without padding, (1, T), or their embeddings, (1, T, D)."""
        states = self.dropout(self.embed_tokens(tokens) if vectors is None else vectors)
        bias = None
        for block in self.block:
            found = block(states, batch, bias) if self.shares_bias else block(states, batch)
            states, *rest = found if isinstance(found, tuple) else (found,)
            bias = rest[0] if self.shares_bias else None
        states = self.dropout(self.final_layer_norm(states))
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states)


class AcceleratedT5Stack(_Stack, T5Stack):
    """`T5Stack` of an encoder with positions by offset."""


class AcceleratedMT5Stack(_Stack, MT5Stack):
    """`MT5Stack` of an encoder with positions by offset."""


class AcceleratedUMT5Stack(_Stack, UMT5Stack):
    """`UMT5Stack` of an encoder without padding."""

    shares_bias = False


# `save_pretrained` of a stack by itself writes this name as the architecture.
AcceleratedT5Stack.__name__ = T5Stack.__name__
AcceleratedMT5Stack.__name__ = MT5Stack.__name__
AcceleratedUMT5Stack.__name__ = UMT5Stack.__name__


class AcceleratedT5Attention(_ByOffset, T5Attention):
    """T5's self-attention with our backends."""


class AcceleratedMT5Attention(_ByOffset, MT5Attention):
    """mT5's self-attention with our backends."""


class AcceleratedUMT5Attention(UMT5Attention):
    """UMT5's self-attention of a batch without padding."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        cache: Any = None,
        attention_mask: torch.Tensor | Batch | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As stock, whose code runs without a batch."""
        if not isinstance(attention_mask, UnpaddedBatch):
            return super().forward(hidden_states, encoder_hidden_states, cache, attention_mask, **kwargs)
        context = offsets_in(attention_mask, hidden_states)
        bucket = self._relative_position_bucket(context.offsets(hidden_states.device))
        bias = self.relative_attention_bias(bucket).transpose(0, 1)
        return attend_with_bias(self, hidden_states, attention_mask, bias, context), None
