"""TENER (Yan et al., arXiv 1911.04474, §3.2): relative attention for tagging, with direction and without 1/√d."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..attention.context import AttentionContext
from ..attention.formula import Terms, toeplitz_table
from .encodings import sinusoid_t2t
from .scheme import MAX_COUNT, Scheme, choice


class Tener(Scheme, name="tener"):
    """score = s · [(q_i + u)·k_j + (q_i + v)·R_r + k_j·R_{−r}], s = 1, R the sinusoid of size d, r = j − i.

    This is the released code. R has tensor2tensor's layout and no projection. The key-side term is in the code only.
    `terms="paper"` drops it but keeps the code's R, although the paper writes R_{i−j} in the layout of Vaswani et al.

    u is `r_r_bias` and v is `r_w_bias`, the reverse of Transformer-XL. The released layer has no output projection
    after its heads; here BERT's stays.

    Parameters: r_r_bias and r_w_bias (H, d); per layer.

    On longer inputs, by its source: tells direction and distance; nothing about longer inputs.
    """

    summary = "Fixed waves that tell left from right, and learned biases"
    source = "fastnlp/TENER modules/relative_transformer.py; Yan et al. 2019, arXiv 1911.04474, §3.2"
    out_of_range = ("extrapolate", "clip")
    zero_init_is_identity = False  # R has no parameters, and s = 1
    even_size = "head_size"
    options = {
        "terms": choice("code", "paper", help="five terms as released, or four without k_j·R_{−r}"),
        "scale": choice(False, True, help="divide the scores by √d"),
    }

    def build(self, config: Any) -> None:
        clips = self.settings["out_of_range"] == "clip"
        self.max_distance = config.max_position_embeddings - 1 if clips else MAX_COUNT
        self.r_r_bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))
        self.r_w_bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))

    @classmethod
    def scale_of(cls, settings: Mapping[str, Any], config: Any) -> float | None:
        return None if settings["scale"] else 1.0

    def init_weights(self, std: float) -> None:
        init.xavier_normal_(self.r_r_bias)
        init.xavier_normal_(self.r_w_bias)

    def sinusoid(self, distances: torch.Tensor) -> torch.Tensor:
        """Return R of every distance, (1, N, d)."""
        distances = distances.clamp(-self.max_distance, self.max_distance)
        return sinusoid_t2t(distances, self.head_size, self.r_w_bias.dtype)[None]

    def forward(self, context: AttentionContext) -> Terms:
        offsets = context.offsets(self.r_w_bias.device)
        rows = self.sinusoid(offsets)
        B = () if self.settings["terms"] == "paper" else (toeplitz_table(self.sinusoid(-offsets), context),)
        return Terms(
            scale=None if self.settings["scale"] else self.scale,
            query_table=(toeplitz_table(rows, context),),
            key_table=B,
            content_bias=self.r_r_bias.clone(),
            scaled_bias=(toeplitz_table(torch.matmul(self.r_w_bias, rows[0].T), context),),
        )
