"""The formula, one call of it, and the backends that compute it, which know its terms and no scheme."""

from .backends.chunked import Chunked
from .backends.flex_attention import FlexAttention
from .backends.window_blocks import ByBlocks
from .dispatch import BACKENDS, BY_NAME, REWRITES
from .fourier_features import with_fourier_features


# The code of a saved model has eager and sdpa alone, which make the mask of a window whole. All else comes with the
# package: windows by blocks, Fourier tables as features, and other backends in the order in which they are tried.
BY_NAME.update({name: ByBlocks(backend) for name, backend in BY_NAME.items()})
BACKENDS[:] = [FlexAttention(), Chunked(), *BY_NAME.values()]
BY_NAME[FlexAttention.name] = FlexAttention()
REWRITES.append(with_fourier_features)
