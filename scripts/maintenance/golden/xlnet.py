"""Make tests/fixtures/schemes/xlnet.safetensors with the XLNet attention layer of Transformers.

    python scripts/maintenance/golden/xlnet.py

Original: transformers 5.23.0, models/xlnet/modeling_xlnet.py (the same in 4.57.6). Environment: torch 2.13.0 on a CPU.
Float64 but for the sinusoids, which the original computes in float32.

    metadata "config"    JSON: d_model D, n_head H, and for every case mlen M and clamp_len
    r, r_w_bias, r_r_bias, r_s_bias, seg_embed, q, k, v     the weights, as they are named and shaped there
    <case>.hidden_states     (B, M + L, D), the memory first
    <case>.token_type_ids    (B, M + L); 0 in the memory, as XLNet takes it
    <case>.real              (B, M + L), False where a key is padding
    <case>.context           (B, L, D), what the heads give
    <case>.attn_prob         (B, H, L, M + L)
"""

import torch
from originals import write
from torch import nn
from transformers import XLNetConfig, XLNetModel


CASES = {
    "plain": {"mlen": 0, "clamp_len": -1},
    "memory": {"mlen": 4, "clamp_len": -1},
    "clamped": {"mlen": 0, "clamp_len": 3},
}
B, L, D, H = 2, 9, 24, 3


@torch.no_grad()
def run(layer, settings: dict) -> dict[str, torch.Tensor]:
    """One call of the layer, its own masking included."""
    memory, total = settings["mlen"], settings["mlen"] + L
    hidden = torch.randn(B, total, D, dtype=torch.float64)
    types = torch.tensor([[0] * 4 + [1] * 5, [0] * 6 + [1] * 3])
    types = nn.functional.pad(types, (memory, 0))
    real = torch.ones(B, total, dtype=torch.bool)
    real[1, -2:] = False
    model = XLNetModel(XLNetConfig(vocab_size=50, d_model=D, n_layer=1, n_head=H, d_inner=32, **settings))
    position = model.relative_positional_encoding(L, total, bsz=B).double()
    different = (types[:, memory:, None] != types[:, None, :]).long()
    found = []
    core = layer.rel_attn_core
    layer.rel_attn_core = lambda *args, **kwargs: found.append(core(*args, **kwargs)) or found[-1]
    layer(
        hidden[:, memory:].transpose(0, 1),
        None,
        (~real)[:, None, :].expand(B, L, total).permute(1, 2, 0)[..., None].double(),
        None,
        position,
        nn.functional.one_hot(different, 2).permute(1, 2, 0, 3).double(),
        mems=hidden[:, :memory].transpose(0, 1) if memory else None,
        output_attentions=True,
    )
    layer.rel_attn_core = core
    context, weights = found[0]
    return {
        "hidden_states": hidden,
        "token_type_ids": types,
        "real": real,
        "context": context.transpose(0, 1).flatten(2),
        "attn_prob": weights.permute(2, 3, 0, 1),
    }


def main() -> None:
    torch.manual_seed(0)
    config = XLNetConfig(vocab_size=50, d_model=D, n_layer=1, n_head=H, d_inner=32, initializer_range=0.2, dropout=0.0)
    layer = XLNetModel(config).layer[0].rel_attn.double().eval()
    wanted = ("q", "k", "v", "r", "r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")
    tensors = {name: layer.get_parameter(name).detach() for name in wanted}
    for case, settings in CASES.items():
        tensors |= {f"{case}.{name}": tensor for name, tensor in run(layer, settings).items()}
    write("xlnet", tensors, d_model=D, n_head=H, cases=CASES)


if __name__ == "__main__":
    main()
