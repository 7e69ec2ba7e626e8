"""Learned absolute positions, as in BERT (Devlin et al., arXiv 1810.04805): nothing inside attention."""

from .formula import Terms
from .offsets import Offsets
from .scheme import Scheme


class Absolute(Scheme, name="absolute"):
    """Stock BERT, the baseline: x_i = LayerNorm(word + type + p_i), one table (P, D) at the input."""

    source = "Devlin et al. 2018, arXiv 1810.04805"
    absolute_input = True
    relative = False
    beyond_range = "refuses: there is no vector for position max_position_embeddings"

    def terms(self, offsets: Offsets) -> Terms:
        return Terms(scale=self.scale)
