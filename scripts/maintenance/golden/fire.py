"""Fixture of FIRE: the bias for short and long texts, by the listing of the paper as a later project carries it.

Original: github.com/mcleish7/arithmetic, commit 86022a57d38c0fde46444d62e8dcbebcc0af614c,
cramming/architectures/embeddings.py (FIRE), in eval mode. Environment: Python 3.11, torch 2.13.0.

    python scripts/maintenance/golden/fire.py --repo PATH

fire.safetensors, H = 3, L = 24, for <threshold> 512 (all positions below it) and 6:
    <threshold>.<parameter>    mlp.0.weight, mlp.0.bias, mlp.2.weight, mlp.2.bias, c (), L_multiplier ()
    <threshold>.bias           (1, H, L, L), divided by max(i, L₀)
"""

import argparse
from pathlib import Path

import torch
from originals import find, randomise, run, write


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repo", type=Path, required=True)
    source = parser.parse_args().repo / "cramming" / "architectures" / "embeddings.py"
    names = run(source, [find(source, "FIRE")], {"torch": torch})
    tensors = {}
    for threshold in (512, 6):
        module = names["FIRE"](num_heads=3, init_L=float(threshold)).eval()
        parameters = randomise(module.mlp, scale=1.0)
        module.c.copy_(torch.tensor(-0.35))  # either sign: the code takes absolute values
        module.L_multiplier.copy_(torch.tensor(-1.2))
        tensors |= {f"{threshold}.mlp.{name}": value for name, value in parameters.items()}
        tensors |= {f"{threshold}.c": module.c.clone(), f"{threshold}.L_multiplier": module.L_multiplier.clone()}
        tensors[f"{threshold}.bias"] = module(24, "cpu")
    write("fire", tensors, thresholds=[512, 6])


if __name__ == "__main__":
    main()
