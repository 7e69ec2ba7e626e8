"""Accelerated RoFormer: the stock function rotates queries and keys, and the rest is attention without terms."""

from typing import Any

import torch
from torch import nn
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention

from ...attention.formula import Terms
from .attention import as_boolean, attend_as_stock, is_worthwhile, offsets_of, split_heads


class AcceleratedRoFormerSelfAttention(RoFormerSelfAttention):
    """RoFormer's self-attention in an encoder."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        sinusoidal_pos: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As stock, whose code runs for short inputs; attention weights are returned on request only."""
        batch, length = hidden_states.shape[:2]
        long = is_worthwhile(self, length, length, batch, self.num_attention_heads)
        if not long or encoder_hidden_states is not None or past_key_values is not None:
            return super().forward(
                hidden_states,
                attention_mask,
                sinusoidal_pos,
                encoder_hidden_states,
                past_key_values,
                output_attentions,
                **kwargs,
            )
        query, key, value = (
            split_heads(projection(hidden_states), self.num_attention_heads)
            for projection in (self.query, self.key, self.value)
        )
        if sinusoidal_pos is not None:
            rotated = (query, key, value) if self.rotary_value else (query, key)
            query, key, *last = self.apply_rotary_position_embeddings(sinusoidal_pos, *rotated)
            value = last[0] if last else value
        return attend_as_stock(
            self,
            query,
            key,
            value,
            Terms(),
            offsets_of(hidden_states),
            as_boolean(attention_mask),
            self.dropout.p,
            output_attentions,
        )


def decoder(encoder: nn.Module) -> list[str]:
    """Reasons to skip an encoder."""
    config: Any = encoder.config
    return ["it is a decoder, whose cache and causal mask stay with stock"] if config.is_decoder else []
