"""Fixture of the positional scores of hierarchical opacity propagation.

Original: github.com/Yaoyi-Li/HOP-Matting, commit 4ac22d92b5432734ffe416cf2c0a99fb730d0c04, networks/ops.py
(GuidedCxtAttenEmbedding.gen_pos_score). Environment: Python 3.11, torch 2.13.0.

    python scripts/maintenance/golden/hop.py --repo PATH

hop.safetensors, H = 2 (one call of the original for each), d = 8, N tokens of a grid, for the cases of the metadata:
    <case>.query                        (H, N, d)
    <case>.weight, <case>.bias          (d, d) and (d,), of pos_embed_linear
    <case>.queries                      (n,), the queries whose scores are kept
    <case>.scores                       (H, n, N)
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from originals import noise, write


HEADS, SIZE = 2, 8
CASES = {
    "default": {"radius": 7, "height": 14, "width": 15},
    "small": {"radius": 2, "height": 4, "width": 7},
    "square": {"radius": 1, "height": 5, "width": 5},
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repo", type=Path, required=True)
    sys.modules["utils"] = ModuleType("utils")
    arch = SimpleNamespace(batchnorm_eps=1e-5, hop_normalize=False)
    sys.modules["utils"].CONFIG = SimpleNamespace(model=SimpleNamespace(arch=arch))
    spec = importlib.util.spec_from_file_location("original", parser.parse_args().repo / "networks" / "ops.py")
    original = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(original)
    tensors = {}
    for case, sizes in CASES.items():
        height, width = sizes["height"], sizes["width"]
        module = original.GuidedCxtAttenEmbedding(4, 2 * SIZE, embed_radius=sizes["radius"])
        linear = module.pos_embed_linear
        linear.bias.copy_(noise(f"{case}.bias", SIZE))
        linear.weight.copy_(noise(f"{case}.weight", SIZE, SIZE))
        query = noise(f"{case}.query", HEADS, height * width, SIZE)
        images = query.mT.reshape(HEADS, 1, SIZE, height, width)
        scores = torch.cat([module.gen_pos_score(image, (height, width)) for image in images])
        scores = scores.reshape(HEADS, height * width, height * width).mT  # keys come first in the original
        queries = torch.arange(0, height * width, 10)
        kept = {"query": query, "weight": linear.weight, "bias": linear.bias, "queries": queries}
        tensors |= {f"{case}.{name}": tensor for name, tensor in {**kept, "scores": scores[:, queries]}.items()}
    write("hop", tensors, heads=HEADS, size=SIZE, cases=CASES)


if __name__ == "__main__":
    main()
