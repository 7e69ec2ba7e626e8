"""Fixture of CAPE: the sinusoids of the original in evaluation and in training, with the numbers it drew.

Original: github.com/gcambara/cape, commit d45695097bfbb6eb1866a176b5d5ede2e8fbfb0b, cape/cape.py (CAPE1d). It takes
one token more than `x_lengths` for real, so it is given one less. Environment: Python 3.11, torch 2.13.0, einops
0.8.2.

    python scripts/maintenance/golden/cape.py --repo PATH

cape.safetensors, B = 2, L = 12 (the second row ends after 7 tokens), D = 24, for the cases of the metadata:
    <case>               (B, L, D), without the content; zeros for padding where lengths are given
    <case>.draw.<n>      (B, 1) or (B, L), the n-th call of `uniform_`, between −a and a; a in the metadata
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from originals import write


LENGTH, REAL, WIDTH = 12, [12, 7], 24
PUBLISHED = {"max_global_shift": 5.0, "max_local_shift": 0.5, "max_global_scaling": 1.03}
CASES = {
    "plain": {"training": False, "options": PUBLISHED},
    "slow": {"training": False, "options": {"freq_scale": 0.25}},
    "centred": {"training": False, "options": {"normalize": True}},
    "augmented": {"training": True, "options": PUBLISHED},
    "shifted": {"training": True, "options": {**PUBLISHED, "max_local_shift": 0.0, "max_global_scaling": 1.0}},
    "all": {"training": True, "options": {**PUBLISHED, "normalize": True, "freq_scale": 2.0}},
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repo", type=Path, required=True)
    spec = importlib.util.spec_from_file_location("original", parser.parse_args().repo / "cape" / "cape.py")
    original = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(original)

    drawn = []
    uniform = torch.Tensor.uniform_

    def recorded(tensor, low, high):
        assert low == -high
        drawn.append((uniform(tensor, low, high).clone(), high))
        return tensor

    torch.Tensor.uniform_ = recorded
    torch.manual_seed(0)
    tensors = {}
    for case, settings in CASES.items():
        defaults = {"max_global_shift": 0.0, "max_local_shift": 0.0, "max_global_scaling": 1.0}
        module = original.CAPE1d(WIDTH, batch_first=True, **{**defaults, **settings["options"]})
        module.train(settings["training"])
        lengths = torch.tensor(REAL) - 1 if settings["options"].get("normalize") else None
        drawn.clear()
        tensors[case] = module.compute_pos_emb(torch.zeros(2, LENGTH, WIDTH), lengths)
        tensors |= {f"{case}.draw.{n}": numbers for n, (numbers, _) in enumerate(drawn)}
        settings["ranges"] = [high for _, high in drawn]
        settings["options"] = {**defaults, **settings["options"]}
    write("cape", tensors, hidden_size=WIDTH, real=REAL, cases=CASES)


if __name__ == "__main__":
    main()
