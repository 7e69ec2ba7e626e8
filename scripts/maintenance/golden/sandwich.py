"""Fixture of Sandwich: the bias of NVIDIA NeMo, the only public code with it.

Original: github.com/NVIDIA/NeMo, commit 8cfedd7203462cb251a914e700e5605444277561, folder
nemo/collections/nlp/modules/common/megatron/position_embedding (SandwichRelativePositionEmbedding and
build_relative_position). Environment: Python 3.11, torch 2.13.0.

    python scripts/maintenance/golden/sandwich.py --repo PATH

sandwich.safetensors: bias.<H>.<d̄>, (1, H, L, L), L = 24, both directions.
"""

import argparse
from pathlib import Path

import torch
from originals import find, run, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repo", type=Path, required=True)
    folder = parser.parse_args().repo / "nemo/collections/nlp/modules/common/megatron/position_embedding"
    distances = folder / "alibi_relative_position_embedding.py"
    source = folder / "sandwich_relative_position_embedding.py"
    names = {"torch": torch, "experimental": lambda cls: cls}
    run(distances, [find(distances, "build_relative_position")], names)
    run(source, [find(source, "SandwichRelativePositionEmbedding")], names)
    tensors = {}
    for heads, width in ((3, 8), (12, 128)):
        module = names["SandwichRelativePositionEmbedding"](True, heads, None, width, max_seq_len=24)
        tensors[f"bias.{heads}.{width}"] = module(24, 24)
    write("sandwich", tensors, cases=[[3, 8], [12, 128]])


if __name__ == "__main__":
    main()
