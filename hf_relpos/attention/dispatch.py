"""Dispatch: the attention backends in the order in which `attn_implementation="relpos"` tries them.

`relpos` runs each call on the first backend that supports it. "sdpa", "eager" and "flex_attention" may also be
requested by name, as in any model of Transformers. A call that the named backend cannot compute is then an error.
"""

from dataclasses import replace

import torch
from transformers.utils import logging

from ..host.tracing import is_transformed
from ..host.transformers import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
from .backends.eager import Eager
from .backends.sdpa import Sdpa
from .call import AttentionCall, Backend, Finish, unchanged
from .fourier import with_fourier_features


logger = logging.get_logger(__name__)

AUTO = "relpos"  # the value of `attn_implementation` that chooses a backend for each call
# Backends that `attn_implementation` may name. For any other name, Transformers would not know which mask to make.
BY_NAME: dict[str, Backend] = {Sdpa.name: Sdpa(), Eager.name: Eager()}
BACKENDS: list[Backend] = list(BY_NAME.values())

# Transformers' own attention (cross-attention) and its masks use sdpa under this name.
ALL_ATTENTION_FUNCTIONS.register(AUTO, ALL_ATTENTION_FUNCTIONS["sdpa"])
ALL_MASK_ATTENTION_FUNCTIONS.register(AUTO, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def register_backend(backend: Backend) -> None:
    """Let `relpos` try a backend before all others. It replaces a backend of the same name."""
    BACKENDS[:] = [backend, *(other for other in BACKENDS if other.name != backend.name)]


def rewritten(call: AttentionCall) -> tuple[AttentionCall, Finish]:
    """Return a call as backends get it, and the function from their output to the output of the original call."""
    return with_fourier_features(call) or (call, unchanged)


def choose(call: AttentionCall) -> tuple[Backend, dict[str, list[str]]]:
    """Return the backend that `relpos` takes for a call, after `rewritten`.

    Returns:
        The first of `BACKENDS` without a reason against the call, and the reasons of those before it, by name.
    """
    return _first_capable(rewritten(call)[0])


def _first_capable(call: AttentionCall) -> tuple[Backend, dict[str, list[str]]]:
    """`choose` for a call that has been rewritten."""
    rejected: dict[str, list[str]] = {}
    for backend in BACKENDS:
        reasons = backend.unsupported(call)
        if not reasons:
            return backend, rejected
        rejected[backend.name] = reasons
    raise RuntimeError(f"no attention backend computes this call: {rejected}")


def _choose_once(implementation: str, call: AttentionCall) -> Backend:
    """The backend of a rewritten call, which other layers of the forward take over.

    Raises:
        ValueError: if the named backend cannot compute the call.
    """
    kept = {} if call.kept is None else call.kept
    key = (implementation, call.device.type, call.dtype, call.dropout)
    if key not in kept:
        if implementation == AUTO:
            backend, rejected = _first_capable(call)
            if not torch.compiler.is_compiling() and logger.isEnabledFor(logging.DEBUG):
                reasons = "; ".join(f"not {name}: {', '.join(why)}" for name, why in rejected.items())
                logger.debug(f"attn_implementation='{AUTO}' takes {backend.name} ({reasons or 'the first choice'})")
            kept[key] = backend
        else:
            kept[key] = BY_NAME[check_implementation(implementation, call)]
    chosen: Backend = kept[key]
    return chosen


def run_attention(implementation: str, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention with the terms of a scheme.

    Backends get calls as `rewritten`. Eager requested by name is the reference, and gets calls unchanged.
    So it does in place of `AUTO` under transforms of `torch.func` and in forward mode, for which it alone is made.

    Args:
        implementation: a value of `attn_implementation`: `AUTO` or a key of `BY_NAME`.

    Returns:
        The output (B, L, H, d), and the attention weights (B, H, L, K) or None if the backend does not keep them.

    Raises:
        ValueError: if the named backend cannot compute the call. The message names those that can.
    """
    finish: Finish = unchanged
    if implementation == AUTO and is_transformed():
        implementation = Eager.name
    if implementation == Eager.name:  # by name it returns the weights, also under a window
        call = replace(call, output_weights=True)
    else:
        call, finish = rewritten(call)
    out, weights = _choose_once(implementation, call).run(call)
    return finish(out), weights


@torch.no_grad()  # activation checkpointing would miss tensors that are saved here, since its second run takes over
def check_implementation(requested: str | None, call: AttentionCall, scheme: str | None = None) -> str:
    """Return `requested` if it can compute the terms of a call, and `AUTO` for None.

    Args:
        requested: a value of `attn_implementation`, or None.
        scheme: the value of `position_embedding_type`, for the error message.

    Raises:
        ValueError: if it cannot. The message names the values that can.
    """
    if requested is None or requested == AUTO:
        return AUTO
    # Transformers itself says which backends return no weights
    call = replace(rewritten(call)[0], output_weights=False)
    if requested in BY_NAME:
        reasons = BY_NAME[requested].unsupported(replace(call, by_name=True))
        if not reasons:
            return requested
    else:
        reasons = ["it is not known to add the relative terms to the scores, and leaving them out would be silent"]
    what = "these terms" if scheme is None else f"position_embedding_type={scheme!r}"
    raise ValueError(
        f"attn_implementation={requested!r} cannot run {what}: {'; '.join(reasons)}. "
        f"Use one of: {', '.join(repr(name) for name in capable_implementations(call))}"
    )


def capable_implementations(call: AttentionCall) -> list[str]:
    """Return the values of `attn_implementation` that can compute a call, the default first."""
    call = replace(rewritten(call)[0], by_name=True)
    return [AUTO, *(name for name, backend in BY_NAME.items() if not backend.unsupported(call))]
