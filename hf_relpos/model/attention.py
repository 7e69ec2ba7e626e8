"""Attention backends. They know terms, never schemes.

`eager` is the formula itself. `sdpa` and `flex_attention` are Transformers' own functions: everything positional is
lowered to an additive bias and handed to them as `position_bias`. `relpos`, the default, takes for each call the
fastest way there is: ours in chunks (chunked.py) where it can do the job and pays, on a GPU kernels that the package
registers (`DEVICE_WAYS`) or, where these are not there, a strided view (strided.py); else `sdpa` or `eager`. `choose`
says which and why. What a backend cannot compute is written in one table, `BACKENDS`; asking for it raises.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .chunked import DTYPES, chunked_attention
from .context import AttentionContext
from .formula import Terms, allowed, attend, content_scale, content_vectors, position_scores
from .lowering import lower, obstacles
from .strided import strided_attention


logger = logging.get_logger(__name__)

OWN = "relpos"  # the value of `attn_implementation`
CHUNKED = "chunked"  # what it may come to, besides the names of `BACKENDS`
STRIDED = "strided"  # likewise, on devices other than the CPU
# Calls of fewer scores, B·H·L·K, are over before chunks have begun to pay (scripts/bench_attention.py).
FEWEST_SCORES = 1 << 19

# For Transformers' own attention beside ours (cross-attention), and for the masks, it is sdpa.
ALL_ATTENTION_FUNCTIONS.register(OWN, ALL_ATTENTION_FUNCTIONS["sdpa"])
ALL_MASK_ATTENTION_FUNCTIONS.register(OWN, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])

# What a scheme may need of a backend, and why some cannot do it.
FEATURES = {
    "value_term": "it never holds the attention weights, which the value-side term needs",
    "gain": "it adds to the content scores and cannot multiply them",
    "allow": "it takes no mask that differs from head to head",
}

# What each value of `attn_implementation` can do, in the order in which a default is chosen.
BACKENDS: dict[str, frozenset[str]] = {
    OWN: frozenset({"value_term", "allow"}),
    "sdpa": frozenset({"allow"}),
    "eager": frozenset({"value_term", "gain", "allow"}),
    "flex_attention": frozenset(),
}


@dataclass(frozen=True)
class DeviceWay:
    """Kernels for one kind of device.

    Attributes:
        name: what `choose` calls them.
        obstacles: maps (terms, offsets, device, dtype, head size) of a call that has the normal form to what keeps
            them from it, in words; empty where nothing does.
        run: takes the arguments of `chunked_attention`, by place, and returns what it does.
    """

    name: str
    obstacles: Callable[[Terms, AttentionContext, torch.device, torch.dtype, int], list[str]]
    run: Callable[..., torch.Tensor]


# By the device's type. They are not of this folder, which travels with checkpoints: whoever has them registers them.
DEVICE_WAYS: dict[str, DeviceWay] = {}


def capable_backends(needs: frozenset[str]) -> list[str]:
    """Values of `attn_implementation` that can run a scheme, the default first.

    Args:
        needs: keys of `FEATURES`.
    """
    return [name for name, features in BACKENDS.items() if needs <= features]


def check_backend(requested: str | None, needs: frozenset[str], scheme: str) -> str:
    """`requested` if it can run the scheme, the default for None.

    Args:
        requested: a value of `attn_implementation`, or None.
        needs: keys of `FEATURES`.
        scheme: the value of `position_embedding_type`, for the message.

    Raises:
        ValueError: when it cannot; names the ones that can.
    """
    capable = capable_backends(needs)
    if requested is None:
        return capable[0]
    if requested not in capable:
        if requested in BACKENDS:
            reason = "; ".join(FEATURES[feature] for feature in sorted(needs - BACKENDS[requested]))
        else:
            reason = "it is not known to add the relative terms to the scores, and leaving them out would be silent"
        raise ValueError(
            f"attn_implementation={requested!r} cannot run position_embedding_type={scheme!r}: {reason}. "
            f"Use one of: {', '.join(repr(name) for name in capable)}"
        )
    return requested


def needs_of_terms(terms: Terms) -> frozenset[str]:
    """Keys of `FEATURES` that these terms call for."""
    gain = terms.gain or terms.feature_gain
    present = {"value_term": terms.V, "gain": gain, "allow": terms.allow}
    return frozenset(feature for feature, tables in present.items() if tables)


def choose(
    terms: Terms,
    context: AttentionContext,
    batch: int,
    heads: int,
    device: torch.device,
    dtype: torch.dtype,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    weights: bool = False,
    size: int = 64,
    gradients: bool = False,
) -> tuple[str, str]:
    """The way that `relpos` takes for one call, and why.

    Args:
        mask: as Transformers builds it for sdpa, or as the user prepared it.
        dropout: probability of dropping an attention weight.
        weights: whether the attention weights are wanted.
        size: of a head.
        gradients: whether there will be a backward pass.

    Returns:
        `CHUNKED`, `STRIDED`, the name of one of `DEVICE_WAYS` or a key of `BACKENDS`; and the reason in words.
    """
    dense = "eager" if weights or not needs_of_terms(terms) <= BACKENDS["sdpa"] else "sdpa"
    scores = batch * heads * context.query_length * context.key_length
    way, on_cpu = DEVICE_WAYS.get(device.type), device.type == "cpu"
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if weights:
        return dense, "the attention weights are wanted, which only eager keeps"
    if traced and way is None:
        return dense, "the call is being traced, and chunks are made for the data at hand"
    if on_cpu and way is None and dtype not in DTYPES:
        return dense, f"chunks are not made in {dtype}"
    # with dropout ours is faster on the CPU even then
    if not (on_cpu and dropout) and terms == Terms(scale=terms.scale, rotate=terms.rotate):
        return dense, "there are no terms beside the content"
    if found := obstacles(terms, context):
        return dense, "; ".join(found)
    if mask is not None and (
        mask.dtype != torch.bool
        or mask.dim() != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[1] not in (1, heads)
        or mask.shape[2] not in (1, context.query_length)
        or mask.shape[3] != context.key_length
    ):
        return dense, "the mask is not boolean, (B, 1, L, K)"
    if dropout > 1 - 2**-8:
        return dense, "dropout leaves next to nothing"
    reason = "the terms have the form it takes"
    if way is not None or not on_cpu:
        cannot = [f"no kernels are there for {device.type}"]
        if way is not None:
            cannot = way.obstacles(terms, context, device, dtype, size)
        if not cannot:
            return way.name, reason
        reason = "; ".join(cannot)
        if traced:
            return dense, f"{reason}; and the call is being traced"
        if not (gradients or dropout or terms.V or terms.allow or isinstance(context.start, torch.Tensor)):
            return STRIDED, reason
    if scores < FEWEST_SCORES:
        few = f"there are fewer than {FEWEST_SCORES:,} scores, B·H·L·K, too few for chunks to pay"
        return dense, few if on_cpu else f"{reason}; {few}"
    return CHUNKED, f"{reason}, and there are scores enough for it to pay" if on_cpu else reason


def relative_attention(
    module: nn.Module,
    implementation: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: Terms,
    context: AttentionContext,
    mask: torch.Tensor | None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with relative terms, by the backend of that name.

    Args:
        module: the attention layer; Transformers' functions read `is_causal` and `training` from it.
        implementation: a key of `BACKENDS`.
        query: (B, H, L, d).
        key: (B, H, K, d).
        value: (B, H, K, d).
        terms: what the scheme adds.
        context: r for every query and key.
        mask: as Transformers builds it for this implementation.
        dropout: probability of dropping an attention weight.
        kwargs: passed on to Transformers' function.

    Returns:
        (B, L, H, d), and the attention weights (B, H, L, K) or None where the backend does not hold them.

    Raises:
        ValueError: when the backend cannot compute the terms.
    """
    check_backend(implementation, needs_of_terms(terms), type(module).__name__)
    if implementation == OWN:
        batch, heads, length, size = query.shape
        weights = bool(kwargs.get("output_attentions"))
        implementation, reason = choose(
            terms,
            context,
            batch,
            heads,
            query.device,
            query.dtype,
            mask,
            dropout,
            weights,
            size,
            torch.is_grad_enabled(),
        )
        if not torch.compiler.is_compiling():
            logger.info_once(f"attn_implementation='{OWN}' takes {implementation}: {reason}")
        causal = mask is None and module.is_causal and length > 1
        if implementation not in BACKENDS:
            content, query, key = content_vectors(query, key, terms, context)
            form = lower(terms, context, query)
            given = (content, query, key, value, form, int(context.start), mask, causal)
            if implementation == CHUNKED:
                ends = None if context.padding is None else context.padding.ends
                return chunked_attention(*given, dropout, ends), None
            if implementation == STRIDED:
                return strided_attention(*given), None
            return DEVICE_WAYS[query.device.type].run(*given, dropout), None
        if causal and implementation == "eager":  # which leaves nothing to a kernel
            mask = (context.matrix(query.device) <= 0)[..., None, :, :]
    if implementation == "eager":
        out, probabilities = attend(query, key, value, terms, context, mask, dropout)
        return out.transpose(1, 2).contiguous(), probabilities
    content, query, key = content_vectors(query, key, terms, context)
    bias = position_scores(query, key, terms, context)
    visible = None
    if terms.allow:
        if mask is None and module.is_causal:  # Transformers leaves a plain causal mask to the kernel; we need it here
            mask = context.matrix(query.device) <= 0
        visible = allowed(terms, context, mask)
        bias = query.new_zeros(()) if bias is None else bias
        bias = torch.where(visible, bias, torch.finfo(query.dtype).min)
    if implementation == "sdpa" and bias is not None and mask is not None and mask.dtype != torch.bool:
        # Transformers 5.14 takes no additive mask beside a bias, and later ones let two minima add up to -inf
        bias = (bias + mask).clamp(min=torch.finfo(query.dtype).min)
        mask = mask > torch.finfo(mask.dtype).min / 2
    if bias is not None and implementation == "flex_attention":  # it looks every entry up and broadcasts nothing
        bias = bias.expand(*query.shape[:-1], key.shape[2])
    length = query.shape[2]
    if implementation == "sdpa" and mask is None and module.is_causal and 1 < length < key.shape[2]:
        # the prefill of a static cache, whose empty end Transformers 5.14 cuts off the keys but not off the bias
        key, value = key[:, :, :length], value[:, :, :length]
        bias = bias if bias is None else bias[..., :length]
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, None)
    out, probabilities = function(
        module,
        content,
        key,
        value,
        mask,
        dropout=dropout,
        scaling=content_scale(query, terms),
        position_bias=bias,
        **kwargs,
    )
    if visible is not None:  # a query that may attend to nothing gets zeros, as the formula says
        out = out * visible.any(-1).transpose(1, 2)[..., None]
    return out, probabilities
