"""Make tests/fixtures/schemes/tener.safetensors with the attention layer of TENER.

    git clone https://github.com/fastnlp/TENER && git -C TENER checkout d2614d509dffb9b30636e3523a2f8f0dc4876708
    python scripts/maintenance/golden/tener.py --repo TENER

Original: github.com/fastnlp/TENER, commit d2614d509dffb9b30636e3523a2f8f0dc4876708, modules/relative_transformer.py.
Environment: torch 2.13.0 on a CPU; the layer needs nothing else. Float64 but for the sinusoids, which the original
computes in float32.

    metadata "config"             JSON: d_model D, n_head H, and for every case whether `scale` is set
    <case>.qkv_linear.weight      (3D, D), no bias
    <case>.r_r_bias, .r_w_bias    (H, d)
    <case>.hidden_states          (B, L, D)
    <case>.real                   (B, L), False where a key is padding
    <case>.context                (B, L, D), what the heads give; the original has no output projection
    <case>.weights                (B, H, L, L)
"""

import argparse
import importlib.util
import json
from pathlib import Path

import torch
from safetensors.torch import save_file


TARGET = Path(__file__).parents[3] / "tests" / "fixtures" / "schemes" / "tener.safetensors"
CASES = {"unscaled": {"scale": False}, "scaled": {"scale": True}}
B, L, D, H = 2, 9, 24, 3


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repo", type=Path, required=True, help="a checkout of fastnlp/TENER")
    source = parser.parse_args().repo / "modules" / "relative_transformer.py"
    spec = importlib.util.spec_from_file_location("relative_transformer", source)
    original = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(original)

    torch.manual_seed(0)
    tensors = {}
    for case, settings in CASES.items():
        layer = original.RelativeMultiHeadAttn(D, H, dropout=0.0, **settings).double().eval()
        weights = []
        layer.dropout_layer.register_forward_hook(lambda module, args, out, weights=weights: weights.append(out))
        hidden = torch.randn(B, L, D, dtype=torch.float64)
        real = torch.ones(B, L, dtype=torch.bool)
        real[1, -3:] = False
        found = {
            "qkv_linear.weight": layer.qkv_linear.weight,
            "r_r_bias": layer.r_r_bias,
            "r_w_bias": layer.r_w_bias,
            "hidden_states": hidden,
            "real": real,
            "context": layer(hidden, real),
            "weights": weights[0],
        }
        tensors |= {f"{case}.{name}": tensor.contiguous() for name, tensor in found.items()}
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, TARGET, {"config": json.dumps({"d_model": D, "n_head": H, "cases": CASES})})


if __name__ == "__main__":
    main()
