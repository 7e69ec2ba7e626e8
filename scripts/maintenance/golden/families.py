"""Make tests/fixtures/families: tiny checkpoints of relative models with a body like BERT's, and what they return.

Original: transformers 4.57.6, models/{deprecated/nezha,roberta,electra,ernie}, eager attention. Environment: Python
3.11, torch 2.13.0 on a CPU.

    OMP_NUM_THREADS=1 python scripts/maintenance/golden/families.py

Sizes: D = 16, H = 2, two layers, intermediate 24, 40 words, P = 12 positions (RoBERTa 14); B = 2, L = 12, the second
row padded after 7. Weights are normal noise seeded by their names. <folder>/ holds config.json and model.safetensors
as `save_pretrained` wrote them, and io.safetensors:
    input.<argument>      input_ids, attention_mask, token_type_ids (B, L)
    output.<field>        whatever the class returns without labels; output.hidden_states.<n> (B, L, D), n = 0, 1, 2

nezha-original is nezha as the code of its authors names it: tensors `bert.*`, model_type "bert" and
use_relative_position. Its outputs are those of nezha. ernie-relative_key has task types and is run without any.

Before a folder is done, the script checks that other positions move every output by more than 1e-2.
"""

import json
import shutil
from pathlib import Path

import torch
import transformers
from originals import check_meaningful, check_transformers, noise, padded_batch
from safetensors.torch import load_file, save_file


TARGET = Path(__file__).parents[3] / "tests" / "fixtures" / "families"
SIZES = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 12,
}
ROBERTA = {"type_vocab_size": 1, "max_position_embeddings": 14, "layer_norm_eps": 1e-5}
FOLDERS = {
    "nezha": ("NezhaForPreTraining", {"max_relative_position": 3}),
    "roberta-relative_key": ("RobertaForMaskedLM", ROBERTA),
    "roberta-relative_key_query": ("RobertaForSequenceClassification", {**ROBERTA, "num_labels": 3}),
    "electra-relative_key": ("ElectraForMaskedLM", {"embedding_size": 16}),
    "electra-relative_key_query": ("ElectraForPreTraining", {"embedding_size": 16}),
    "ernie-relative_key": ("ErnieForPreTraining", {"use_task_id": True}),
    "ernie-relative_key_query": ("ErnieForMaskedLM", {}),
}


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Noise that is large enough for every parameter to matter."""
    for name, parameter in model.named_parameters():
        mean = 1.0 if name.lower().replace("_", "").endswith("layernorm.weight") else 0.0
        scale = 0.7 if "distance_embedding" in name else 0.25
        parameter.copy_(mean + noise(name.split(".", 1)[1], *parameter.shape, scale=scale))


@torch.no_grad()
def outputs(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every output under a flat name."""
    flat = {}
    for field, value in model(**inputs, output_hidden_states=True).items():
        parts = {f"{field}.{n}": part for n, part in enumerate(value)} if isinstance(value, tuple) else {field: value}
        flat |= {name: part.contiguous().clone() for name, part in parts.items()}
    return flat


def write(folder: Path, architecture: str, fields: dict) -> None:
    """One folder; the checkpoint is loaded again before it is run."""
    head = getattr(transformers, architecture, None)
    if head is None:
        from transformers.models.deprecated import nezha

        head = getattr(nezha, architecture)
    kind = folder.name.partition("-")[2]
    config = head.config_class(**{**SIZES, **fields, **({"position_embedding_type": kind} if kind else {})})
    model = head(config)
    fill(model)
    model.save_pretrained(folder)
    model, info = head.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    if any(info.values()):
        raise SystemExit(f"{folder}: {info}")
    model = model.eval()
    inputs = padded_batch(config.vocab_size, config.type_vocab_size, config.pad_token_id)
    found = outputs(model, inputs)
    parts = {"input": inputs, "output": found}
    tensors = {f"{part}.{name}": tensor for part, group in parts.items() for name, tensor in group.items()}
    save_file(tensors, folder / "io.safetensors")
    # wrong positions change every output but the embeddings
    nezha = folder.name == "nezha"
    wrong = {"max_relative_position": 64} if nezha else {"position_embedding_type": "absolute"}
    other = outputs(head.from_pretrained(folder, attn_implementation="eager", **wrong).eval(), inputs)
    del found["hidden_states.0"]
    check_meaningful(folder.name, found, other, str(wrong))


def original_layout(folder: Path, source: Path) -> None:
    """NEZHA under the names of its authors."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors = {name.replace("nezha.", "bert."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    kept = (*SIZES, "max_relative_position", "hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob",
            "type_vocab_size", "initializer_range")  # fmt: skip
    config = {name: config[name] for name in kept}
    config |= {"architectures": ["BertForPreTraining"], "model_type": "bert", "use_relative_position": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    shutil.copyfile(source / "io.safetensors", folder / "io.safetensors")


def main() -> None:
    check_transformers()
    shutil.rmtree(TARGET, ignore_errors=True)
    for name, (architecture, fields) in FOLDERS.items():
        write(TARGET / name, architecture, fields)
    original_layout(TARGET / "nezha-original", TARGET / "nezha")


if __name__ == "__main__":
    main()
