"""The formula, one call of it, and the backends that compute it, which know its terms and no scheme."""

from .backends.chunked import Chunked
from .backends.flex_attention import FlexAttention
from .backends.strided import Strided
from .dispatch import BACKENDS, BY_NAME


# A model on the Hub has eager and sdpa alone; these come with the package, in the order in which they are tried.
BY_NAME[FlexAttention.name] = FlexAttention()
BACKENDS[:] = [BY_NAME[FlexAttention.name], Strided(), Chunked(), *BACKENDS]
