"""The attention formula, one call of it, and the backends that compute it.

Backends know the terms of the formula and never a scheme.
"""

from .backends.chunked import Chunked
from .backends.flex_attention import FlexAttention
from .dispatch import BACKENDS, BY_NAME


# The code of a saved model has only eager and sdpa. The package adds further backends. They are tried in the order of
# BACKENDS.
BACKENDS[:] = [FlexAttention(), Chunked(), *BY_NAME.values()]
BY_NAME[FlexAttention.name] = FlexAttention()
