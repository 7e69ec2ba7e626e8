"""GTE, NomicBERT and XLM-RoBERTa for flash attention: read and written beside Transformers' own classes.

The original layouts differ from Transformers' by config.json and prefixes alone (`original`). What Transformers'
classes lack, rotations past the trained length and weights of tasks, is compared with the equations of the original.
"""

import json

import pytest
import torch
import transformers
from folders import assert_not_converted, edit, edit_tensors
from oracles import tiny_model, tiny_sizes
from safetensors.torch import load_file, save_file
from wording import tokenizer

import hf_relpos
from hf_relpos import RelPosBertConfig, RelPosBertModel, convert, export_checkpoint, patch_transformers
from hf_relpos.conversion import ConversionError
from hf_relpos.conversion.inspect_checkpoint import inspect_checkpoint
from hf_relpos.families.loading import state_dict
from hf_relpos.families.rotary import rope_options


SIZES = tiny_sizes()
del SIZES["max_position_embeddings"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
BASES = {"gte": 160000.0, "nomic_bert": 1000.0, "jina_embeddings_v3": 20000.0}
CODE = {"auto_map": {"AutoConfig": "user/code--configuration.Config", "AutoModel": "user/code--modeling.Model"}}
# config.json of the original code of each: the published fields, most of them with the code's default.
NEW = {**SIZES, **CODE, "model_type": "new", "max_position_embeddings": 8192, "pad_token_id": 1, "type_vocab_size": 1}
NEW |= {"position_embedding_type": "rope", "rope_theta": 160000.0, "layer_norm_type": "layer_norm", "pack_qkv": True}
NEW |= dict.fromkeys(("logn_attention_scale", "unpad_inputs", "use_memory_efficient_attention"), False)
NOMIC = {**CODE, "model_type": "nomic_bert", "vocab_size": 50, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 32}
NOMIC |= {"n_positions": 8192, "max_trained_positions": 2048, "type_vocab_size": 2, "activation_function": "swiglu"}
NOMIC |= {"rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_scale_base": None}
NOMIC |= {"rotary_scaling_factor": 2, "layer_norm_epsilon": 1e-12, "scale_attn_weights": True}
NOMIC |= dict.fromkeys(("causal", "prenorm", "rotary_emb_interleaved", "use_rms_norm"), False)
NOMIC |= dict.fromkeys(("mlp_fc1_bias", "mlp_fc2_bias", "qkv_proj_bias"), False)
FLASH = {**SIZES, **CODE, "model_type": "xlm-roberta", "max_position_embeddings": 8194, "layer_norm_eps": 1e-5}
FLASH |= {"position_embedding_type": "rotary", "rotary_emb_base": 20000.0, "use_flash_attn": True}
FLASH |= {"pad_token_id": 1, "type_vocab_size": 1}
# Prefix of Transformers' classes and of tensors; the same in the original; config.json there; heads.
LAYOUTS = {
    "gte": ("Gte", "gte.", "New", "new.", NEW),
    "nomic_bert": ("NomicBert", "nomic_bert.", "NomicBert", "bert.", NOMIC),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", "roberta.", "XLMRoberta", "roberta.", FLASH),
}
LAYOUTS = {name: each for name, each in LAYOUTS.items() if hasattr(transformers, f"{each[0]}Model")}
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
IDS = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(0))
REAL = torch.arange(12) < torch.tensor([12, 7])[:, None]
INPUTS = {"input_ids": torch.where(REAL, IDS, 1), "attention_mask": REAL.long()}


def stock(layout, head, folder, **fields):
    """A stock model, every parameter random, saved in the folder."""
    prefix = LAYOUTS[layout][0]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**SIZES, initializer_range=0.3, num_labels=4, **fields)
    model = getattr(transformers, prefix + head)(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() == 1 else None
    model.save_pretrained(folder)
    return model


def original(layout, head, folder, **fields):
    """Rewrite a folder as the original code would have written it."""
    _, prefix, their_class, their_prefix, config = LAYOUTS[layout]
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace(prefix, their_prefix): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    labels = {"id2label": {str(number): f"LABEL_{number}" for number in range(4)}}
    saved = {**config, "architectures": [their_class + head], **labels, **fields}
    (folder / "config.json").write_text(json.dumps(saved))
    return folder


class Exact(torch.nn.Module):
    """Cosines and sines in float64; Transformers' classes have float32 whatever their dtype."""

    def __init__(self, base):
        super().__init__()
        self.frequencies = base ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)

    def forward(self, states, position_ids):
        angles = position_ids[..., None] * self.frequencies.repeat(2)
        return angles.cos(), angles.sin()


def ours(head, folder, dtype=torch.float32):
    return getattr(hf_relpos, f"RelPosBert{head}").from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def assert_same_states(theirs, folder):
    """What is read from the folder has the states of a stock model."""
    expected, found = (model(**INPUTS)[0][REAL] for model in (theirs, ours("Model", folder)))
    assert float((found - expected).abs().max()) <= TOLERANCE[torch.float32] * float(expected.abs().max())


@pytest.mark.parametrize("form", ["native", "original"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_outputs_and_gradients_are_those_of_the_stock_class(tmp_path, layout, head, form, dtype):
    theirs = stock(layout, head, tmp_path).to(dtype)
    if dtype == torch.float64:
        theirs.base_model.rotary_emb = Exact(BASES[layout])
    if form == "original":
        original(layout, head, tmp_path)
    model = ours(head, tmp_path, dtype)
    outputs, gradients = [], []
    for each in (theirs, model):
        found = each(**INPUTS)
        states = found[0][REAL] if found[0].dim() == 3 else found[0]
        (states * torch.linspace(-1, 1, states.numel(), dtype=dtype).view_as(states)).sum().backward()
        outputs.append(states.detach())
        embeddings = each.base_model.embeddings
        gradients.append([embeddings.word_embeddings.weight.grad, embeddings.LayerNorm.weight.grad])
    bound = TOLERANCE[dtype]
    assert float((outputs[0] - outputs[1]).abs().max()) <= bound * float(outputs[0].abs().max())
    for one, other in zip(*gradients, strict=True):
        assert float((one - other).abs().max()) <= 10 * bound * float(one.abs().max())


@pytest.mark.parametrize("layout", LAYOUTS.keys() & {"gte"})
def test_gte_fields_of_remote_code(tmp_path, layout):
    """snowflake-arctic-embed-m-v2.0: the type of Transformers' class, and the fields of Alibaba's code."""
    theirs = stock(layout, "Model", tmp_path)
    switches = {"unpad_inputs": "true", "use_memory_efficient_attention": "true", "rope_scaling": None}
    fields = {**NEW, **switches, "model_type": "gte", "architectures": ["GteModel"], "logn_attention_clip1": False}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert_same_states(theirs, tmp_path)
    report = inspect_checkpoint(tmp_path)
    assert report["elsewhere"].startswith("loads it as it is") and report["command"] and not report["refused"]


@pytest.mark.parametrize("form", ["native", "original"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_converted_and_written_back_bit_for_bit(tmp_path, layout, head, form):
    folder = tmp_path / "source"
    stock(layout, head, folder)
    if form == "original":
        original(layout, head, folder)
    report = convert(folder, tmp_path / "converted")
    assert report.position_embedding_type == "rope" and not report.of_kind("dropped") and not report.of_kind("folded")
    for number, source in enumerate((tmp_path / "converted", ours(head, folder))):
        name = export_checkpoint(source, tmp_path / f"exported{number}")
        assert name == LAYOUTS[layout][0 if form == "native" else 2] + head
        written = load_file(tmp_path / f"exported{number}" / "model.safetensors")
        stored = load_file(folder / "model.safetensors")
        assert written.keys() == stored.keys() and all(torch.equal(written[name], stored[name]) for name in stored)
        paths = (each / "config.json" for each in (tmp_path / f"exported{number}", folder))
        saved, config = (json.loads(path.read_text()) for path in paths)
        kept = config.keys() - {"auto_map", "dtype", "transformers_version", "architectures", "id2label"}
        assert {field: saved[field] for field in kept} == {field: config[field] for field in kept}
    assert [*source.config.converted_from] == sorted(source.config.converted_from)  # the same file in every process


@pytest.mark.parametrize("trusted", [None, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_patch_builds_ours_and_runs_no_code_of_the_checkpoint(tmp_path, layout, trusted):
    stock(layout, "ForSequenceClassification", tmp_path)
    with patch_transformers():
        native = transformers.AutoModel.from_pretrained(tmp_path)
        assert type(native).__module__.startswith("transformers.")
        folder = original(layout, "ForSequenceClassification", tmp_path)
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        assert type(config) is RelPosBertConfig
        for head in ("Model", "ForSequenceClassification"):
            auto = getattr(transformers, f"Auto{'' if head == 'Model' else 'Model'}{head}")
            model = auto.from_pretrained(folder, trust_remote_code=trusted)
            assert type(model).__name__ == f"RelPosBert{head}"
            expected = ours(head, folder)
            with torch.no_grad():
                assert torch.equal(model.eval()(**INPUTS)[0], expected(**INPUTS)[0])


@pytest.mark.parametrize("fields", [{"use_flash_attn": False}, {}], ids=["false", "absent"])
@pytest.mark.parametrize("auto_map", [True, False])
def test_flash_layout_inferred_from_tensors(tmp_path, fields, auto_map):
    """Without the field that the original code writes, through our class, the Auto classes and XLM-RoBERTa's own."""
    stock("jina_embeddings_v3", "ForSequenceClassification", tmp_path)
    folder = original("jina_embeddings_v3", "ForSequenceClassification", tmp_path)
    expected = ours("ForSequenceClassification", folder)
    edit(folder, **{"use_flash_attn": None} | fields | ({} if auto_map else {"auto_map": None}))
    models = [ours("ForSequenceClassification", folder)]
    with patch_transformers():
        for name in ("AutoModelForSequenceClassification", "XLMRobertaForSequenceClassification"):
            kind = getattr(transformers, name)
            model, info = kind.from_pretrained(folder, output_loading_info=True)
            assert type(model).__name__ == "RelPosBertForSequenceClassification" and not info["missing_keys"]
            models += [model.eval(), kind.from_pretrained(folder, num_labels=4).eval()]
    for model in models:
        assert model.config.max_position_embeddings == expected.config.max_position_embeddings
        with torch.no_grad():
            assert torch.equal(model(**INPUTS).logits, expected(**INPUTS).logits)


def test_patch_leaves_xlm_roberta(tmp_path):
    model = transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**SIZES))
    model.save_pretrained(tmp_path)
    with patch_transformers():
        for kind in (transformers.AutoModel, transformers.XLMRobertaModel):
            assert type(kind.from_pretrained(tmp_path)) is transformers.XLMRobertaModel
    assert "from_pretrained" not in vars(transformers.XLMRobertaModel)


@pytest.mark.ecosystem
def test_sentence_transformers_under_the_patch(tmp_path, layout="nomic_bert"):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    stock(layout, "ForSequenceClassification", tmp_path)
    tokenizer(tmp_path).save_pretrained(tmp_path)
    original(layout, "ForSequenceClassification", tmp_path, id2label={"0": "LABEL_0"})
    with patch_transformers():
        encoder = sentence_transformers.SentenceTransformer(str(tmp_path), trust_remote_code=True, device="cpu")
        assert type(encoder[0].auto_model) is RelPosBertModel and encoder.encode("a b c").shape == (24,)


def angles(options, length=8, size=8, rows=1):
    """Angle of each plane at position 1, from a model's rotation of unit vectors."""
    model = tiny_model(RelPosBertModel, "rope", hidden_size=3 * size, num_attention_heads=3, position_options=options)
    scheme = model.encoder.layer[0].attention.self.distance_embedding
    context = hf_relpos.schemes.AttentionContext(length, length)
    unit = torch.zeros(1, 3, 1, size, dtype=torch.float64)
    unit[..., : size // 2] = 1
    turned = scheme(context).rotate(unit, torch.ones(1))
    return torch.atan2(turned[0, 0, 0, size // 2 :], turned[0, 0, 0, : size // 2])


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_ntk_of_the_original_code_of_gte(factor):
    """base·f, and frequencies divided by f^(2/d) (Alibaba-NLP/new-impl, NTKScalingRotaryEmbedding)."""
    config = {"hidden_size": 24, "num_attention_heads": 3, "rope_theta": 20000.0}
    options = rope_options({**config, "rope_scaling": {"type": "ntk", "factor": factor}}, 10000.0)
    expected = (20000.0 * factor) ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8) / factor ** (2 / 8)
    torch.testing.assert_close(angles(options), expected, rtol=1e-6, atol=1e-9)


SCALED = {
    "yarn": {"attention_factor": 1.3},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0] * 4},
    "proportional": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("outer", [False, True], ids=["", "trained length outside"])
@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaled_rotations_are_those_of_the_stock_class(tmp_path, layout, kind, outer):
    scaled = {"rope_type": kind, "rope_theta": 500.0, **SCALED[kind], "original_max_position_embeddings": 10}
    if kind != "proportional":
        scaled["factor"] = 4.0
    theirs = stock(layout, "Model", tmp_path, rope_parameters=scaled)
    if outer:
        saved = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
        trained = saved.pop("original_max_position_embeddings")
        edit(tmp_path, rope_parameters=saved, original_max_position_embeddings=trained)
    assert_same_states(theirs, tmp_path)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("length", [16, 17, 40])
def test_dynamic_rotations_of_nomic(length):
    """Past the trained length base·(f·L / trained − (f − 1))^(d / (d − 2)) (nomic-bert-2048)."""
    options = {"pairing": "half", "rope_parameters": {**DYNAMIC, "rope_theta": 1000.0}}
    base = 1000.0 * max(1.0, 2.0 * length / 16 - 1.0) ** (8 / 6)
    expected = base ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(angles(options, length), expected, rtol=1e-6, atol=1e-9)


def test_a_row_is_rotated_for_the_longest_one_beside_it():
    """As in the original, with its padding or without; shorter batches are not changed."""
    options = {"pairing": "half", "rope_parameters": DYNAMIC}
    model = tiny_model(RelPosBertModel, "rope", position_options=options).double()
    plain = tiny_model(RelPosBertModel, "rope", position_options={"pairing": "half"}).double()
    plain.load_state_dict(model.state_dict())
    real = torch.arange(40) < torch.tensor([40, 12, 5])[:, None]
    ids = torch.randint(1, 50, real.shape) * real
    gaps = {"position_ids": (2 * torch.arange(40)).expand(3, 40)}  # each group of rows has terms of its own
    with torch.no_grad():
        padded, *both = (model(ids, attention_mask=real.long(), **more).last_hidden_state for more in ({}, gaps))
        model.config.unpad_inputs = True
        both += (model(ids, attention_mask=real.long(), **more).last_hidden_state for more in (gaps, {}))
        short = model(ids[1:, :12], attention_mask=real[1:, :12].long()).last_hidden_state
        expected = plain(ids[1:, :12], attention_mask=real[1:, :12].long()).last_hidden_state
    for one, other in ((padded, both[2]), both[:2]):
        assert torch.allclose(one[real], other[real], rtol=0, atol=1e-11)
    assert torch.allclose(short[real[1:, :12]], expected[real[1:, :12]], rtol=0, atol=1e-12)
    assert (padded[1:, :12] - short)[real[1:, :12]].abs().max() > 1e-3


def flash_tensors(folder, **config):
    """A checkpoint with LoRA weights of two tasks, as jina-embeddings-v3 has them."""
    stock("jina_embeddings_v3", "Model", folder)
    changed = ("embeddings.word_embeddings", "encoder.layers.0.mixer.Wqkv", "encoder.layers.1.mlp.fc2")
    with edit_tensors(folder) as tensors:
        for name in changed:
            weight = tensors.pop(f"{name}.weight")
            out, into = weight.shape if "embeddings" not in name else weight.shape[::-1]
            tensors[f"{name}.parametrizations.weight.original"] = weight
            a, b = torch.randn(2, 4, into), torch.randn(2, out, 4)
            if "embeddings" in name:  # a table is looked up by row: x A B
                a, b = a.mT.contiguous(), b.mT.contiguous()
            tensors[f"{name}.parametrizations.weight.0.lora_A"] = a
            tensors[f"{name}.parametrizations.weight.0.lora_B"] = b
    fields = {"lora_adaptations": ["query", "passage"], "lora_rank": 4, "lora_alpha": 2, **config}
    (folder / "config.json").write_text(json.dumps({**FLASH, **fields, "architectures": ["XLMRobertaModel"]}))
    return tensors, changed


@pytest.mark.parametrize("task", [None, "query", "passage"])
def test_weights_of_a_task_are_merged(tmp_path, task):
    """In float32, whatever the dtype of the file."""
    tensors, changed = flash_tensors(tmp_path, lora_task=task)
    with edit_tensors(tmp_path) as stored:
        stored.update({name: tensor.bfloat16() for name, tensor in tensors.items()})
    tensors = {name: tensor.float() for name, tensor in stored.items()}
    _, found = state_dict(tmp_path, "BertModel", {}, by_tensors=False)
    names = ("embeddings.word_embeddings", "encoder.layer.0.attention.self.key", "encoder.layer.1.output.dense")
    for name, our_name in zip(changed, names, strict=True):
        weight = tensors[f"{name}.parametrizations.weight.original"]
        if task is not None:
            number = ["query", "passage"].index(task)
            a, b = (tensors[f"{name}.parametrizations.weight.0.lora_{part}"][number] for part in "AB")
            weight = weight + 2 / 4 * (a @ b if "embeddings" in name else b @ a)
        expected = weight[24:48] if "Wqkv" in name else weight
        torch.testing.assert_close(found[f"{our_name}.weight"].float(), expected)
    assert ours("Model", tmp_path)(**INPUTS).last_hidden_state.isfinite().all()
    with pytest.raises(ConversionError, match="lora_adaptations"):
        export_checkpoint(ours("Model", tmp_path), tmp_path.with_name("out"))


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_absolute_positions_are_those_of_xlm_roberta(tmp_path, head):
    """As in jina-reranker-v2: the layout of flash attention around the positions of XLM-RoBERTa."""
    config = transformers.XLMRobertaConfig(**SIZES, max_position_embeddings=20, num_labels=1, initializer_range=0.3)
    config.type_vocab_size = 1
    theirs = getattr(transformers, f"XLMRoberta{head}")(config).eval()
    theirs.save_pretrained(tmp_path)
    stored, tensors = load_file(tmp_path / "model.safetensors"), {}
    names = {
        "encoder.layer.": "encoder.layers.",
        "attention.output.dense": "mixer.out_proj",
        "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "output.LayerNorm": "norm2",
        "embeddings.LayerNorm": "emb_ln",
    }
    for name, tensor in stored.items():
        if ".self.query." in name:
            parts = [stored[name.replace("query", part)] for part in ("query", "key", "value")]
            name, tensor = name.replace("attention.self.query", "mixer.Wqkv"), torch.cat(parts)
        elif ".self." in name:
            continue
        for old, new in names.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    fields = {"position_embedding_type": "absolute", "max_position_embeddings": 20, "layer_norm_eps": 1e-12}
    saved = {**FLASH, **fields, "architectures": [f"XLMRoberta{head}"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    exported = tmp_path.with_name(f"exported {head}")
    export_checkpoint(ours(head, tmp_path), exported)
    mask = REAL if head == "Model" else slice(None)
    for folder in (tmp_path, exported):
        with torch.no_grad():
            expected, found = theirs(**INPUTS)[0], ours(head, folder)(**INPUTS)[0]
        assert float((expected[mask] - found[mask]).abs().max()) <= 1e-5


REFUSED = {
    "rms norm": ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type = 'rms_norm'"),
    "logn": ("gte", {"logn_attention_scale": True}, "logn_attention_scale = True"),
    "mixed_b": ("gte", {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}}, "mixed_b"),
    "stateful": ("gte", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'.*'yarn'.*are read"),
    "packed": ("gte", {"pack_qkv": False}, r"pack_qkv = False, .*layer\.0\.attention\.qkv_proj"),
    "absolute": ("gte", {"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute'"),
    "prenorm": ("nomic_bert", {"prenorm": True}, "prenorm = True"),
    "activation": ("nomic_bert", {"activation_function": "gelu"}, "activation_function = 'gelu'"),
    "experts": ("nomic_bert", {"num_experts": 8}, "num_experts = 8: .*starts new feed-forward parts without an error"),
    "relative": ("jina_embeddings_v3", {"position_embedding_type": "relative_key"}, "relative_key"),
    "act": ("jina_embeddings_v3", {"hidden_act": "relu"}, "hidden_act = 'relu': .*correct config.json.*'gelu_new'"),
    "task": ("jina_embeddings_v3", {"lora_task": "a", "lora_adaptations": ["b"]}, "lora_task = 'a' .* 'b'"),
}
REFUSED = {name: each for name, each in REFUSED.items() if each[0] in LAYOUTS}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(tmp_path, case):
    layout, fields, words = REFUSED[case]
    folder = tmp_path / "source"
    stock(layout, "Model", folder)
    original(layout, "Model", folder, **fields)
    assert_not_converted(folder, tmp_path / "out", match=words)
    with pytest.raises(ValueError, match=words):
        ours("Model", folder)


SPOILT = [
    ("attn.out_proj.bias", 0.0, r"qkv_proj_bias = False, .*\.0\.attn\.out_proj\.bias; correct config.json"),
    ("attn.Wqkv.weight", torch.nan, r"\.0\.attn\.Wqkv\.weight \(here .*query\.weight\) holds .* NaN"),
]


@pytest.mark.parametrize("name, value, words", SPOILT)
def test_convert_error_names_the_tensor_of_the_file(tmp_path, name, value, words):
    folder = tmp_path / "source"
    stock("nomic_bert", "Model", folder)
    with edit_tensors(original("nomic_bert", "Model", folder)) as tensors:
        weight = next(each for each in tensors if each.endswith(".0.attn.Wqkv.weight"))
        tensors[weight.replace("attn.Wqkv.weight", name)] = torch.full_like(tensors[weight], value)
    with pytest.raises(ConversionError, match=words):
        convert(folder, tmp_path / "out")


def test_a_bias_that_was_trained_is_not_left_out(tmp_path):
    stock("nomic_bert", "Model", tmp_path)
    model = ours("Model", original("nomic_bert", "Model", tmp_path))
    model.encoder.layer[0].output.dense.bias.data.fill_(1.0)
    with pytest.raises(ConversionError, match=r"output\.dense\.bias was trained"):
        export_checkpoint(model, tmp_path / "out")
