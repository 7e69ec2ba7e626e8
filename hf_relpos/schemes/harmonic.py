"""Tables that are sums of cosines and sines of the offset, so that the whole formula becomes plain attention.

Attention with such terms equals plain attention with wider queries, keys and values: their Fourier features
(`attention/fourier.py`). Fused kernels, graphs and devices of any kind can compute it, and the cost depends on the
number of waves alone. Related work: low-rank factors of a bias (FlashBias, arXiv 2505.12044), random Fourier features
of relative positions (Liutkus et al., arXiv 2105.08399), and RoPE, which rotates queries and keys by such phases,
whereas this adds to their product.
"""

from collections.abc import Mapping
from typing import Any

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from ..attention.fourier import FourierTable, geometric
from .scheme import WHICH_TABLES, Scheme, choice, integer, register_tables, terms_of_tables


class Harmonic(Scheme, name="harmonic"):
    """The formula of `tables`, with sums of waves: A_r = Σ_w a_w cos ω_w r + b_w sin ω_w r, and likewise B, c and V.

    Frequencies are fixed and geometric, from 2π / `period` to 0.85 π. Parameters: A, B and V (H or 1, 2W, d), c (H or
    1, 2W); per layer. Coefficients of the cosines come first, then those of the sines.

    On longer inputs: terms do not decay with distance, and those `period` apart are nearly equal.
    """

    summary = "Terms of query, key and value as sums of waves of the distance"
    source = "hf_relpos; features of a product as in Liutkus et al. 2021, arXiv 2105.08399"
    out_of_range = ("extrapolate",)
    options = {
        "terms": WHICH_TABLES,
        "per_head": choice(True, False, help="coefficients of their own for each head"),
        "waves": integer(
            8, "W, how many frequencies: heads are 2 W wider for A, B or c, and 2 W more for B beside them"
        ),
        "period": integer(
            None, "after how many tokens the slowest wave repeats", none="2 max_position_embeddings", least=4
        ),
    }

    def build(self, config: Any) -> None:
        period = self.settings["period"] or max(2 * config.max_position_embeddings, 4)
        self.frequencies = geometric(self.settings["waves"], period)
        register_tables(self, 2 * len(self.frequencies))

    @classmethod
    def options_for_length(cls, options: Mapping[str, Any], length: int) -> dict[str, Any]:
        return {"period": max(2 * length, 4), **options}

    def init_weights(self, std: float) -> None:
        super().init_weights(std * len(self.frequencies) ** -0.5)  # rows of the tables have the deviation `std`

    def forward(self, context: AttentionContext) -> Terms:
        return terms_of_tables(self, lambda rows: FourierTable(rows, self.frequencies, context))
