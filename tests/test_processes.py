"""Two processes: models divided or copied among them compute what one process does."""

import functools
import json
from pathlib import Path

import pytest
from launching import run_python
from parallel_models import CASES
from selection import FEATURE_SCHEMES

from hf_relpos import RelPosBertConfig, RelPosBertForMaskedLM, RelPosBertModel


CLOSE = 1e-10  # in float64
ORDER = sorted(CASES, key=lambda case: case not in FEATURE_SCHEMES)
CHUNKS = [tuple(ORDER[first : first + 12]) for first in range(0, len(ORDER), 12)]  # for each, two processes
cases = pytest.mark.parametrize("scheme", CASES)


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """A function from a case and a way to the differences from one process; `parallel_models` has both."""

    @functools.cache
    def of(chunk):
        folder = tmp_path_factory.mktemp("models")
        run_python(Path(__file__).with_name("parallel_models.py"), folder / "out.json", folder, *chunk, processes=2)
        return json.loads((folder / "out.json").read_text())

    return lambda case, way: of(next(chunk for chunk in CHUNKS if case in chunk))[case][way]


def check(found, *kinds):
    assert isinstance(found, dict), found
    assert set(found) == {"outputs", "gradients", *kinds} and max(found.values()) < CLOSE, found


@pytest.mark.heavy
@cases
def test_distributed_data_parallel(scheme, figures):
    check(figures(scheme, "DistributedDataParallel"))


@cases
def test_fsdp2(scheme, figures):
    check(figures(scheme, "FSDP2"))


@cases
def test_fsdp2_by_transformers(scheme, figures):
    check(figures(scheme, "FSDP2 by DistributedConfig"), "saved")


def test_tensor_and_context_parallelism_are_not_claimed():
    """Without a plan, Transformers refuses tp_size."""
    config = RelPosBertConfig(vocab_size=8, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    assert not RelPosBertForMaskedLM(config).supports_tp_plan
    assert not RelPosBertModel._supports_context_parallel
