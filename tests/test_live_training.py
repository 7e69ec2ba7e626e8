"""Training an optimized model beside Transformers' own: optimizer steps, and two processes."""

import copy
import json
from pathlib import Path

import pytest
import torch
from encoders import build, pad_of, tokens
from launching import run_python

from hf_relpos import optimize


NAMES = ("BERT", "ModernBERT", "DeBERTa v2", "MPNet", "XLNet", "T5", "ALBERT", "remote code")


def loss_of(states: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    return (states[real] * torch.linspace(-1, 1, states.shape[-1], dtype=states.dtype)).pow(2).mean()


@pytest.mark.parametrize("name", NAMES)
def test_optimize_steps_with_gradient_accumulation(name):
    """Three steps of AdamW, each of two batches: the losses and weights of Transformers."""
    models = [build(name).train()]
    models.append(copy.deepcopy(models[0]))
    optimize(models[1])
    losses: list[list[float]] = [[], []]
    for model, found in zip(models, losses, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            for part in range(2):
                sizes = torch.randint(1, 41, (5,), generator=torch.Generator().manual_seed(2 * step + part))
                real = torch.arange(int(sizes.max())) < sizes[:, None]
                loss = loss_of(model(**tokens(real, pad_of(model), 2 * step + part))[0], real) / 2
                loss.backward()
                found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[1] == pytest.approx(losses[0], rel=1e-10) and losses[0][-1] != losses[0][1]
    for (key, theirs), ours in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-10, key


@pytest.mark.slow
def test_optimize_under_distributed_data_parallel(tmp_path):
    """Two processes with half of the rows each: the gradients of Transformers for all rows in one process."""
    names = ("BERT", "DeBERTa v2", "ALBERT")
    run_python(Path(__file__).with_name("parallel_live.py"), tmp_path / "out.json", *names, processes=2)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found.keys() == set(names) and max(found.values()) <= 1e-10
