"""PoPE: content is the length and position the angle of a number (Gopalakrishnan et al., arXiv 2509.10534)."""

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from transformers import initialization as init

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from .scheme import Option, Scheme, choice, is_number


class PoPE(Scheme, name="pope"):
    """score = s · Σ_c softplus(q_c) softplus(k_c) cos(r θ_c + δ_c), θ_c = base^(−c/d) for c = 0 … d − 1.

    This is the product of vectors (softplus(q_c) cos iθ_c, softplus(q_c) sin iθ_c) and the same of k with jθ_c + δ_c:
    attention with heads of 2 d, and values of d. δ is clamped to [−2π, 0].

    Parameters: bias, δ, (H, d); per layer. It begins uniform in that range (the paper's setting in most of its tasks)
    or at zero, where the scores do not tell left from right.

    On longer inputs, by its source: causal language models extrapolate without further training, unlike those with
    RoPE.
    """

    summary = "Content is the length of queries and keys, position their angle"
    source = "Gopalakrishnan et al. 2025, arXiv 2509.10534, eq. 6"
    out_of_range = ("extrapolate",)
    zero_init_is_identity = False
    options = {
        "base": Option(10000.0, "θ_c = base^(−c/d); a positive number", is_number),
        "start": choice("uniform", "zero", help="δ in a new model"),
    }

    def build(self, config: Any) -> None:
        self.bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))

    def init_weights(self, std: float) -> None:
        init.uniform_(self.bias, -2 * math.pi if self.settings["start"] == "uniform" else 0.0, 0.0)

    def forward(self, context: AttentionContext) -> Terms:
        steps = torch.arange(self.head_size, device=context.device, dtype=context.dtype) / self.head_size
        rotate = functools.partial(polar, angles=self.settings["base"] ** -steps)
        shift = self.bias.to(context.dtype).clamp(-2 * math.pi, 0.0)[:, None]
        return Terms(scale=self.scale, rotate=rotate, rotate_key=functools.partial(rotate, shift=shift))


def polar(
    vectors: torch.Tensor, positions: torch.Tensor, angles: torch.Tensor, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """Give numbers the length softplus(x) and the angle p·θ + δ.

    Args:
        vectors: (B, H, N, d).
        positions: (N,) or (B, N).
        angles: θ, (d,).
        shift: δ, (H, 1, d); None for zeros.

    Returns:
        (B, H, N, 2d), cosines first.
    """
    # angles of far positions need float32, whatever the dtype of the vectors
    positions = positions.to(torch.promote_types(vectors.dtype, torch.float32))
    turns = positions[..., None] * angles.to(positions)
    turns = turns if turns.dim() == 2 else turns[:, None]
    if shift is not None:
        turns = turns + shift.to(positions)
    sizes = softplus(vectors)
    return torch.cat([sizes * turns.cos().to(sizes.dtype), sizes * turns.sin().to(sizes.dtype)], dim=-1)
