"""BERT and the classes that are copies of it: unpadding, and attention without any term by the faster backend.

The subclasses are made when they are asked for, by the name that a pickle has, too: the modules of Transformers that a
model does not come from are not imported.
"""

from typing import Any

import torch
from torch import nn

from ..attention.formula import Terms
from ..attention.unpadding import RowGroup, UnpaddedBatch
from ..host.transformers import has_cache
from .attention import attend_as_stock, is_worthwhile, split_heads
from .parts import is_own
from .unpadding import UnpaddingEncoder, subclass_of_stock


class _SelfAttention:
    """Self-attention of an encoder, to be put before a stock class."""

    projections = ("query", "key", "value")
    heads = "num_attention_heads"
    output: str | None = None

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As stock; an `UnpaddedBatch` in place of the mask comes from the unpadding encoder."""
        module: Any = self
        heads = getattr(module, self.heads)
        batch, length = hidden_states.shape[:2]
        is_unpadded = isinstance(attention_mask, UnpaddedBatch)
        if not is_unpadded:
            other = attention_mask is not None or module.is_causal or kwargs.get("is_causal") or args
            other = other or has_cache(kwargs) or hidden_states.device.type != "cpu"
            # eager attention has weights, which hooks and callers may want
            other = other or module.config._attn_implementation != "sdpa"
            if other or not is_worthwhile(module, length, length, batch, heads) or not is_own(module):
                return super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc]

        def attend(group: RowGroup | None, *vectors: torch.Tensor) -> torch.Tensor:
            query, key, value = (split_heads(each, heads) for each in vectors)
            terms, mask = Terms(scale=module.scaling), None if group is None else group.visible
            return attend_as_stock(module, query, key, value, terms, mask, module.dropout.p)[0]

        vectors = [getattr(module, name)(hidden_states) for name in self.projections]
        out = attention_mask.by_group(attend, *vectors) if is_unpadded else attend(None, *vectors)
        return (out if self.output is None else getattr(module, self.output)(out)), None


class _DistilBertSelfAttention(_SelfAttention):
    """The same with DistilBERT's names; its output projection is inside."""

    projections = ("q_lin", "k_lin", "v_lin")
    heads = "n_heads"
    output = "out_lin"


def __getattr__(name: str) -> type[nn.Module]:
    return subclass_of_stock(globals(), name, UnpaddingEncoder, _SelfAttention)
