"""Make tests/fixtures/schemes/transformer_xl.safetensors with Transformer-XL's model, whole, over several segments.

    python scripts/maintenance/golden/transformer_xl.py

Original: transformers 4.57.6, models/deprecated/transfo_xl/modeling_transfo_xl.py. Environment: torch 2.13.0 on a CPU;
float32, since the original's masks overflow in float64. That release is the last to have the model, a port of
kimiyoung/transformer-xl pytorch/mem_transformer.py.

The port as it stands raises a TypeError in every forward (`type_as` with a dtype), so that method is replaced by what
was meant while it runs. It begins with memory of zeros, to which it attends; here it is given memory of no tokens, as
the original code begins.

    metadata "config"   JSON: d_model D, n_head H, n_layer, d_inner, memory M, eps, segments, and for every case
                        clamp_len and same_length
    <parameter>         weights of the model but its word embeddings, as they are named there
    inputs              (B, L, D), what the first layer gets: L tokens, the sum of the segments
    <case>.output       (B, L, D), of the last layer
    <case>.mems.<n>     (B, M, D), input of layer n for the last M tokens, after the last segment
"""

import contextlib

import torch
from originals import noise, randomise, write
from transformers.models.deprecated.transfo_xl import TransfoXLConfig, TransfoXLModel


B, D, H, LAYERS, INNER, EPS = 2, 24, 3, 3, 32, 1e-12
SIZES = {"d_model": D, "d_embed": D, "n_head": H, "d_head": D // H, "d_inner": INNER, "n_layer": LAYERS}
SEGMENTS, MEMORY = [7, 5, 9, 1, 6], 8
CASES = {
    "plain": {"clamp_len": -1, "same_length": False},
    "clamped": {"clamp_len": 4, "same_length": False},
    "same_length": {"clamp_len": -1, "same_length": True},
    "clamped_same_length": {"clamp_len": 3, "same_length": True},
}


@contextlib.contextmanager
def mended():
    """`Tensor.type_as(dtype=…)`, as the model calls it."""
    original = torch.Tensor.type_as
    torch.Tensor.type_as = lambda self, other=None, dtype=None: (
        original(self, other) if dtype is None else self.to(dtype)
    )
    try:
        yield
    finally:
        torch.Tensor.type_as = original


@torch.no_grad()
def main() -> None:
    inputs = torch.nn.functional.layer_norm(noise("inputs", B, sum(SEGMENTS), D), (D,), eps=EPS)
    tensors = {"inputs": inputs}
    for case, settings in CASES.items():
        config = TransfoXLConfig(
            vocab_size=10, cutoffs=[], **SIZES, mem_len=MEMORY, layer_norm_epsilon=EPS, untie_r=True, **settings
        )
        model = TransfoXLModel(config).eval()
        weights = randomise(model)
        mems = [torch.zeros(0, B, D)] * LAYERS
        outputs = []
        for segment in inputs.split(SEGMENTS, dim=1):
            with mended():
                found = model(inputs_embeds=segment, mems=mems)
            mems = found.mems
            outputs.append(found.last_hidden_state)
        tensors |= {name: tensor for name, tensor in weights.items() if "word_emb" not in name}
        tensors[f"{case}.output"] = torch.cat(outputs, dim=1)
        tensors |= {f"{case}.mems.{n}": memory.transpose(0, 1) for n, memory in enumerate(mems)}
    config = {"d_model": D, "n_head": H, "n_layer": LAYERS, "d_inner": INNER, "memory": MEMORY, "eps": EPS}
    write("transformer_xl", tensors, **config, segments=SEGMENTS, cases=CASES)


if __name__ == "__main__":
    main()
