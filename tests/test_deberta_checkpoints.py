"""DeBERTa v1, v2 and v3: every head and option of Transformers' own classes, read, converted and written back.

The oracle are those classes, in float64. They round the scale of the scores to float32, and v1 all that it normalises;
`stock.in_float64` lets them compute both in float64. Queries at padding attend to nothing there, so outputs are
compared at real tokens.
"""

import filecmp
import json
import warnings

import pytest
import torch
import transformers
from errors import raises
from folders import assert_not_converted, contents, edit, edit_tensors
from oracles import tiny_sizes
from safetensors.torch import load_file
from selection import with_full
from stock import errors, in_float64, random_model
from transformers import BertTokenizer, DebertaConfig, DebertaV2Config
from transformers.models.deberta_v2 import modeling_deberta_v2

import hf_relpos
from hf_relpos import (
    RelPosBertConfig,
    RelPosBertForSequenceClassification,
    RelPosBertModel,
    convert,
    export_checkpoint,
)
from hf_relpos.conversion import ConversionError
from hf_relpos.families.registry import FAMILIES
from hf_relpos.schemes.deberta import log_bucket


WORDS, POSITIONS = 40, 14
CONFIGS = {"deberta": DebertaConfig, "deberta-v2": DebertaV2Config}
KINDS = [None, "c2p", "p2c", "c2p|p2c"]
HEADS = {name: FAMILIES[name].suffixes for name in CONFIGS}
BOTH = {"relative_attention": True, "pos_att_type": "c2p|p2c", "position_biased_input": False}
# position_biased_input, type_vocab_size, embedding_size, side of padding, rows of the batch
INPUTS = [(False, 0, 24, "left", 3), (False, 2, 24, "right", 1), (True, 0, 10, "right", 2), (True, 2, 24, "left", 2)]
V3 = {**BOTH, "share_att_key": True, "position_buckets": 6, "norm_rel_ebd": "layer_norm"}


def saved(folder, kind, suffix="Model", **fields):
    """A tiny stock model, every parameter of which has an effect where it can, and the folder that it is saved in."""
    sizes = tiny_sizes(vocab_size=WORDS, intermediate_size=20, max_position_embeddings=POSITIONS)
    return random_model(kind, FAMILIES[kind].class_prefixes[0] + suffix, folder, **{**sizes, **fields}), folder


def read(folder, suffix="Model", **arguments):
    return getattr(hf_relpos, f"RelPosBert{suffix}").from_pretrained(folder, **arguments).eval()


def batch(suffix, length=9, rows=2, side="right"):
    """Inputs, the last row padded, and the mask of what is compared."""
    shape = (rows, 2, length) if suffix == "ForMultipleChoice" else (rows, length)
    mask = torch.ones(shape, dtype=torch.long)
    if rows > 1:
        mask[(-1, ..., slice(-3, None) if side == "right" else slice(0, 3))] = 0
    inputs = {"input_ids": torch.randint(WORDS, shape), "attention_mask": mask}
    return inputs | {"token_type_ids": torch.randint(2, shape)}, mask.bool()


def check(tmp_path, kind, suffix, arguments, **fields):
    """Read in float64 and float32: outputs and gradients are the stock class's."""
    stock, folder = saved(tmp_path / "stock", kind, suffix, **fields)
    inputs, real = batch(suffix, **arguments)
    # logits may be small differences of large numbers
    assert max(errors(stock, read(folder, suffix), inputs, real, least=1.0)) <= 1e-5
    with in_float64(stock):
        found = errors(stock, read(folder, suffix, dtype=torch.float64), inputs, real, least=1.0)
    assert max(found) <= 1e-9, found


def check_inputs(tmp_path, kind, suffix, row, **fields):
    """The same for a row of INPUTS."""
    biased, types, width, side, rows = row
    fields |= {"position_biased_input": biased, "type_vocab_size": types, "embedding_size": width}
    fields |= {"legacy": width != 24 or rows == 1, "tie_word_embeddings": biased, "relative_attention": True}
    if suffix in ("ForSequenceClassification", "ForMultipleChoice"):
        side = "right"  # they read the first token, which would be padding
    check(tmp_path, kind, suffix, {"length": 9 if biased else POSITIONS + 10, "side": side, "rows": rows}, **fields)


@pytest.mark.covering(2)
@pytest.mark.parametrize("suffix", HEADS["deberta-v2"])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("shared, norm", [(True, "layer_norm"), (False, "none"), (False, "layer_norm")])
@pytest.mark.parametrize("buckets, span", [(-1, -1), (6, -1), (5, 9), (-1, 4)])
@pytest.mark.parametrize("row", INPUTS, ids=str)
def test_v2(tmp_path, suffix, kinds, shared, norm, buckets, span, row):
    fields = {"pos_att_type": kinds, "position_buckets": buckets, "max_relative_positions": span}
    fields |= {"share_att_key": shared, "hidden_act": "gelu" if shared else "relu", "norm_rel_ebd": norm}
    check_inputs(tmp_path, "deberta-v2", suffix, row, **fields, pooler_hidden_act="gelu" if row[0] else "silu")


@pytest.mark.covering(2)
@pytest.mark.parametrize("suffix", HEADS["deberta"])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("span", [-1, 4])
@pytest.mark.parametrize("row", INPUTS, ids=str)
def test_v1(tmp_path, suffix, kinds, span, row):
    check_inputs(tmp_path, "deberta", suffix, row, pos_att_type=kinds, max_relative_positions=span)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("sizes", [(20, 5, 1), (24, 1, 2), (21, 7, 3)])
def test_sizes(tmp_path, kind, sizes):
    size, heads, layers = sizes
    fields = {"hidden_size": size, "num_attention_heads": heads, "num_hidden_layers": layers}
    check(tmp_path, kind, "ForMaskedLM", {"length": 1 if layers == 1 else 40}, **V3, **fields)


@pytest.mark.parametrize("side, rows", [("left", 2), ("right", 3), ("right", 1)])
@pytest.mark.parametrize("fields", [{}, {"conv_act": "gelu", "conv_groups": 3, "num_hidden_layers": 1}])
def test_convolution(tmp_path, side, rows, fields):
    """As the xlarge models have it, beside the first layer."""
    fields = {**V3, "conv_kernel_size": 5 if fields else 3, **fields}
    check(tmp_path, "deberta-v2", "ForMaskedLM", {"side": side, "rows": rows}, **fields)
    convert(tmp_path / "stock", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    for file in ("config.json", "model.safetensors"):
        assert filecmp.cmp(tmp_path / "stock" / file, tmp_path / "back" / file, shallow=False)


def test_a_convolution_does_not_mix_documents():
    config = RelPosBertConfig(hidden_size=12, num_hidden_layers=1, conv_kernel_size=3, unpad_inputs=True)
    model = RelPosBertModel(config)
    ids, mask = torch.ones(2, 6, dtype=torch.long), torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    with pytest.raises(ValueError, match="would mix the documents"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    with pytest.raises(ValueError, match="attention_mask is not \\(B, L\\)"):
        model(ids, attention_mask=mask[:, None, None].expand(2, 1, 6, 6).bool())
    short, padded = model.eval()(ids[:1, :3]), model(ids, attention_mask=mask)
    torch.testing.assert_close(padded.last_hidden_state[1, :3], short.last_hidden_state[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_without_relative_attention_it_is_absolute(tmp_path, kind):
    check(tmp_path, kind, "ForTokenClassification", {}, type_vocab_size=2)
    assert read(tmp_path / "stock").config.position_embedding_type == "absolute"


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kinds", [None, "c2p|p2c"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_scale_counts_terms_that_are_not_there(tmp_path, kind, kinds, biased):
    fields = {"relative_attention": False, "pos_att_type": kinds, "position_biased_input": biased}
    check(tmp_path, kind, "ForMaskedLM", {}, **fields, norm_rel_ebd="layer_norm")
    convert(tmp_path / "stock", tmp_path / "ours")
    if kinds or not biased:
        export_checkpoint(tmp_path / "ours", tmp_path / "back")
        assert filecmp.cmp(tmp_path / "stock/model.safetensors", tmp_path / "back/model.safetensors", shallow=False)


def test_dropout_is_where_the_stock_class_has_it(tmp_path):
    fields = {**V3, "cls_dropout": 0.3, "pooler_dropout": 0.2, "hidden_dropout_prob": 0.15}
    _, folder = saved(tmp_path / "stock", "deberta-v2", "ForSequenceClassification", **fields)
    model = read(folder, "ForSequenceClassification")
    assert (model.dropout.p, model.bert.pooler.dropout.p) == (0.3, 0.2)
    scheme = model.bert.encoder.layer[0].attention.self.distance_embedding
    assert scheme.dropout.p == model.bert.embeddings.dropout.p == 0.15
    assert read(folder, "ForTokenClassification").dropout.p == 0.15


def test_the_language_head_that_the_published_v3_has(tmp_path):
    """Its configuration does not say `legacy`, and stock initialises the head at random."""
    stock, folder = saved(tmp_path / "stock", "deberta-v2", "ForMaskedLM", **V3, legacy=False)
    edit(folder, legacy=None, architectures=None)
    with edit_tensors(folder) as tensors:
        tensors["mask_predictions.dense.weight"] = torch.zeros(2, 2)
        tensors["deberta.embeddings.position_embeddings.weight"] = torch.zeros(POSITIONS, 24)
    inputs, real = batch("ForMaskedLM")
    expected = stock(**inputs).logits[real]
    torch.testing.assert_close(read(folder, "ForMaskedLM")(**inputs).logits[real], expected, rtol=0, atol=1e-5)
    convert(folder, tmp_path / "ours", architecture="DebertaV2ForMaskedLM")
    found = read(tmp_path / "ours", "ForMaskedLM")(**inputs).logits[real]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("files", ["one", "shards", "pickle", "pickled shards"])
def test_a_variant(tmp_path, files):
    """The weights of the variant are read, beside others and alone, from files named as Transformers names them.

    A variant alone is read as any checkpoint is.
    """
    stock, folder = saved(tmp_path / "stock", "deberta", **BOTH)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.mul_(1.5)
    if files in ("one", "shards"):
        stock.save_pretrained(folder, variant="fp16", max_shard_size="20KB" if files == "shards" else "1GB")
    elif files == "pickle":
        torch.save(stock.state_dict(), folder / "pytorch_model.fp16.bin")
    else:
        shard = "pytorch_model.fp16-00001-of-00001.bin"
        torch.save(stock.state_dict(), folder / shard)
        index = {"weight_map": dict.fromkeys(stock.state_dict(), shard)}
        (folder / "pytorch_model.bin.index.fp16.json").write_text(json.dumps(index))
    expected = {name: tensor for name, tensor in read(folder).state_dict().items() if "pooler" not in name}
    for _ in ("beside others", "alone"):
        found = read(folder, variant="fp16").state_dict()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], 1.5 * tensor, msg=name)
        (folder / "model.safetensors").unlink(missing_ok=True)
    with raises(ConversionError, "model.bf16.safetensors", "model.safetensors.index.bf16.json"):
        read(folder, variant="bf16")
    if "pickle" in files:
        with raises(ConversionError, "no model.fp16.safetensors"):
            read(folder, variant="fp16", use_safetensors=True)


@pytest.mark.full
def test_a_repository_of_the_hub(tmp_path, hub):
    """Safetensors in a subfolder, and a pickle alone, which Transformers reads, too; neither brings anything else."""
    stock, folder = saved(tmp_path / "stock", "deberta-v2", "ForMaskedLM", **V3)
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    config, pickled = (folder / "config.json").read_bytes(), (tmp_path / "pytorch_model.bin").read_bytes()
    hub.put("user/inside", {f"v3/{name}": data for name, data in contents(folder).items()} | {"tf_model.h5": b"large"})
    hub.put("user/pickle", {"config.json": config, "pytorch_model.bin": pickled, "flax_model.msgpack": b"large"})
    stock.save_pretrained(tmp_path / "variant", variant="fp16", max_shard_size="20KB")
    others = {"model.safetensors": b"others", "pytorch_model.bin": b"others"}
    hub.put("user/variant", {**contents(tmp_path / "variant"), **others})
    hub.put("user/pickled-variant", {"config.json": config, "pytorch_model.fp16.bin": pickled, **others})
    ids = torch.arange(6)[None]
    torch.save(stock(ids).logits.detach(), tmp_path / "logits.pt")
    hub.run(
        f"""
        import torch
        from hf_relpos import RelPosBertConfig, RelPosBertForMaskedLM

        expected = torch.load({str(tmp_path / "logits.pt")!r})
        for name, more in (
            ("user/inside", {{"subfolder": "v3"}}),
            ("user/pickle", {{"revision": "main"}}),
            ("user/variant", {{"variant": "fp16"}}),
            ("user/pickled-variant", {{"variant": "fp16"}}),
        ):
            model = RelPosBertForMaskedLM.from_pretrained(name, **more).eval()
            assert model.config.name_or_path == name
            assert RelPosBertConfig.from_pretrained(name, **more).position_embedding_type == "deberta"
            torch.testing.assert_close(model(torch.arange(6)[None]).logits, expected, rtol=0, atol=1e-5)
        """,
        without=(),
    )
    fetched = [request.path for request in hub.requests]
    assert not [path for path in fetched if path.endswith((".h5", ".msgpack"))]
    assert not [path for path in fetched if "variant" in path and path.endswith(("l.safetensors", "l.bin"))]


def test_arguments_of_from_pretrained(tmp_path):
    """Fields of ours and of the stock class, a dtype, a device map, a new head."""
    _, folder = saved(tmp_path / "stock", "deberta-v2", **V3)
    model = RelPosBertForSequenceClassification.from_pretrained(
        folder, num_labels=5, attention_window=4, dtype=torch.bfloat16, device_map="cpu", attn_implementation="eager"
    )
    assert model.classifier.weight.shape == (5, 24) and model.config.attention_window == 4
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    assert isinstance(RelPosBertConfig.from_pretrained(folder), RelPosBertConfig)
    config = RelPosBertConfig.from_pretrained(folder, attention_window=2)
    assert RelPosBertModel.from_pretrained(folder, config=config).config.attention_window == 2
    _, info = RelPosBertModel.from_pretrained(folder, output_loading_info=True)
    assert {name.partition(".")[0] for name in info["missing_keys"]} == {"pooler"}
    stock = transformers.AutoModel.from_pretrained(folder)
    assert type(stock) is transformers.DebertaV2Model


def test_a_missing_table_is_not_random(tmp_path):
    _, folder = saved(tmp_path / "stock", "deberta-v2", **V3)
    with edit_tensors(folder) as tensors:
        del tensors["encoder.rel_embeddings.weight"]
    with pytest.raises(ValueError, match="rel_embeddings"):
        read(folder)


def test_a_joint_projection_and_its_part_are_refused(tmp_path):
    """Also where config.json has a null for a convolution, which v1 does not read."""
    _, folder = saved(tmp_path / "stock", "deberta")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"conv_kernel_size": None}))
    assert read(folder).config.conv_kernel_size == 0
    joint = "encoder.layer.0.attention.self.in_proj.weight"
    part = joint.replace("in_proj", "query")
    with edit_tensors(folder) as tensors:
        tensors[part] = torch.zeros(24, 24)
    assert_not_converted(folder, tmp_path / "out", joint, part, "two spellings")
    with raises(ValueError, joint, part, "two spellings", "remove one"):
        read(folder)


def test_two_spellings_of_one_tensor_are_refused(tmp_path):
    """Of a head only where it is read."""
    _, folder = saved(tmp_path / "stock", "deberta-v2", "ForMaskedLM")
    with edit_tensors(folder) as tensors:
        tensors["lm_predictions.lm_head.bias"] = tensors["cls.predictions.bias"].clone()
    read(folder)
    with raises(ValueError, "cls.predictions.bias", "lm_predictions.lm_head.bias", "two spellings", "remove one"):
        read(folder, "ForMaskedLM")
    word = "deberta.embeddings.word_embeddings.weight"
    with edit_tensors(folder) as tensors:
        tensors[f"module.{word}"] = tensors[word].clone()
    with raises(ValueError, word, f"module.{word}", "two spellings", "remove one"):
        read(folder)


def test_the_tokenizer_of_a_model(tmp_path):
    """It comes from the folder that the model was loaded from, and where there is none, a warning says so."""
    _, folder = saved(tmp_path / "stock", "deberta-v2", **V3)
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] a b".split()
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)
    model = RelPosBertModel.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_checkpoint(model, tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
        (folder / name).unlink()
    convert(folder, tmp_path / "ours")
    for number, source in enumerate((model, tmp_path / "ours")):
        with pytest.warns(UserWarning, match="has no tokenizer"):
            export_checkpoint(source, tmp_path / f"bare{number}")
    model.config.name_or_path = model.name_or_path = "user/not-there"
    with pytest.warns(UserWarning, match="user/not-there"):
        export_checkpoint(model, tmp_path / "away")


def test_the_load_report_names_the_checkpoint(tmp_path, warnings_heard):
    """Transformers is given renamed tensors, and would say that they are from None."""
    _, folder = saved(tmp_path / "stock", "deberta-v2", **V3)
    read(folder, "ForSequenceClassification")  # with a new head
    (report,) = [text for text in warnings_heard if "LOAD REPORT" in text]
    assert report.splitlines()[0].endswith(f" from: {folder}")


REFUSED = [
    ("deberta", {"talking_head": True}, "talking_head = True"),
    ("deberta", {"pos_att_type": "c2p|p2p"}, "pos_att_type = .*p2p"),
    ("deberta-v2", {"conv_kernel_size": 4}, "conv_kernel_size = 4"),
    ("deberta-v2", {"attention_head_size": 4}, "attention_head_size = 4"),
    ("deberta-v2", {"position_buckets": 200}, "position_buckets = 200 .*max_relative_positions"),
]


@pytest.mark.parametrize("kind, fields, words", REFUSED)
def test_refusals(tmp_path, kind, fields, words):
    _, folder = saved(tmp_path / "stock", kind, "ForMaskedLM", **BOTH)
    edit(folder, **fields)
    assert_not_converted(folder, tmp_path / "out", match=words)
    with pytest.raises(ValueError, match=words):
        read(folder)


def test_what_cannot_be_written_back(tmp_path):
    _, folder = saved(tmp_path / "stock", "deberta", **BOTH)
    window = RelPosBertModel.from_pretrained(folder, attention_window=3)
    with pytest.raises(ConversionError, match=r"attention_window = 3: DebertaModel supports only None"):
        export_checkpoint(window, tmp_path / "out")
    with pytest.raises(ConversionError, match="converted_from = None"):
        export_checkpoint(RelPosBertModel(RelPosBertConfig(hidden_size=12, num_hidden_layers=1)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("buckets", with_full([256], [*range(2, 40), 64, 100, 128]))
def test_log_buckets_are_those_of_transformers(buckets):
    distances = torch.arange(-1100, 1101)
    for span in (*range(4, 64), 100, 128, 200, 256, 400, 512, 600, 1000, 1024):
        if span - 1 > buckets // 2 and (buckets, span) != (5, 15):  # an exact power past the end, in float32
            expected = modeling_deberta_v2.make_log_bucket_position(distances, buckets, span).long()
            found = log_bucket(distances, buckets, span)
            assert torch.equal(*(each.clamp(-buckets, buckets - 1) for each in (found, expected))), span
