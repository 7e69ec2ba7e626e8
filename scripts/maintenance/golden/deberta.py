"""Make tests/fixtures/schemes/deberta.safetensors with the attention layers of DeBERTa v1 and v2 in Transformers.

    python scripts/maintenance/golden/deberta.py

Original: transformers 5.23.0, models/deberta/modeling_deberta.py and models/deberta_v2/modeling_deberta_v2.py.
Environment: torch 2.13.0 on a CPU. Float64 but for the scale, which the originals keep in float32.

    metadata "config"          JSON: hidden_size D, num_attention_heads H, and for every case the version and what its
                               configuration sets
    <case>.rel_embeddings.weight            (2·span, D), and LayerNorm.* where the case normalises it
    <case>.self.<name>         the weights of the layer, as they are named there
    <case>.<L>.hidden_states   (B, L, D), for every length L of the case
    <case>.<L>.real            (B, L), False where a key is padding
    <case>.<L>.context         (B, L, D), what the heads give
    <case>.<L>.weights         (B, H, L, L)
"""

import torch
from originals import write
from transformers import DebertaConfig, DebertaV2Config
from transformers.models.deberta.modeling_deberta import DebertaEncoder
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder


B, D, H = 2, 12, 2
BOTH = ["c2p", "p2c"]
CASES = {
    "v1": {"version": 1, "max_relative_positions": 8, "pos_att_type": BOTH, "lengths": [6, 12]},
    "v1-c2p": {"version": 1, "max_relative_positions": 8, "pos_att_type": ["c2p"], "lengths": [12]},
    "v1-p2c": {"version": 1, "max_relative_positions": 8, "pos_att_type": ["p2c"], "lengths": [12]},
    "v2": {"version": 2, "max_relative_positions": 12, "position_buckets": 8, "pos_att_type": BOTH, "lengths": [14]},
    "v3": {
        "version": 2,
        "max_relative_positions": -1,
        "max_position_embeddings": 12,
        "position_buckets": 8,
        "pos_att_type": BOTH,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "lengths": [5, 14],
    },
}


@torch.no_grad()
def run(settings: dict) -> dict[str, torch.Tensor]:
    """The weights of one encoder, and what its first attention layer gives."""
    settings = {"relative_attention": True, "num_hidden_layers": 1, "intermediate_size": 32, **settings}
    lengths, version = settings.pop("lengths"), settings.pop("version")
    config_class, encoder_class = [(DebertaConfig, DebertaEncoder), (DebertaV2Config, DebertaV2Encoder)][version - 1]
    encoder = encoder_class(config_class(hidden_size=D, num_attention_heads=H, **settings)).eval()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    encoder = encoder.double()
    layer = encoder.layer[0].attention.self
    tensors = {f"self.{name}": tensor for name, tensor in layer.named_parameters()}
    tensors["rel_embeddings.weight"] = encoder.rel_embeddings.weight
    if "norm_rel_ebd" in settings:
        tensors |= {f"LayerNorm.{name}": tensor for name, tensor in encoder.LayerNorm.named_parameters()}
    for length in lengths:
        hidden = torch.randn(B, length, D, dtype=torch.float64)
        real = torch.ones(B, length, dtype=torch.bool)
        real[1, -2:] = False
        context, weights = layer(
            hidden,
            real[:, None, None, :],
            output_attentions=True,
            relative_pos=encoder.get_rel_pos(hidden),
            rel_embeddings=encoder.get_rel_embedding(),
        )
        found = {"hidden_states": hidden, "real": real, "context": context, "weights": weights}
        tensors |= {f"{length}.{name}": tensor for name, tensor in found.items()}
    return tensors


def main() -> None:
    torch.manual_seed(0)
    tensors = {}
    for case, settings in CASES.items():
        tensors |= {f"{case}.{name}": tensor for name, tensor in run(dict(settings)).items()}
    write("deberta", tensors, hidden_size=D, num_attention_heads=H, cases=CASES)


if __name__ == "__main__":
    main()
