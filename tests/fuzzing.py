"""What the property tests (test_fuzz_*.py) share: how many examples they try, and the counts of what came of each.

`make test` tries a few examples of each, always the same; `make fuzz` tries FUZZ_EXAMPLES random ones of each and
writes the counts. What one of these must end in is a right answer, or an error of a documented type that names what is
wrong: `attempt` says so, and counts it.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings, strategies as st

from hf_relpos.files import write_json


FUZZ_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "1000"))
RIGHT = "right"  # the outcome that is no error
# area (configurations, …) and outcome (RIGHT, or an error's type) to how many there were
COUNTS: Counter[tuple[str, str]] = Counter()


def register_profiles() -> None:
    """The profiles `ci`, which is the default, and `fuzz`, for `pytest --hypothesis-profile=fuzz`."""
    common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    settings.register_profile("ci", common, derandomize=True, database=None, max_examples=20)
    settings.register_profile("fuzz", common, print_blob=True, max_examples=FUZZ_EXAMPLES)
    settings.load_profile("ci")


def examples(few: int, share: float = 1.0, shrink: bool = True) -> settings:
    """How many examples a test tries: `few` in `make test`, this share of FUZZ_EXAMPLES in `make fuzz`.

    Args:
        shrink: reduce what fails to the smallest; not where an example takes seconds.
    """
    fuzz = settings.get_current_profile_name() == "fuzz"
    phases = [each for each in Phase if shrink or each not in (Phase.shrink, Phase.explain)]
    return settings(max_examples=max(1, round(FUZZ_EXAMPLES * share)) if fuzz else few, phases=phases)


@contextmanager
def memory_limit(gigabytes: int) -> Iterator[None]:
    """On Linux, more memory than this raises an error inside the block, and ends no other process of the machine."""
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes * 2**30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def attempt(area: str, *errors: type[Exception], names: Iterable[str] = ()) -> Iterator[None]:
    """The block ends in a right answer, or in one of these errors.

    The block asserts that its answer is right. Any other exception is a failure of the test.

    Args:
        area: what is tried, the row of the table of counts.
        errors: the documented types.
        names: of what may be wrong, such as fields; the message of an error must have one of them.

    Raises:
        AssertionError: for an error whose message does not name what is wrong.
    """
    try:
        yield
    except errors as error:
        names = list(names)
        assert not names or any(name in str(error) for name in names), f"{error!r} names none of {names}"
        COUNTS[area, type(error).__name__] += 1
    else:
        COUNTS[area, RIGHT] += 1


def write_counts(path: str) -> None:
    """The counts of this run as JSON: by area, by outcome."""
    counts: dict[str, dict[str, int]] = {}
    for (area, outcome), count in sorted(COUNTS.items()):
        counts.setdefault(area, {})[outcome] = count
    write_json(path, counts)


def strided(draw: Any, *shape: int) -> torch.Tensor:
    """Draw a view of that shape, in memory that holds NaN between, before and after its elements.

    Its strides are those of a contiguous, transposed, sliced, expanded or overlapping tensor.
    """
    order = draw(st.permutations(range(len(shape))))
    strides, size = [0] * len(shape), draw(st.sampled_from([1, 1, 1, 2, 3]))
    for axis in order:
        strides[axis] = draw(st.sampled_from([size] * 6 + [0, 1]))  # 0: expanded; 1 may overlap
        size *= shape[axis] + draw(st.sampled_from([0, 0, 0, 2]))
    offset = draw(st.integers(0, 3))
    span = offset + sum(stride * max(count - 1, 0) for stride, count in zip(strides, shape, strict=True)) + 5
    memory = torch.full((span,), torch.nan)
    addresses = torch.arange(span).as_strided(shape, strides, offset)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    memory[addresses.flatten().unique()] = torch.randn(addresses.unique().numel(), generator=generator)
    tensor = memory.as_strided(shape, strides, offset)
    return torch.complex(tensor, tensor).conj().imag if draw(st.integers(0, 9)) == 9 else tensor  # a negative view
