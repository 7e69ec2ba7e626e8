"""Explain which attention backend a call uses: `explain_backend`, and the command `hf-relpos doctor`."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ..attention.backends.eager import Eager
from ..attention.backends.window_blocks import most_keys_whole
from ..attention.call import AttentionCall, Backend, reads_window_only
from ..attention.dispatch import AUTO, BY_NAME, choose
from .capabilities import check_attention, probe_call
from .configuration_relpos_bert import RelPosBertConfig


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
    """The attention backend of a forward pass of that size without padding, and why others are rejected.

    With an `attention_window` it also tells whether that backend reads only the keys in the window; none does in a
    graph (`torch.compile`, export).

    Args:
        target: a model, or a configuration, which has the default backend if it names none.
        batch: rows.
        length: tokens per row.
        device: "cpu", "cuda", …; None for the model's own, or the CPU.
        dtype: None for the model's own, or float32.
        dropout: probability of dropping an attention weight, 0 outside training.
        output_attentions: whether the attention weights are returned.
        gradients: whether a backward pass follows.

    Returns:
        The backend on the first line, then a line for each skipped backend with the rejection reasons, and with an
        attention window a line about the keys that are read.

    Raises:
        ValueError: for a configuration that names a backend which cannot compute its terms.

    Example:

    ```python
    >>> print(hf_relpos.explain_backend(model, batch=4, length=512))
    attn_implementation='relpos' takes chunked
    - not flex_attention: by default it is for CUDA alone
    ```
    """
    config = target.config if isinstance(target, PreTrainedModel) else target
    if isinstance(target, PreTrainedModel):
        device = target.device if device is None else device
        dtype = target.dtype if dtype is None else dtype
    implementation = check_attention(config, config._attn_implementation)
    call = probe_call(
        config,
        batch,
        length,
        torch.float32 if dtype is None else dtype,
        torch.device("cpu" if device is None else device),
        dropout,
        output_attentions,
        gradients,
    )
    if implementation != AUTO:
        lines = [f"attn_implementation={implementation!r} takes {implementation}: it was requested by name"]
        return "\n".join(lines + _about_window(config, *named(implementation, call)))
    backend, rejected = choose(call)
    lines = [f"attn_implementation={AUTO!r} takes {backend.name}"]
    lines += [f"- not {name}: {'; '.join(reasons)}" for name, reasons in rejected.items()]
    return "\n".join(lines + _about_window(config, backend, call))


def named(implementation: str, call: AttentionCall) -> tuple[Backend, AttentionCall]:
    """The backend that a value of `attn_implementation` other than `AUTO` names, and its call."""
    # eager attention returns the weights, even with a window
    return BY_NAME[implementation], replace(call, by_name=True, output_weights=implementation == Eager.name)


def _about_window(config: RelPosBertConfig, backend: Backend, call: AttentionCall) -> list[str]:
    """A line about the keys that a call reads with an attention window; empty without one."""
    window = config.attention_window
    if window is None:
        return []
    if reads_window_only(backend, call):
        keys = f"{backend.name} reads the keys in it and the global tokens only: time and memory grow with L·window"
    else:
        keys = f"{backend.name} has the mask of all pairs: time and memory grow with L², as without a window"
        if hasattr(backend, "reads_window_only") and not call.output_weights:
            keys += f"; with more than {most_keys_whole(window):,} tokens it would read those in the window only"
    return [f"- attention_window = {window}: {keys}"]
