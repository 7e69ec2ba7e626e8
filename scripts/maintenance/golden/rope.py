"""Fixture of rotary positions: a layer of RoFormer (adjacent pairs), and layers of GPT-NeoX (halves).

Original: transformers 4.57.6, models/roformer/modeling_roformer.py (RoFormerSelfAttention,
RoFormerSinusoidalPositionalEmbedding) and models/gpt_neox/modeling_gpt_neox.py (GPTNeoXAttention,
GPTNeoXRotaryEmbedding). Environment: Python 3.11, torch 2.13.0.

    python scripts/maintenance/golden/rope.py

rope.safetensors, B = 2, L = 20 (the second row ends after 15 tokens), D = 32, H = 4, d = 8:
    hidden_states               (B, L, D)
    roformer.{query,key,value}.{weight,bias}    (D, D), (D,)
    roformer.out                (B, L, D)
    neox.query_key_value.{weight,bias}          (3D, D), (3D,): q, k, v of one head after those of another
    <case>.out                  (B, L, D), for the cases of the metadata, before the output projection
    <case>.positions            (B, L)
"""

import torch
from originals import check_transformers, noise, randomise, write
from transformers import GPTNeoXConfig, RoFormerConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXRotaryEmbedding
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention, RoFormerSinusoidalPositionalEmbedding


LENGTH, WIDTH, HEADS = 20, 32, 4
CASES = {
    "neox-full": {"rope_theta": 10000.0},
    "neox-partial": {"partial_rotary_factor": 0.25, "rope_theta": 500.0},
    "neox-linear": {"partial_rotary_factor": 0.5, "rope_type": "linear", "factor": 2.5},
}


@torch.no_grad()
def main() -> None:
    check_transformers()
    hidden = noise("hidden_states", 2, LENGTH, WIDTH)
    padded = torch.arange(LENGTH)[None] >= torch.tensor([LENGTH, 15])[:, None]
    mask = torch.zeros(2, 1, 1, LENGTH).masked_fill(padded[:, None, None], torch.finfo(torch.float32).min)
    tensors = {"hidden_states": hidden}
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS}

    config = RoFormerConfig(**sizes, attention_probs_dropout_prob=0.0, max_position_embeddings=64)
    module = RoFormerSelfAttention(config).eval()
    tensors |= {f"roformer.{name}": value for name, value in randomise(module, scale=0.15).items()}
    table = RoFormerSinusoidalPositionalEmbedding(64, WIDTH // HEADS)
    table._init_weight()
    sinusoid = table(hidden.shape[:-1])[None, None]
    tensors["roformer.out"] = module(hidden, mask, sinusoid)[0]

    for case, rotation in CASES.items():
        config = GPTNeoXConfig(
            **sizes,
            rotary_pct=rotation.get("partial_rotary_factor", 1.0),
            rotary_emb_base=rotation.get("rope_theta", 10000.0),
            rope_scaling={"rope_type": "linear", "factor": rotation["factor"]} if "factor" in rotation else None,
            attention_dropout=0.0,
            attn_implementation="eager",
        )
        module = GPTNeoXAttention(config, layer_idx=0).eval()
        parameters = randomise(module, scale=0.15)
        tensors |= {f"neox.{name}": value for name, value in parameters.items() if "dense" not in name}
        module.dense.weight.copy_(torch.eye(WIDTH))
        module.dense.bias.zero_()
        positions = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) * 3 + 1])
        angles = GPTNeoXRotaryEmbedding(config)(hidden, positions)
        tensors[f"{case}.positions"] = positions
        tensors[f"{case}.out"] = module(hidden, mask, position_embeddings=angles)[0]
    write("rope", tensors, length=15, cases=CASES)


if __name__ == "__main__":
    main()
