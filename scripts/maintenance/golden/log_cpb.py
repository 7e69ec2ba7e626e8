"""Fixture of the log-spaced continuous position bias, on windows of one row.

Original: github.com/microsoft/Swin-Transformer, commit f82860bfb5225915aca09c3227159ee9e1df874d,
models/swin_transformer_v2.py (WindowAttention). Environment: Python 3.11, torch 2.13.0, numpy 2.

    python scripts/maintenance/golden/log_cpb.py --repo PATH

log_cpb.safetensors, H = 3, W = 512, trained windows of 16, for lengths L of 12 and 24:
    weight.0, bias.0, weight.2    of cpb_mlp: (W, 1), the column of the one axis; (W,); (H, W)
    <L>.scores                    (H, L, L), before the softmax, of queries that are zero: the bias alone
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from originals import find, randomise, run, write
from torch import nn


HEADS, WINDOW, LENGTHS = 3, 16, [12, 24]


class Recorder(nn.Softmax):
    """The softmax of the module, which remembers the scores."""

    def __init__(self) -> None:
        super().__init__(dim=-1)

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        self.scores = scores
        return super().forward(scores)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repo", type=Path, required=True)
    source = parser.parse_args().repo / "models" / "swin_transformer_v2.py"
    names = {"torch": torch, "nn": nn, "F": nn.functional, "np": np}
    run(source, [find(source, "WindowAttention")], names)
    tensors = {}
    for length in LENGTHS:
        module = names["WindowAttention"](24, (1, length), HEADS, pretrained_window_size=(2, WINDOW)).eval()
        weights = randomise(module.cpb_mlp)
        module.qkv.weight.zero_()
        module.softmax = Recorder()
        module(torch.zeros(1, length, 24))
        tensors[f"{length}.scores"] = module.softmax.scores[0]
        tensors |= {
            "weight.0": weights["0.weight"][:, 1:],
            "bias.0": weights["0.bias"],
            "weight.2": weights["2.weight"],
        }
    write("log_cpb", tensors, lengths=LENGTHS, window=WINDOW)


if __name__ == "__main__":
    main()
