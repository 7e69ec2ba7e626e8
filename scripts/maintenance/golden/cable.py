"""Fixtures of CABLE: the authors' attention layer, without its output projection, and the key-gated bias of GRAPE.

Original: github.com/axiomlab/Cable, commit 8bc6b83e872899c50827e6940344350c37fadaa8, src/Cable.py
(CausalSelfAttention), and github.com/model-architectures/GRAPE, commit f5b539f35066f9067bf36e1f9d802212fce7884e,
model/llama-mha-grape-a-keygated.py (KeyGatedAdditiveBias), on the CPU. Environment: Python 3.11, torch 2.13.0.

    python scripts/maintenance/golden/cable.py --repo PATH --grape PATH

cable.safetensors, B = 2, H = 4, D = 32, L = 12: the layer's parameters, `hidden` (B, L, D) and `out` (B, L, D).
The original does not scale the products of queries and keys. grape.safetensors: `omega` (H,), `u` (H, d), `keys`
(B, L, H, d) and `bias` (B, H, L, L) of keys that are not to the right.
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
    parser.add_argument("--grape", type=Path, required=True)
    args = parser.parse_args()
    source = args.repo / "src" / "Cable.py"
    names = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "math": math}
    run(source, [find(source, "CausalSelfAttention")], names)
    with mock.patch("torch.cuda.is_available", lambda: False):
        layer = names["CausalSelfAttention"](SimpleNamespace(n_embd=WIDTH, n_head=HEADS, block_size=LENGTH))
    layer.c_proj = torch.nn.Identity()
    tensors = randomise(layer) | {"hidden": noise("hidden", BATCH, LENGTH, WIDTH)}
    write("cable", tensors | {"out": layer(tensors["hidden"])})
    source = args.grape / "model" / "llama-mha-grape-a-keygated.py"
    parts = ("_softplus_inverse", "_get_alibi_slopes", "KeyGatedAdditiveBias")
    run(source, [find(source, name) for name in parts], names)
    bias = names["KeyGatedAdditiveBias"](HEADS, WIDTH // HEADS)
    tensors = randomise(bias) | {"keys": noise("keys", BATCH, LENGTH, HEADS, WIDTH // HEADS)}
    write("grape", tensors | {"bias": bias(tensors["keys"])})


if __name__ == "__main__":
    main()
