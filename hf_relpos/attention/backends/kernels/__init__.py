"""Attention on GPUs: Triton kernels, which `attn_implementation="relpos"` tries first where they are asked for.

No GPU has run them yet. `HF_RELPOS_KERNELS=1` in the environment asks for them; so does `register_backend(Triton())`.

They stay with this package: a checkpoint's copy of hf_relpos.models goes without them, and runs without them.
"""

from ...dispatch import register_backend
from .backend import Triton, requested


def register() -> None:
    """Let `relpos` attention find the kernels. Triton is not imported before a kernel runs."""
    register_backend(Triton(wanted=requested()))
