"""The attention formula, one call of it, and the backends that compute it.

Backends know the terms of the formula and never a scheme.
"""

from .backends.chunked import Chunked
from .backends.flex_attention import FlexAttention
from .backends.window_blocks import ByBlocks
from .dispatch import BACKENDS, BY_NAME


# The code of a saved model has only eager and sdpa, which build the dense mask of a window. The package adds windows
# by blocks and further backends. They are tried in the order of BACKENDS.
BY_NAME.update({name: ByBlocks(backend) for name, backend in BY_NAME.items()})
BACKENDS[:] = [FlexAttention(), Chunked(), *BY_NAME.values()]
BY_NAME[FlexAttention.name] = FlexAttention()
