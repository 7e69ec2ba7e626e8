"""Fixture of KERPLE: both kernels of the authors' code, added to scores.

Original: github.com/chijames/KERPLE, commit 25be3d712e96a3353b374f1f8e36b97d86f97ffa, megatron/mpu/layers.py
(ParallelKerpleLog, ParallelKerplePower), on one process and the CPU. Environment: Python 3.11, torch 2.13.0.

    python scripts/maintenance/golden/kerple.py --repo PATH

kerple.safetensors, H = 4, L = 24, for <kind> log and power:
    scores           (1, H, L, L), what goes in
    <kind>.bias_p    (H, 1, 1), as before the call: one entry is below the bound of 0.01, for power one above 2
    <kind>.bias_a    (H, 1, 1), likewise
    <kind>.out       (1, H, L, L); right for keys up to the query only, the rest gets no bias
"""

import argparse
import math
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from originals import find, noise, run, write
from torch.nn.parameter import Parameter


HEADS, LENGTH = 4, 24
ARGUMENTS = SimpleNamespace(num_attention_heads=HEADS, pos_emb="kerple_power_ap_", params_dtype=torch.float32)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repo", type=Path, required=True)
    source = parser.parse_args().repo / "megatron" / "mpu" / "layers.py"
    kinds = {"log": "ParallelKerpleLog", "power": "ParallelKerplePower"}
    names = {
        "torch": torch,
        "math": math,
        "Parameter": Parameter,
        "get_model_parallel_world_size": lambda: 1,
        "get_model_parallel_rank": lambda: 0,
    }
    run(source, [find(source, name) for name in kinds.values()], names)
    tensors = {"scores": noise("scores", 1, HEADS, LENGTH, LENGTH)}
    values = {"bias_p": [0.004, 0.7, 1.6, 2.3], "bias_a": [0.5, 0.002, 0.9, 0.1]}
    for kind, name in kinds.items():
        with mock.patch("torch.cuda.current_device", lambda: "cpu"):
            module = names[name](ARGUMENTS)
        for parameter, entries in values.items():
            tensors[f"{kind}.{parameter}"] = torch.tensor(entries)[:, None, None]
            getattr(module, parameter).data = tensors[f"{kind}.{parameter}"].clone()
        tensors[f"{kind}.out"] = module(tensors["scores"])
    write("kerple", tensors)


if __name__ == "__main__":
    main()
