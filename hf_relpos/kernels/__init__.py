"""Attention on GPUs: Triton kernels, which `attn_implementation="relpos"` takes where they can do the job.

They stay with this package: a checkpoint's copy of hf_relpos.model goes without them, and finds its way without them.
"""

import importlib.util

import torch

from ..model.attention import DEVICE_WAYS, DeviceWay
from ..model.context import AttentionContext
from ..model.formula import Terms
from ..model.lowering import NormalForm
from . import ops


NAME = "triton"
CAPABILITY = (8, 0)


def obstacles(
    terms: Terms, context: AttentionContext, device: torch.device, dtype: torch.dtype, size: int
) -> list[str]:
    """What keeps the kernels from a call that has the normal form, in words; empty where nothing does."""
    found = []
    if device.type == "cuda":
        if not torch.cuda.is_available():
            found.append("there is no cuda device here")
        elif torch.version.hip:
            found.append("the kernels are for NVIDIA's devices")
        elif torch.cuda.get_device_capability(device) < CAPABILITY:
            found.append(f"the kernels need compute capability {CAPABILITY[0]}.{CAPABILITY[1]}")
    if dtype not in ops.DTYPES:
        found.append(f"the kernels are not made for {dtype}")
    if size not in ops.SIZES:
        found.append(f"the kernels are for heads of {', '.join(map(str, ops.SIZES))}, not of {size}")
    if terms.dense:
        found.append("c' is given in full")
    if isinstance(context.start, torch.Tensor):
        found.append("the place of the queries among the keys is known to the device alone")
    return found


def run(
    content: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    form: NormalForm,
    start: int,
    mask: torch.Tensor | None,
    causal: bool,
    dropout: float,
) -> torch.Tensor:
    """`formula.attend` of the normal form, without the weights, (B, L, H, d); arguments as `chunked_attention`'s.

    A query that sees no key gets zeros, whatever hides them.
    """
    c = form.c
    if form.allow is not None:
        c = torch.where(form.allow, content.new_zeros(()) if c is None else c, -torch.inf)
    drop = round(dropout * 65536)
    # the compiler's own random numbers take bounds of 32 bits: a larger one becomes 0, and every seed the same
    seed = torch.randint(torch.iinfo(torch.int32).max, (1,), device=content.device) if drop else None
    if mask is not None and mask.shape[2] > 1 and mask.stride(2) == 0:  # a mask of keys
        mask = mask[:, :, :1]
    given = None if query is content else query
    out, _ = ops.attention(
        content, given, key, value, form.A, form.B, c, form.V, mask, seed, start, form.scale, causal, drop
    )
    return out


def register() -> None:
    """Let `relpos` attention find the kernels, if Triton is installed. It is not imported before a kernel runs."""
    if importlib.util.find_spec("triton") is not None:
        DEVICE_WAYS["cuda"] = DeviceWay(NAME, obstacles, run)
