"""Seeds of random generators."""

from typing import Any


# `transformers.set_seed` also seeds NumPy's legacy generator, which accepts no larger seed.
MAX_SEED = 2**32 - 1


def check_seed(seed: Any) -> None:
    """
    Raises:
        ValueError: for a seed that is not an integer from 0 to `MAX_SEED`.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed = {seed!r}: give an integer from 0 to {MAX_SEED}")
