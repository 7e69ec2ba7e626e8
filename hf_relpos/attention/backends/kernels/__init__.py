"""Attention on GPUs: Triton kernels, which `attn_implementation="relpos"` tries first.

They stay with this package: a checkpoint's copy of hf_relpos.models goes without them, and runs without them.
"""

from ...dispatch import register_backend
from .backend import Triton


def register() -> None:
    """Let `relpos` attention find the kernels. Triton is not imported before a kernel runs."""
    register_backend(Triton())
