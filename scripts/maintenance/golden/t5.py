"""Fixture of T5's bias: one layer of T5's encoder and of its decoder, one of MPNet, and the buckets of both.

Original: transformers 4.57.6, models/t5/modeling_t5.py (T5Attention) and models/mpnet/modeling_mpnet.py
(MPNetSelfAttention, MPNetEncoder.compute_position_bias). Environment: Python 3.11, torch 2.13.0.

    python scripts/maintenance/golden/t5.py

t5.safetensors, B = 2, L = 40 (the second row ends after 31 tokens), D = 24, H = 3, 32 buckets:
    hidden_states                  (B, L, D)
    <layer>.{q,k,v}.weight         (D, D), for <layer> encoder, decoder, mpnet; for mpnet also .bias (D,)
    <layer>.relative_attention_bias.weight    (32, H)
    <layer>.out                    (B, L, D), before the output projection
    buckets.encoder, .decoder, .mpnet         (601,), of r = −300 … 300
    buckets.encoder-16-40                     likewise, 16 buckets up to 40
"""

import torch
from originals import check_transformers, noise, randomise, write
from transformers.models.mpnet.modeling_mpnet import MPNetConfig, MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention, T5Config


LENGTH, WIDTH, HEADS = 40, 24, 3


@torch.no_grad()
def main() -> None:
    check_transformers()
    hidden = noise("hidden_states", 2, LENGTH, WIDTH)
    padded = torch.arange(LENGTH)[None] >= torch.tensor([LENGTH, 31])[:, None]
    lowest = torch.finfo(torch.float32).min
    padding = torch.zeros(2, 1, 1, LENGTH).masked_fill(padded[:, None, None], lowest)
    future = torch.full((LENGTH, LENGTH), lowest).triu(1)
    r = torch.arange(-300, 301)
    tensors = {"hidden_states": hidden}
    for layer in ("encoder", "decoder"):
        config = T5Config(
            d_model=WIDTH, d_kv=WIDTH // HEADS, num_heads=HEADS, dropout_rate=0.0, is_decoder=layer == "decoder"
        )
        module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
        parameters = randomise(module, scale=0.15)
        module.o.weight.copy_(torch.eye(WIDTH))
        mask = padding if layer == "encoder" else torch.maximum(padding + future, torch.tensor(lowest))
        tensors |= {f"{layer}.{name}": value for name, value in parameters.items() if name != "o.weight"}
        tensors[f"{layer}.out"] = module(hidden, mask=mask, cache_position=torch.arange(LENGTH))[0]
        tensors[f"buckets.{layer}"] = module._relative_position_bucket(r, bidirectional=layer == "encoder")
    tensors["buckets.encoder-16-40"] = T5Attention._relative_position_bucket(r, num_buckets=16, max_distance=40)
    config = MPNetConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=1, attention_probs_dropout_prob=0.0
    )
    encoder = MPNetEncoder(config).eval()
    attention = encoder.layer[0].attention.attn
    parameters = randomise(attention, scale=0.15)
    bias = randomise(encoder.relative_attention_bias)["weight"]
    attention.o.weight.copy_(torch.eye(WIDTH))
    attention.o.bias.zero_()
    tensors |= {f"mpnet.{name}": value for name, value in parameters.items() if not name.startswith("o.")}
    tensors["mpnet.relative_attention_bias.weight"] = bias
    position_bias = encoder.compute_position_bias(hidden)
    tensors["mpnet.out"] = attention(hidden, attention_mask=padding, position_bias=position_bias)[0]
    tensors["buckets.mpnet"] = encoder.relative_position_bucket(r)
    write("t5", tensors, length=31)


if __name__ == "__main__":
    main()
