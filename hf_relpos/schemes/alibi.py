"""ALiBi (Press, Smith and Lewis, arXiv 2108.12409, §3), with the variants for encoders."""

from collections.abc import Mapping
from typing import Any

import torch

from ..attention.context import AttentionContext
from ..attention.formula import Terms, toeplitz_table
from .scheme import Scheme, choice


def alibi_slopes(heads: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the slopes m_1 … m_H, (H,): 2^(−8h/H) if H is a power of two.

    Otherwise they are the slopes of n heads, n being the next lower power of two, followed by every second slope of
    2n heads.
    """
    n = 1 << (heads.bit_length() - 1)
    h = torch.arange(1, heads + 1, device=device, dtype=dtype)
    return 2.0 ** torch.where(h <= n, -8 * h / n, -4 * (2 * (h - n) - 1) / n)


class ALiBi(Scheme, name="alibi"):
    """score = s · q_i·k_j − m_h · distance(r). No parameters.

    The paper is about causal models, where the distance is i − j. For encoders its authors suggest variants (issue 5
    of their repository, ofirpress/attention_with_linear_biases). Under a causal mask, the first and the third equal
    the paper's.

    symmetric: |r| in all heads. It does not distinguish left and right. MosaicBERT and Jina-BERT use it.
    asymmetric: |r|. The first half of the heads sees only keys to the left of the token, the second half only keys to
        the right; all see the token itself. Each half has the slopes of H/2 heads.
    offset: |r| to the left and r − 1/2 to the right, so that no two keys are equally far. It was proposed in the same
        thread and used to train masked language models (Chou, ICLR 2024 blog post "Masked Language Model with ALiBi
        and CLAP head", which finds it weaker at 2048 tokens in larger models). The paper does not have it.

    On longer inputs, by its source: causal language models keep their perplexity on longer texts.
    """

    summary = "Scores fall with distance, at a fixed rate per head"
    source = "Press et al. 2021, arXiv 2108.12409, §3"
    out_of_range = ("extrapolate",)
    zero_init_is_identity = False
    options = {"variant": choice("symmetric", "asymmetric", "offset", help="how far a key to the right is")}

    @classmethod
    def complete(cls, settings: dict[str, Any], config: Any) -> None:
        if settings["variant"] == "asymmetric" and config.num_attention_heads % 2:
            raise ValueError(
                f"position_options['variant'] = 'asymmetric' gives half of the heads to each side, and "
                f"num_attention_heads = {config.num_attention_heads} is odd; choose another variant"
            )

    @classmethod
    def is_symmetric_with(cls, settings: Mapping[str, Any]) -> bool:
        return settings["variant"] == "symmetric"

    def forward(self, context: AttentionContext) -> Terms:
        variant = self.settings["variant"]
        r = context.offsets(context.device)
        distance = r.abs().to(context.dtype)
        if variant == "offset":
            distance = distance - 0.5 * (r > 0)
        sides = 2 if variant == "asymmetric" else 1
        slopes = alibi_slopes(self.num_heads // sides, r.device, context.dtype).repeat(sides)
        bias = (toeplitz_table(-slopes[:, None] * distance, context),)
        if sides == 1:
            return Terms(bias=bias)
        sees = torch.stack([r <= 0, r >= 0]).repeat_interleave(self.num_heads // 2, dim=0)
        return Terms(bias=bias, allow=(toeplitz_table(sees, context),))
