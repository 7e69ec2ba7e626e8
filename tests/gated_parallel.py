"""One of two processes that share the layers of a gated model by tensor parallelism, on CPU by gloo.

    python tests/gated_parallel.py FOLDER

FOLDER holds the model and batch.safetensors: `input_ids` and `expected`, the last hidden state of the whole model.
"""

import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import distributed

from hf_relpos import RelPosBertModel


def main() -> None:
    folder = Path(sys.argv[1])
    batch = load_file(folder / "batch.safetensors")
    warnings.simplefilter("ignore")  # newer releases have another name for the argument
    model = RelPosBertModel.from_pretrained(folder, tp_plan="auto").eval()
    weight = model.encoder.layer[0].intermediate.dense.weight
    rows = len(getattr(weight, "_local_tensor", weight))
    assert distributed.get_world_size() == 2 and rows == model.config.intermediate_size, rows
    with torch.no_grad():
        torch.testing.assert_close(model(batch["input_ids"]).last_hidden_state, batch["expected"], rtol=0, atol=1e-5)


if __name__ == "__main__":
    main()
