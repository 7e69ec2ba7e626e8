"""The Triton kernels as an attention backend."""

import functools
import importlib.util
import os
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers.utils.generic import strtobool

from ....extras import PACKAGES
from ...call import AttentionCall
from ...formula import content_vectors
from ...sliding_window import SlidingWindowMask
from ...toeplitz import ToeplitzTerms, toeplitz_of, unsupported_by_offset
from . import ops
from .self_check import OUTCOMES, Kind, Outcome, check, kind_of
from .window import GlobalTokens, kernel_mask, reads_window


CAPABILITY = (8, 0)
SWITCH = "HF_RELPOS_KERNELS"  # environment variable: 1 requests the kernels


@functools.cache
def requested() -> bool:
    """Whether the environment requests the kernels, which no GPU has run yet.

    Raises:
        ValueError: if the switch is neither on nor off.
    """
    switch = os.environ.get(SWITCH, "0")
    try:
        return bool(strtobool(switch))
    except ValueError:
        raise ValueError(f"{SWITCH} = {switch!r} in the environment: give 0 or 1") from None


class Triton:
    """`formula.attend` by kernels, forward and backward, for terms that depend only on j − i.

    Each kind of call is checked before it first runs in this process (self_check.py).

    Args:
        device_type: type of the devices to run on; "cpu" for Triton's interpreter.
        wanted: whether the kernels are requested. If not, the backend refuses every call and says how to request them.
    """

    name = "triton"

    def __init__(self, device_type: str = "cuda", wanted: bool = True):
        self.device_type = device_type
        self.wanted = wanted
        self.is_installed = importlib.util.find_spec("triton") is not None

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Return the reasons why the kernels cannot take a call.

        They concern the device, the dtype, the head size, an export, terms without a Toeplitz form, and kernels that
        are not requested or fail their check.
        """
        reasons = self._unsupported_device(call.device)
        if reasons:
            return reasons
        size = call.query.shape[-1]
        if call.dtype not in ops.DTYPES:
            reasons.append(f"the kernels are not made for {call.dtype}")
        if size not in ops.SIZES:
            reasons.append(f"the kernels are for heads of {', '.join(map(str, ops.SIZES))}, not of {size}")
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            reasons.append("the graph is exported, and may be run without this package")
        if call.terms.dense:
            reasons.append("there is a dense bias")
        reasons += unsupported_by_offset(call)
        return reasons or _objections(call)

    def reads_window_only(self, call: AttentionCall) -> bool:
        """Whether only the keys in the window are read, not the mask of all pairs."""
        return reads_window(call)

    def state(self, call: AttentionCall) -> str:
        """Say what is known about the kernels for a call that they take."""
        outcome = OUTCOMES.get(kind_of(call))
        return "not checked before the first such call" if outcome is None else f"checked: {outcome.words}"

    def check(self, call: AttentionCall) -> None:
        """Check the kernels now for a call that they take. The call may be a mere description, without data."""
        check_kind(kind_of(call))

    def _unsupported_device(self, device: torch.device) -> list[str]:
        if device.type != self.device_type:
            return [f"the kernels run on {self.device_type}, not on {device.type}"]
        if not self.wanted:
            return [f"the kernels are used by request: set {SWITCH}=1 in the environment"]
        if not self.is_installed:
            return [f"Triton is not installed: pip install {PACKAGES['gpu']}"]
        if device.type == "cuda":
            if not torch.cuda.is_available():
                return ["there is no cuda device here"]
            if torch.version.hip:
                return ["the kernels are for NVIDIA's devices"]
            if torch.cuda.get_device_capability(device) < CAPABILITY:
                return [f"the kernels need compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"]
        return []

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        """Return the output (B, L, H, d), and None. A query that sees no key gets zeros, whatever hides the keys."""
        content, query, key = content_vectors(call.query, call.key, call.terms, call.context)
        start, terms = int(call.context.start), toeplitz_of(call, by_row=True)
        mask, causal = kernel_mask(call), call.is_causal
        return attention(content, query, key, call.value, terms, start, mask, causal, call.dropout), None


def _objections(call: AttentionCall) -> list[str]:
    """Return why the kernels refuse a call of a supported kind: a check that failed or that cannot run now."""
    kind = kind_of(call)
    if torch.compiler.is_dynamo_compiling():
        return list(_failure_before_tracing(*kind))
    if kind not in OUTCOMES:
        if call.query.is_meta:  # a mere description of a call
            return []
        if not _can_check(call):
            return ["they have not been checked for such calls, and cannot be now: a CUDA graph, or no data"]
    return _failure(check_kind(kind))


def check_kind(kind: Kind) -> Outcome:
    """Return the outcome of the check of a kind. Run the check if it has not run yet."""
    return check(kind, attention)


def _failure(outcome: Outcome) -> list[str]:
    return [] if outcome.passed else [f"they failed their check here: {outcome.words}"]


@torch.compiler.assume_constant_result
def _failure_before_tracing(*kind: Any) -> tuple[str, ...]:
    """`_failure` for `torch.compile`, which runs it while tracing, outside the graph, and keeps the result.

    Args:
        kind: entries of a Kind, one by one, because the compiler passes constants.
    """
    return tuple(_failure(check_kind(Kind(*kind))))


def _can_check(call: AttentionCall) -> bool:
    """Whether a check may run now: not while a CUDA graph is captured, and not for tensors without data."""
    capturing = call.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return not capturing and not isinstance(call.query, FakeTensor)


def attention(
    content: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: ToeplitzTerms,
    start: int = 0,
    mask: torch.Tensor | SlidingWindowMask | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """`formula.attend` for Toeplitz terms, (B, L, H, d). Arguments are those of `chunked_attention`.

    Args:
        mask: boolean, or the SlidingWindowMask of a call that `reads_window` accepts.
        seed: seed of the dropout, int64, one number on the device; None draws one.
    """
    c = terms.bias
    if terms.allow is not None:
        c = torch.where(terms.allow, content.new_zeros(()) if c is None else c, -torch.inf)
    drop = round(dropout * 65536)
    # the compiler's random numbers take bounds of 32 bits: a larger bound becomes 0, and all seeds would be the same
    if drop and seed is None:
        seed = torch.randint(torch.iinfo(torch.int32).max, (1,), device=content.device)
    window = global_tokens = rest = rest_lse = None
    if isinstance(mask, SlidingWindowMask):
        own, window = replace(terms, bias=c, allow=None), mask.offsets
        global_tokens = GlobalTokens(content, query, key, value, own, mask, drop, seed if drop else None)
        rest, rest_lse = global_tokens.seen_from_afar()
        mask = None if mask.is_token is None else mask.is_token[:, None, None]
    if mask is not None and ops.is_mask_of_keys(mask):
        mask = mask[:, :, :1]
    rotated = None if query is content else query
    tables = (terms.query_table, terms.key_table, terms.value_table)
    A, B, V = (None if table is None else table.rows for table in tables)
    row_of_A, row_of_B, row_of_V = (None if table is None else table.row_of for table in tables)
    out: torch.Tensor = ops.attention(
        content,
        rotated,
        key,
        value,
        A,
        B,
        c,
        V,
        row_of_A,
        row_of_B,
        row_of_V,
        mask,
        seed,
        start,
        terms.scale,
        causal,
        drop,
        window,
        rest,
        rest_lse,
    )[0]
    return out if global_tokens is None else global_tokens.with_rows(out)
