"""Fixture of NEZHA: its self-attention in Transformers, padding included.

Original: transformers 4.57.6, models/deprecated/nezha/modeling_nezha.py (NezhaSelfAttention). Environment: Python
3.11, torch 2.13.0.

    python scripts/maintenance/golden/nezha.py

nezha.safetensors, B = 2, L = 14 (the second row ends after 9 tokens), D = 24, H = 3, for each case of the metadata:
    hidden_states                     (B, L, D)
    {query,key,value}.{weight,bias}   (D, D) and (D,)
    <case>.out                        (B, L, D)
    <case>.weights                    (B, H, L, L)
"""

import torch
from originals import check_transformers, noise, randomise, write
from transformers.models.deprecated.nezha.modeling_nezha import NezhaConfig, NezhaSelfAttention


LENGTH, REAL, WIDTH, HEADS = 14, [14, 9], 24, 3
CASES = {"clipped": {"max_relative_position": 4}, "default": {}}


@torch.no_grad()
def main() -> None:
    check_transformers()
    hidden = noise("hidden_states", len(REAL), LENGTH, WIDTH)
    padded = torch.arange(LENGTH)[None] >= torch.tensor(REAL)[:, None]
    mask = torch.zeros(len(REAL), 1, 1, LENGTH).masked_fill(padded[:, None, None], torch.finfo(torch.float32).min)
    tensors = {"hidden_states": hidden}
    for case, settings in CASES.items():
        config = NezhaConfig(hidden_size=WIDTH, num_attention_heads=HEADS, max_position_embeddings=16, **settings)
        layer = NezhaSelfAttention(config).eval()
        tensors |= randomise(layer)
        tensors[f"{case}.out"], tensors[f"{case}.weights"] = layer(hidden, mask, output_attentions=True)[:2]
    write("nezha", tensors, real=REAL, heads=HEADS, cases=CASES)


if __name__ == "__main__":
    main()
