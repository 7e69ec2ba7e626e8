"""Make tests/fixtures/gated: tiny checkpoints of MosaicBERT and JinaBERT v2, and what their own code returns for them.

Originals: github.com/mosaicml/examples, commit daddaeff7a535273ff984b0134da4839c70a45b3, examples/benchmarks/bert/src,
which DNABERT-2 runs as well; and the code that the Hub repositories of JinaBERT v2 name in `auto_map`, as kept in
github.com/veya2ztn/sci-bert-finetune, commit 09cc4c7e14d1d75318c5cb3660e0e38ba5542509, models/jinabert. Environment:
Python 3.11, torch 2.13.0 on a CPU, transformers 4.57.6, einops 0.8.2.

    OMP_NUM_THREADS=1 python scripts/maintenance/golden/gated.py --mosaic MOSAIC/bert/src --jina PATH/models

Sizes: D = 24, two layers, intermediate 32, 50 words; B = 2, L = 12, the second row padded after 7; numbers of heads of
which most are no power of two. Weights are float32 normal noise seeded by their names; the originals ran in
float64, their slopes included. <folder>/ holds config.json and the weights under their original names
(model.safetensors; of mosaic-mlm pytorch_model.bin, as DNABERT-2 has it), and io.safetensors:
    input.<argument>       input_ids, attention_mask, token_type_ids (B, L)
    output.<field>         last_hidden_state (zero at padding in MosaicBERT), pooler_output, logits
    gradient.<parameter>   only of the masked language models: of the sum over real tokens of `logits` times noise,
                           which is `cotangent`

Before a folder is done, the script checks that the slopes of other heads move every output by more than 1e-2.
"""

import argparse
import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import torch
import transformers
from originals import check_meaningful, check_transformers, noise, padded_batch
from safetensors.torch import save_file


TARGET = Path(__file__).parents[3] / "tests" / "fixtures" / "gated"
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
}
JINA = {"position_embedding_type": "alibi", "feed_forward_type": "geglu", "attn_implementation": "eager"}
MOSAIC = {"alibi_starting_size": 16}
# folder to original, its class, and fields of its configuration
FOLDERS = {
    "jina-model": ("jina", "JinaBertModel", {**JINA, "num_attention_heads": 3}),
    "jina-mlm": ("jina", "JinaBertForMaskedLM", {**JINA, "num_attention_heads": 6}),
    "jina-reranker": (
        "jina",
        "JinaBertForSequenceClassification",
        {**JINA, "num_attention_heads": 12, "num_labels": 1},
    ),
    "jina-reglu": ("jina", "JinaBertModel", {**JINA, "feed_forward_type": "reglu", "num_attention_heads": 4}),
    "mosaic-model": ("mosaic", "BertModel", {**MOSAIC, "num_attention_heads": 12}),
    "mosaic-mlm": ("mosaic", "BertForMaskedLM", {**MOSAIC, "num_attention_heads": 3}),
    "mosaic-classification": (
        "mosaic",
        "BertForSequenceClassification",
        {**MOSAIC, "num_attention_heads": 6, "num_labels": 3},
    ),
}
PICKLED = ("mosaic-mlm",)


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Noise that is large enough for every parameter to matter."""
    for name, parameter in model.named_parameters():
        mean = 1.0 if name.lower().replace("_", "").endswith("layernorm.weight") else 0.0
        parameter.copy_((mean + noise(name.removeprefix("bert."), *parameter.shape, scale=0.25)).float())


def outputs(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every output by its name; MosaicBERT's encoder returns a pair."""
    found = model(**inputs)
    if isinstance(found, tuple):
        return dict(zip(("last_hidden_state", "pooler_output"), found, strict=True))
    return {name: value for name, value in found.items() if value is not None}


def write(folder: Path, architecture: type, config: transformers.PretrainedConfig) -> None:
    """One folder."""
    folder.mkdir(parents=True)
    model = architecture(config).eval()
    fill(model)
    inputs = padded_batch(SIZES["vocab_size"])
    found = outputs(model, inputs)
    parts = {"input": inputs, "output": found}
    tensors = {f"{part}.{name}": t.detach().contiguous() for part, group in parts.items() for name, t in group.items()}
    if folder.name.endswith("-mlm"):
        cotangent = noise("cotangent", *found["logits"].shape).double() * inputs["attention_mask"][..., None]
        (found["logits"] * cotangent).sum().backward()
        tensors |= {f"gradient.{name}": parameter.grad for name, parameter in model.named_parameters()}
        tensors["cotangent"] = cotangent
    encoder = getattr(model, "bert", model).encoder
    encoder.alibi = encoder.alibi.flip(1)
    with torch.no_grad():
        check_meaningful(folder.name, found, outputs(model, inputs), "the slopes of other heads")
    save_file(tensors, folder / "io.safetensors")
    weights = {name: tensor.float().clone() for name, tensor in model.state_dict().items()}
    if folder.name in PICKLED:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    saved = {**config.to_diff_dict(), "architectures": [architecture.__name__]}
    for name in ("attn_implementation", "transformers_version"):
        saved.pop(name, None)
    (folder / "config.json").write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")


def load_mosaic(source: Path) -> tuple[ModuleType, type]:
    sys.path.insert(0, str(source))
    return importlib.import_module("bert_layers"), importlib.import_module("configuration_bert").BertConfig


def load_jina(source: Path) -> tuple[ModuleType, type]:
    sys.path.insert(0, str(source))
    sys.modules.setdefault("flash_attn", None)  # type: ignore[arg-type]  # tried by the original, and not needed
    package = importlib.import_module("jinabert.modeling_bert")
    return package, package.JinaBertConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mosaic", type=Path, required=True)
    parser.add_argument("--jina", type=Path, required=True)
    arguments = parser.parse_args()
    check_transformers()
    torch.set_default_dtype(torch.float64)
    originals = {"mosaic": load_mosaic(arguments.mosaic), "jina": load_jina(arguments.jina)}
    shutil.rmtree(TARGET, ignore_errors=True)
    for name, (original, architecture, fields) in FOLDERS.items():
        module, config_class = originals[original]
        write(TARGET / name, getattr(module, architecture), config_class(**SIZES, **fields))


if __name__ == "__main__":
    main()
