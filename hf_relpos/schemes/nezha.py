"""NEZHA's functional relative positions (Wei et al., arXiv 1909.00204): Shaw's scheme with a fixed table."""

import torch

from ..attention.context import AttentionContext
from ..attention.formula import Clipped, Table, Terms
from .encodings import sinusoid_interleaved
from .scheme import Scheme, integer


MAX_ROWS = 2**16  # the table is computed in every call


class Nezha(Scheme, name="nezha"):
    """score = s · q_i·(k_j + T_r), out_i = Σ_j α_ij (v_j + T_r), r clipped to ±K. No parameters.

    T_r is the interleaved sinusoid of r + K, not of r: the code numbers the rows of its table from 0, and the released
    weights were trained with that.

    On longer inputs, by its source: fixed sinusoids are chosen because they may extrapolate.
    """

    summary = "Fixed waves of the distance, added to keys and values"
    source = "Wei et al. 2019, arXiv 1909.00204; transformers 4.57.6 models/deprecated/nezha"
    out_of_range = ("clip",)
    zero_init_is_identity = False
    even_size = "head_size"
    options = {
        "max_relative_position": integer(64, "K, the largest distance with an embedding of its own", most=MAX_ROWS)
    }

    def forward(self, context: AttentionContext) -> Terms:
        max_distance = self.settings["max_relative_position"]
        rows = torch.arange(2 * max_distance + 1, device=context.device)
        table = Table(
            sinusoid_interleaved(rows, self.head_size, context.dtype)[None], Clipped(-max_distance, max_distance)
        )
        return Terms(query_table=(table,), value_table=(table,))
