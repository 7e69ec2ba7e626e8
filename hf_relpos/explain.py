"""Which way attention takes, and why: `explain_backend`, and the command `hf-relpos doctor`."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from .model.attention import FEATURES, OWN, capable_backends, choose
from .model.configuration_relpos_bert import RelPosBertConfig
from .model.context import AttentionContext
from .model.formula import Terms
from .model.schemes import build_scheme, build_shared


def explain_backend(
    target: RelPosBertConfig | PreTrainedModel,
    batch: int = 1,
    length: int = 512,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    dropout: float = 0.0,
    output_attentions: bool = False,
    gradients: bool = False,
) -> str:
    """In words, the way that attention takes in a forward pass of that size without a mask, and why.

    Args:
        target: a model, or a configuration, whose backend is then the default if it names none.
        device: "cpu", "cuda", …; None for the model's own, or the CPU.
        dtype: None for the model's own, or float32.
        dropout: probability of dropping an attention weight, 0 outside training.
        gradients: whether there will be a backward pass.

    Example:

    ```python
    >>> print(hf_relpos.explain_backend(model, batch=4, length=512))
    attn_implementation='relpos' takes chunked: the terms have the form it takes, …
    ```
    """
    config = target.config if isinstance(target, PreTrainedModel) else target
    if isinstance(target, PreTrainedModel):
        device = target.device if device is None else device
        dtype = target.dtype if dtype is None else dtype
    device, dtype = torch.device("cpu" if device is None else device), torch.float32 if dtype is None else dtype
    capable = capable_backends(config.position_needs)
    asked = config._attn_implementation
    if asked is not None and asked != OWN:
        return f"attn_implementation={asked!r} was asked for, and is taken"
    if OWN not in capable:
        reason = "; ".join(FEATURES[need] for need in sorted(config.position_needs))
        return f"attn_implementation={capable[0]!r} is the default, since {OWN!r} cannot: {reason}"
    taken, reason = choose(
        _terms(config),
        AttentionContext(length, length),
        batch,
        config.num_attention_heads,
        device,
        dtype,
        dropout=dropout,
        weights=output_attentions,
        size=config.hidden_size // config.num_attention_heads,
        gradients=gradients,
    )
    return f"attn_implementation={OWN!r} takes {taken}: {reason}"


@torch.no_grad()
def _terms(config: RelPosBertConfig) -> Terms:
    """The terms of a fresh layer for two tokens, which have the letters and relations of any."""
    places = torch.zeros(1, 2, 2, dtype=torch.long)
    context = AttentionContext(2, 2, grid=places, relation_ids=places, query_projection=_same, key_projection=_same)
    shared = build_shared(config)
    return build_scheme(config).terms(replace(context, shared=None if shared is None else shared(context)))


def _same(vectors: torch.Tensor) -> torch.Tensor:
    return vectors
