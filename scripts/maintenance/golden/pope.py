"""Fixture of polar positions, in float64.

Original: PoPE-pytorch 0.2.1 from PyPI, PoPE_pytorch/pope.py (PoPE) and attention.py (flash_attn_with_pope), on the
CPU. Environment: Python 3.11, torch 2.13.0, einops 0.8.2, einx 0.4.3.

    python scripts/maintenance/golden/pope.py

pope.safetensors, B = 2, H = 3, L = 7, d = 8, for bases of 10,000 and 50:
    query, key, value       (B, H, L, d)
    bias                    (H, d), some outside of [−2π, 0]
    <base>.out              (B, H, L, d)
"""

import torch
from originals import noise, write
from PoPE_pytorch import PoPE, flash_attn_with_pope


SHAPE = (2, 3, 7, 8)
BASES = [10000, 50]


@torch.no_grad()
def main() -> None:
    tensors = {name: noise(name, *SHAPE).double() for name in ("query", "key", "value")}
    tensors["bias"] = noise("bias", *SHAPE[1::2], scale=4.0).double()
    for base in BASES:
        module = PoPE(SHAPE[3], heads=SHAPE[1], theta=base)
        frequencies = module.inv_freqs  # which it computes in float32
        module.double().inv_freqs = base ** -(torch.arange(SHAPE[3]).double() / SHAPE[3])
        torch.testing.assert_close(module.inv_freqs.float(), frequencies)
        module.bias.copy_(tensors["bias"])
        vectors = (tensors[name] for name in ("query", "key", "value"))
        tensors[f"{base}.out"] = flash_attn_with_pope(*vectors, pos_emb=module(SHAPE[2]))
    write("pope", tensors, bases=BASES)


if __name__ == "__main__":
    main()
