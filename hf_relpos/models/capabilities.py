"""What a configuration can do: backends that compute its terms, whether layers share them, and why a backend is used.

Capabilities are derived, not declared: a scheme is built on the meta device, without data, and its terms are
inspected. `explain_backend` and `hf-relpos doctor` say what was found.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..attention.backends.eager import Eager
from ..attention.call import AttentionCall, reads_window_only
from ..attention.context import AttentionContext, LayerInputs, TokenInputs
from ..attention.dispatch import AUTO, BY_NAME, capable_implementations, check_implementation, choose
from ..attention.formula import Terms
from ..schemes.registry import build_scheme, build_shared, scheme_parts
from .configuration_relpos_bert import RelPosBertConfig
from .sequence import Rows, indexed_sequence, window_mask


class _Projection:
    """Placeholder for the W_q or W_k of a layer, which records whether a scheme used it."""

    used = False

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        self.used = True
        return vectors


_PROBED: dict[Any, tuple[Terms, AttentionContext, bool]] = {}
MOST_PROBED = 64
LABELS = ("id2label", "label2id")  # of which there may be 100,000, and no scheme reads them


def _probe(config: PreTrainedConfig) -> tuple[Terms, AttentionContext, bool]:
    """Terms for two tokens, their context, and whether all layers share them; cached by configuration."""
    fields = {name: value for name, value in vars(config).items() if name not in LABELS}
    key = (*(scheme for scheme, _ in scheme_parts(config)), repr(sorted(fields.items())))
    if key not in _PROBED:
        if len(_PROBED) >= MOST_PROBED:
            _PROBED.clear()
        _PROBED[key] = _make_terms(config)
    return _PROBED[key]


def _make_terms(config: PreTrainedConfig) -> tuple[Terms, AttentionContext, bool]:
    projection = _Projection()
    with torch.device("meta"):
        scheme: Any = build_scheme(config)
        shared = build_shared(config)
        ids = torch.zeros(1, 2, 2, dtype=torch.long)
        context = AttentionContext(
            2,
            2,
            tokens=TokenInputs(grid=ids, token_type_ids=ids[..., 0], relation_ids=ids),
            layer=LayerInputs(None, torch.zeros(1, config.num_attention_heads, 2), projection, projection),
            device=torch.device("meta"),
        )
        try:
            with torch.no_grad():
                found = None if shared is None else shared(context)
                terms = scheme(replace(context, layer=context.layer._replace(shared=found)))
        except (RuntimeError, NotImplementedError) as error:
            cause = f"its terms cannot be made on the meta device ({error})"
            remedy = "`Scheme.forward` must not read the contents of tensors there (`tensor.is_meta`)"
            name = config.position_scheme_name
            raise ValueError(f"position_embedding_type = {name!r}: {cause}; {remedy}") from error
    own = any(True for _ in scheme.parameters()) or any(isinstance(module, nn.Dropout) for module in scheme.modules())
    own = own or any(kind.has_token_numbers() for kind, _ in scheme_parts(config))
    return terms, context, not own and not projection.used


def probe_call(
    config: PreTrainedConfig,
    batch: int = 1,
    length: int = 2,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    dropout: float = 0.0,
    output_weights: bool = False,
    needs_gradients: bool = False,
) -> AttentionCall:
    """An attention call of a model with this configuration, on tensors without data, with only its window as mask.

    No device means the meta device.
    """
    terms, context, _ = _probe(config)
    heads = config.num_attention_heads
    vectors = torch.empty(batch, heads, length, config.hidden_size // heads, dtype=dtype, device="meta")
    return AttentionCall(
        vectors,
        vectors,
        vectors,
        terms,
        replace(context, query_length=length, key_length=length),
        window_mask(indexed_sequence(config, Rows(vectors[:, 0]))),
        dropout=dropout,
        output_weights=output_weights,
        needs_gradients=needs_gradients,
        runs_on=device,
    )


def supported_implementations(config: PreTrainedConfig) -> list[str]:
    """Values of `attn_implementation` that can compute the terms of a RelPosBertConfig; the default is first."""
    return capable_implementations(probe_call(config))


def check_attention(config: PreTrainedConfig, requested: str | None) -> str:
    """The value of `attn_implementation` to use: the one requested, or the default for None.

    Raises:
        ValueError: for a backend that cannot compute the terms; names those that can.
    """
    return check_implementation(requested, probe_call(config), config.position_scheme_name)


def layers_share_terms(config: PreTrainedConfig) -> bool:
    """Whether the terms are the same in every layer: no layer has its own parameters, dropout or projections."""
    return _probe(config)[2]


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
    if isinstance(target, PreTrainedModel):
        config, device, dtype = target.config, device or target.device, dtype or target.dtype
    else:
        config, device, dtype = target, device or "cpu", dtype or torch.float32
    implementation = check_attention(config, config._attn_implementation)
    call = probe_call(config, batch, length, dtype, torch.device(device), dropout, output_attentions, gradients)
    if implementation == AUTO:
        backend, rejected = choose(call)
        lines = [f"attn_implementation={AUTO!r} takes {backend.name}"]
        lines += [f"- not {name}: {'; '.join(reasons)}" for name, reasons in rejected.items()]
    else:
        backend = BY_NAME[implementation]
        # eager attention returns the weights, even with a window
        call = replace(call, by_name=True, output_weights=implementation == Eager.name)
        lines = [f"attn_implementation={implementation!r} takes {implementation}: it was requested by name"]
    if config.attention_window is not None:
        if reads_window_only(backend, call):
            keys = "reads the keys in it and the global tokens only: time and memory grow with L·window"
        else:
            keys = "has the mask of all pairs: time and memory grow with L², as without a window"
        lines.append(f"- attention_window = {config.attention_window}: {backend.name} {keys}")
    return "\n".join(lines)
