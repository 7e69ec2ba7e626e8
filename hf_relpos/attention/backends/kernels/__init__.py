"""Attention on GPUs: Triton kernels, which `attn_implementation="relpos"` tries first if they are requested.

No GPU has run them yet. `HF_RELPOS_KERNELS=1` in the environment requests them, as does `register_backend(Triton())`.

They stay in this package: a checkpoint's copy of hf_relpos.models does not contain them, and runs without them.
"""

from ...dispatch import register_backend
from .backend import Triton, requested


def register() -> None:
    """Register the kernels for `relpos` attention. Triton is not imported before a kernel runs."""
    register_backend(Triton(wanted=requested()))
