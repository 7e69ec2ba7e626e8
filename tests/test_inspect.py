"""`inspect` on what people load: every class of text models of Transformers, broken files, NEZHA, own code."""

import json
import struct

import pytest
import torch
import transformers
from errors import raises
from oracles import tiny_sizes
from safetensors.torch import load_file, save_file
from test_legacy import NEZHA, nezha_folder
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

from hf_relpos.checkpoints.errors import ConversionError
from hf_relpos.conversion.inspect_checkpoint import inspect_checkpoint
from hf_relpos.families.registry import FAMILIES


ENCODERS = sorted({*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES})
DECODERS = sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*ENCODERS})
SIZES = tiny_sizes(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
WEIGHTS = "model.safetensors"
LARGEST = 2**31  # elements in a file that the system can map


def write_shapes(folder, shapes):
    """Weights of zeros that take no space: a header, and a hole in the file."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    content = json.dumps(header).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(8 + len(content) + end)


@pytest.mark.parametrize("kind", [*ENCODERS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in DECODERS)])
def test_inspect_every_text_model_of_transformers(kind, tmp_path):
    """By its default configuration, with the weights of its class; with any where it makes no model, or a huge one."""
    config, shapes = PreTrainedConfig(model_type=kind), {"weight": (1,)}
    try:
        config = CONFIG_MAPPING[kind]()
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    except Exception:  # such as no vocab_size, or defaults that contradict each other
        model = None
    else:
        unique = {id(value): name for name, value in reversed(model.state_dict(keep_vars=True).items())}
        own = {name: value.shape for name, value in model.state_dict().items() if name in unique.values()}
        config.architectures = [type(model).__name__]
        if is_whole := sum(map(torch.Size.numel, own.values())) < LARGEST:
            shapes = own
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(config.to_json_string()), "model_type": kind}))
    write_shapes(tmp_path, shapes)
    found = inspect_checkpoint(tmp_path)
    assert found["family"] == kind and bool(found["command"] or found["refused"]) == (kind in FAMILIES)
    assert "has no class" not in found["elsewhere"] and found["positions"]
    if kind in ("qwen3", "modernbert"):
        assert found["positions"].startswith("rope: ")
    if model is None:
        assert "cannot be built from config.json" in found["elsewhere"]
    elif is_whole:
        faster = "; used as an encoder, hf_relpos.optimize(model) may make it faster on a CPU"
        if kind in ENCODERS or kind in FAMILIES:
            faster = "; hf_relpos.optimize(model) makes that faster on a CPU"
        assert found["elsewhere"] == f"loads it as it is{faster}"
        (tmp_path / "modules.json").write_text("[]")  # of a sentence encoder, such as Qwen3-Embedding
        assert "optimize" in inspect_checkpoint(tmp_path)["elsewhere"]


def test_inspect_other_tensors_than_the_class_has(tmp_path):
    """Experts, other sizes, layers in the layout of flash attention, a type that nobody knows."""
    config = transformers.NomicBertConfig(**SIZES, pad_token_id=0)
    transformers.NomicBertModel(config).save_pretrained(tmp_path)
    saved, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / WEIGHTS)

    def written(tensors, **fields):
        save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps({**saved, **fields}))
        return inspect_checkpoint(tmp_path)

    found = written(tensors, rotary_scaling_factor=2, max_trained_positions=2048)
    assert "right up to 2,048 tokens" in found["elsewhere"]
    experts = {name.replace("mlp.fc", "mlp.experts.fc"): tensor for name, tensor in tensors.items()}
    found = written(experts, num_experts=8)
    assert "starts 3 of" in found["elsewhere"] and "num_experts = 8" in found["refused"] and not found["command"]
    assert "raises an error: sizes" in written(tensors, hidden_size=16)["elsewhere"]
    flash = {name.replace("attn.", "mixer."): tensor for name, tensor in tensors.items()}
    flash["encoder.layers.0.mlp.fc1.weight"] = torch.ones(3)
    found = written(flash, model_type="xlm-roberta", hidden_act="gelu")
    assert found["family"] == "xlm_roberta_flash" and "at random" in found["elsewhere"]
    with raises(ConversionError, "nobody_knows"):
        written(tensors, model_type="nobody_knows")
    found = written(tensors, model_type="nobody_knows", auto_map={"AutoModel": "modeling.Model"})
    assert "has no class" in found["elsewhere"] and "--trust-remote-code" in found["elsewhere"]


def test_inspect_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "a/base"}')
    with raises(ConversionError, "adapter (LoRA) of a/base", "merge it first", "merge_and_unload"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize("form", NEZHA)
def test_inspect_nezha(form, tmp_path):
    found = inspect_checkpoint(nezha_folder(form, tmp_path / "n"))  # not a name that Transformers takes for a type
    words = "has no class" if form in ("class", "Huawei's") else "position_embeddings"
    assert words in found["elsewhere"] and "as it is" not in found["elsewhere"]
    if form.startswith("BERT's"):
        assert "NEZHA" in found["refused"] and not found["command"]
    else:
        assert found["family"] == "nezha"
