"""Fixture of rotations at learned rates, in float64.

Original: github.com/model-architectures/GRAPE, commit f5b539f35066f9067bf36e1f9d802212fce7884e,
model/llama-mha-grape-m-nonctx.py (MSGRAPECommuting), on the CPU, with float64 for its float32. Environment: Python
3.11, torch 2.13.0.

    python scripts/maintenance/golden/grape_m.py --repo PATH

grape_m.safetensors, B = 2, L = 7, H = 3, d = 8:
    log_freq        (d/2,), noise added to that of a new module
    query, key      (B, L, H, d)
    scores          (B, H, L, L), products of the rotated ones, not scaled
"""

import argparse
from pathlib import Path
from types import SimpleNamespace

import torch
from originals import find, noise, run, write


SHAPE = (2, 7, 3, 8)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repo", type=Path, required=True)
    source = parser.parse_args().repo / "model" / "llama-mha-grape-m-nonctx.py"
    precise = SimpleNamespace(**{**vars(torch), "float32": torch.float64})
    parts = [find(source, name) for name in ("apply_rotary_emb", "MSGRAPECommuting")]
    names = run(source, parts, {"torch": precise, "nn": torch.nn})
    module = names["MSGRAPECommuting"](*SHAPE[2:], log_freq_scale=16.0)
    module.log_freq.data = module.log_freq.double() + noise("log_freq", SHAPE[3] // 2, scale=8.0)
    tensors = {name: noise(name, *SHAPE).double() for name in ("query", "key")}
    query, key = module(tensors["query"], tensors["key"])
    scores = torch.einsum("bihd,bjhd->bhij", query, key)
    write("grape_m", tensors | {"log_freq": module.log_freq, "scores": scores})


if __name__ == "__main__":
    main()
