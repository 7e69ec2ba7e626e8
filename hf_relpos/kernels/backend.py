"""The Triton kernels as an attention backend."""

import torch

from ..model.attention import AttentionCall, unsupported_by_offset
from ..model.formula import content_vectors
from ..model.toeplitz import ToeplitzTerms
from . import ops


CAPABILITY = (8, 0)


class Triton:
    """`formula.attend` by kernels, forward and backward, for terms that depend only on j − i.

    Args:
        device_type: of the devices to run on; "cpu" for Triton's interpreter.
    """

    name = "triton"

    def __init__(self, device_type: str = "cuda"):
        self.device_type = device_type

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Other devices, dtypes and head sizes, and terms that are not in Toeplitz form."""
        reasons = self._unsupported_device(call.device)
        if reasons:
            return reasons
        size = call.query.shape[-1]
        if call.dtype not in ops.DTYPES:
            reasons.append(f"the kernels are not made for {call.dtype}")
        if size not in ops.SIZES:
            reasons.append(f"the kernels are for heads of {', '.join(map(str, ops.SIZES))}, not of {size}")
        if call.terms.dense:
            reasons.append("there is a dense bias")
        return reasons + unsupported_by_offset(call)

    def _unsupported_device(self, device: torch.device) -> list[str]:
        if device.type != self.device_type:
            return [f"the kernels run on {self.device_type}, not on {device.type}"]
        if device.type == "cuda":
            if not torch.cuda.is_available():
                return ["there is no cuda device here"]
            if torch.version.hip:
                return ["the kernels are for NVIDIA's devices"]
            if torch.cuda.get_device_capability(device) < CAPABILITY:
                return [f"the kernels need compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"]
        return []

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        """The output (B, L, H, d), and None. A query that sees no key gets zeros, whatever hides them."""
        content, query, key = content_vectors(call.query, call.key, call.terms, call.context)
        start, terms = int(call.context.start), call.toeplitz()
        mask, causal = call.tensor_mask, call.is_causal
        return attention(content, query, key, call.value, terms, start, mask, causal, call.dropout), None


def attention(
    content: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: ToeplitzTerms,
    start: int = 0,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> torch.Tensor:
    """`formula.attend` of Toeplitz terms, (B, L, H, d); arguments as `chunked_attention`'s."""
    c = terms.c
    if terms.allow is not None:
        c = torch.where(terms.allow, content.new_zeros(()) if c is None else c, -torch.inf)
    drop = round(dropout * 65536)
    # the compiler's own random numbers take bounds of 32 bits: a larger one becomes 0, and every seed the same
    seed = torch.randint(torch.iinfo(torch.int32).max, (1,), device=content.device) if drop else None
    if mask is not None and mask.shape[2] > 1 and mask.stride(2) == 0:  # a mask of keys
        mask = mask[:, :, :1]
    rotated = None if query is content else query
    out, _ = ops.attention(
        content, rotated, key, value, terms.A, terms.B, c, terms.V, mask, seed, start, terms.scale, causal, drop
    )
    return out
