"""What every test needs: no network, one thread, no progress bars, fixed seeds."""

import os


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from transformers.utils import logging


try:
    from hub_fixtures import hub  # noqa: F401  a fixture
except ModuleNotFoundError as error:
    if error.name != "hub_fixtures":
        raise

torch.set_num_threads(1)
logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def seed():
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture
def none_too_short(monkeypatch):
    """The default backend takes its own way, in chunks, however small the model."""
    monkeypatch.setattr("hf_relpos.model.backend_chunked.FEWEST_SCORES", 0)
