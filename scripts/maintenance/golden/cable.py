"""Fixture of CABLE: the authors' attention layer, without its output projection.

Original: github.com/axiomlab/Cable, commit 8bc6b83e872899c50827e6940344350c37fadaa8, src/Cable.py
(CausalSelfAttention), on the CPU. Environment: Python 3.11, torch 2.13.0.

    python scripts/maintenance/golden/cable.py --repo PATH

cable.safetensors, B = 2, H = 4, D = 32, L = 12: the layer's parameters, `hidden` (B, L, D) and `out` (B, L, D).
The original does not scale the products of queries and keys.
"""

import argparse
import math
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from originals import find, noise, randomise, run, write


BATCH, HEADS, WIDTH, LENGTH = 2, 4, 32, 12


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repo", type=Path, required=True)
    source = parser.parse_args().repo / "src" / "Cable.py"
    names = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "math": math}
    run(source, [find(source, "CausalSelfAttention")], names)
    with mock.patch("torch.cuda.is_available", lambda: False):
        layer = names["CausalSelfAttention"](SimpleNamespace(n_embd=WIDTH, n_head=HEADS, block_size=LENGTH))
    layer.c_proj = torch.nn.Identity()
    tensors = randomise(layer) | {"hidden": noise("hidden", BATCH, LENGTH, WIDTH)}
    write("cable", tensors | {"out": layer(tensors["hidden"])})


if __name__ == "__main__":
    main()
