"""Make tests/fixtures/schemes/tupe.safetensors with the encoder of TUPE.

    git clone https://github.com/guolinke/TUPE && git -C TUPE checkout 4c64ff748a7039be4918429f05bbb43d81357107
    python scripts/maintenance/golden/tupe.py --repo TUPE

Original: github.com/guolinke/TUPE, commit 4c64ff748a7039be4918429f05bbb43d81357107, fairseq/modules
(transformer_sentence_encoder.py). Environment: torch 2.13.0 on a CPU, in float64. Only four files of its fairseq are
run; the rest of that package needs compiled extensions and is not imported. The output projection of the attention is
set to the identity.

    metadata "config"    JSON: sizes, and for every case whether `rel_pos` is set
    <case>.pos.weight, .pos_ln.*, .pos_q_linear.*, .pos_k_linear.*, .relative_attention_bias.weight
    <case>.real                 (B, L), False where a key is padding
    <case>.bias                 (H, L, L), what is added to the scores of every layer
    <case>.<n>.in_proj_weight   (3D, D), in_proj_bias (3D,), of layer n
    <case>.<n>.hidden_states    (B, L, D), what goes into the attention of layer n
    <case>.<n>.context          (B, L, D), what its heads give
"""

import argparse
import importlib.util
import sys
import types
from pathlib import Path

import torch
from originals import write


CASES = {"A": {"rel_pos": False}, "R": {"rel_pos": True}}
B, L, D, H, P, LAYERS = 2, 13, 12, 3, 16, 2
FILES = {
    "layer_norm": "LayerNorm",
    "multihead_attention": "MultiheadAttention",
    "transformer_sentence_encoder_layer": "TransformerSentenceEncoderLayer",
    "transformer_sentence_encoder": "TransformerSentenceEncoder",
}


def load_encoder(repo: Path) -> type:
    """The encoder class, with as much of a package around it as its files ask for."""
    package, modules, utils = (types.ModuleType(name) for name in ("fairseq", "fairseq.modules", "fairseq.utils"))
    package.modules, package.utils = modules, utils
    utils.get_activation_fn = lambda name: getattr(torch.nn.functional, name)
    sys.modules |= {"fairseq": package, "fairseq.modules": modules, "fairseq.utils": utils}
    for file, wanted in FILES.items():
        spec = importlib.util.spec_from_file_location(
            f"fairseq.modules.{file}", repo / "fairseq" / "modules" / f"{file}.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        setattr(modules, wanted, getattr(module, wanted))
    return modules.TransformerSentenceEncoder


@torch.no_grad()
def run(encoder: torch.nn.Module) -> dict[str, torch.Tensor]:
    """One call of the encoder: its weights, and what its attention layers got and gave."""
    tensors = {name: tensor for name, tensor in encoder.named_parameters() if name.split(".")[0].startswith("pos")}
    if encoder.rel_pos:
        tensors["relative_attention_bias.weight"] = encoder.relative_attention_bias.weight
    tokens = torch.randint(2, 50, (B, L))
    tokens[1, -4:] = 1
    tensors["real"] = tokens != 1
    for number, layer in enumerate(encoder.layers):
        attention = layer.self_attn
        attention.out_proj.weight.copy_(torch.eye(D))
        attention.out_proj.bias.zero_()
        tensors[f"{number}.in_proj_weight"] = attention.in_proj_weight
        tensors[f"{number}.in_proj_bias"] = attention.in_proj_bias

        def keep(module, args, kwargs, result, number=number):
            tensors[f"{number}.hidden_states"] = args[0].transpose(0, 1)
            tensors[f"{number}.context"] = result[0].transpose(0, 1)
            tensors["bias"] = kwargs["attn_bias"][:H]

        attention.register_forward_hook(keep, with_kwargs=True)
    encoder(tokens)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repo", type=Path, required=True, help="a checkout of guolinke/TUPE")
    encoder_class = load_encoder(parser.parse_args().repo)
    torch.manual_seed(0)
    tensors = {}
    for case, settings in CASES.items():
        sizes = {"num_encoder_layers": LAYERS, "embedding_dim": D, "num_attention_heads": H, "max_seq_len": P}
        encoder = encoder_class(padding_idx=1, vocab_size=50, ffn_embedding_dim=32, **sizes, **settings)
        for parameter in encoder.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        tensors |= {f"{case}.{name}": tensor for name, tensor in run(encoder.double().eval()).items()}
    sizes = {"hidden_size": D, "num_attention_heads": H, "max_position_embeddings": P, "layers": LAYERS}
    write("tupe", tensors, **sizes, cases=CASES)


if __name__ == "__main__":
    main()
