"""Two processes: models divided or copied among them compute what one process does; a killed one is no end."""

import functools
import json
from pathlib import Path

import pytest
import torch
from killed_processes import SAVED
from launching import run_python
from parallel_models import CASES
from safetensors.torch import load_file
from selection import FEATURE_SCHEMES

from hf_relpos import RelPosBertConfig, RelPosBertForMaskedLM, RelPosBertModel
from hf_relpos.training import last_checkpoint


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


@pytest.mark.slow
@pytest.mark.parametrize("what", ["distil", "convert"])
def test_after_one_of_two_processes_is_killed_the_same_command_ends_as_if_it_had_not_been(what, tmp_path, monkeypatch):
    """A distillation and a conversion go on from their last checkpoint: bit by bit the same weights."""
    monkeypatch.setenv("HF_RELPOS_FAST_PRODUCTS", "0")  # else a measurement chooses products, which differ by rounding
    script, killed, whole = Path(__file__).with_name("killed_processes.py"), tmp_path / "killed", tmp_path / "whole"
    run_python(script, what, killed, SAVED + 2, processes=2, launcher=True, status=1)
    assert not (killed / "out").exists()
    if what == "distil":
        assert last_checkpoint(killed / "run").endswith(f"checkpoint-{SAVED}")
    run_python(script, what, killed, 0, processes=2, launcher=True)
    run_python(script, what, whole, 0, processes=2, launcher=True)
    one, other = (load_file(folder / "out" / "model.safetensors") for folder in (killed, whole))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert not list(killed.glob(".*"))
