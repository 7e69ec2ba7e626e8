"""Unpadding of live encoders: which calls of stock's encoders are computed without their padding, and how.

Stock's layers run unchanged on (1, T, D). An unpadding encoder hands them an `UnpaddedBatch` in place of the attention
mask. So threads, gradient checkpointing and copies of a model need nothing of their own.
"""

from typing import Any

import torch
from torch import nn

from ..attention.masks import is_visible
from ..attention.tracing import is_traced
from ..attention.unpadding import FEWEST, FIRST, UnpaddedBatch
from ..families.registry import LIVE
from ..host.live import collects_outputs
from ..host.transformers import has_cache
from .attention import has_contents
from .parts import strange_part


# Values of `_attn_implementation` that are attention as it is known here; others are code of somebody else's.
IMPLEMENTATIONS = (None, "eager", "sdpa")
# In the names of heads for spans, which read all states of a row.
SPANS = "ForQuestionAnswering"


def key_mask(mask: torch.Tensor, dtype: torch.dtype, is_added: bool, by_row: bool) -> torch.Tensor | None:
    """A mask that hides the same keys from all queries and heads, as (B, L), True for those that are seen; else None.

    Args:
        mask: what stock would read.
        dtype: of the scores. A mask of this dtype is additive.
        is_added: whether stock adds masks of four dimensions to the scores, whatever their dtype: booleans and
            integers hide nothing there.
        by_row: whether stock takes masks (B, L), nonzero for keys that are seen.
    """
    if mask.dim() == 2:
        return mask != 0 if by_row else None
    is_read = mask.dtype == dtype or (mask.dtype == torch.bool and not is_added)
    if mask.dim() != 4 or mask.shape[1] != 1 or not is_read:
        return None
    visible = is_visible(mask)
    if mask.dtype != torch.bool and not bool(((mask == 0) | ~visible).all()):
        return None
    first = visible[:, 0, 0]
    return first if bool((visible == first[:, None, None]).all()) else None


def unpadded(
    encoder: nn.Module,
    states: torch.Tensor,
    mask: torch.Tensor | None,
    outputs: dict[str, Any],
    read: slice = FIRST,
    by_row: bool = False,
    dtype: torch.dtype | None = None,
    whole: bool = False,
) -> UnpaddedBatch | None:
    """The batch of a call without its padding; None for a call that has to see padding, or has none.

    Args:
        states: (B, L, D), what the encoder is called with.
        mask: what stock reads as `key_mask` says, or adds to the scores.
        outputs: further arguments, of which those that ask for hidden states and attention weights count.
        read, by_row: as of `UnpaddedBatch.of` and `key_mask`.
        dtype: of the scores; None for that of the states.
        whole: whether a batch without padding is wanted, too, and a single row; then None stands for a mask of ones.
    """
    # not all encoders have their configuration themselves
    config: Any = next((vars(each)["config"] for each in encoder.modules() if "config" in vars(each)), None)
    implementation = getattr(config, "_attn_implementation", None)
    if mask is None and whole:
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    if (
        not isinstance(mask, torch.Tensor)
        or not (has_contents(states) and has_contents(mask))
        or (states.shape[0] < 2 and not whole)
        or any(outputs.get(name) for name in ("output_hidden_states", "output_attentions"))
        or outputs.get("encoder_hidden_states") is not None
        or has_cache(outputs)
        or outputs.get("is_causal")
        or bool(getattr(config, "chunk_size_feed_forward", False))
        or implementation not in IMPLEMENTATIONS
        or collects_outputs()
    ):
        return None
    real = key_mask(mask, dtype or states.dtype, implementation != "sdpa", by_row)
    if real is None or real.shape != states.shape[:2]:
        return None
    batch = UnpaddedBatch.of(real, read, 0.0 if whole else FEWEST)
    return None if batch is None or strange_part(encoder) is not None else batch


def may_unpad(encoder: nn.Module) -> bool:
    """Whether an encoder of this package's own models may take padding out of the call that is running."""
    return not is_traced() and not collects_outputs() and strange_part(encoder) is None


class UnpaddingEncoder:
    """An encoder of stock's whose layers get a batch without its padding: to be put before the stock class."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As stock; the states of padding are zeros."""
        encoder: Any = self
        # by position comes, in all of these classes, what a decoder needs
        is_decoder = any(each is not None for each in args)
        batch = None if is_decoder else unpadded(encoder, hidden_states, attention_mask, kwargs)
        if batch is None:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc]
        outputs = super().forward(batch.remove(hidden_states), batch, *args, **kwargs)  # type: ignore[misc]
        outputs["last_hidden_state"] = batch.restore(outputs["last_hidden_state"])
        return outputs


def subclass_of_stock(namespace: dict[str, Any], name: str, container: type, attention: type) -> type[nn.Module]:
    """The class of that name in a module of this folder, made of the stock class that the registry says.

    Args:
        namespace: of the module; in it a mixin for one stock class has the name of that class after an underscore.
        container: the mixin for other containers.
        attention: the mixin for other attention modules.
    """
    code = namespace["__name__"].rpartition(".")[2]
    for family in LIVE:
        for stock, ours in family.unpadding.items():
            if family.code == code and ours == name:
                mixin = namespace.get(f"_{stock}", attention if stock == family.attention else container)
                fields = {"__module__": namespace["__name__"], "__doc__": f"`{stock}` of stock, without padding."}
                fields["is_custom_code"] = classmethod(lambda kind: False)  # else saved under other names than stock's
                made: type[nn.Module] = type(name, (mixin, family.stock_class(stock)), fields)
                made.__name__ = stock  # which `save_pretrained` writes as the architecture
                return namespace.setdefault(name, made)  # made once
    raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
