"""A checkpoint of this package as the source of a conversion: its scheme changed, kept, fitted or refused."""

import json

import pytest
import torch
from folders import assert_not_converted
from oracles import stir, tiny_sizes
from selection import thinned, with_full
from transformers import AutoModel

from hf_relpos import RelPosBertConfig, RelPosBertForMaskedLM, RelPosBertModel
from hf_relpos.conversion import convert
from hf_relpos.schemes import SCHEMES


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *"abcdefghijklmnopqrstuvwxyz"]
SIZES = tiny_sizes(vocab_size=len(WORDS), max_position_embeddings=20)


def own(folder, scheme, head=RelPosBertModel, **fields):
    """A tiny model of this package, every parameter of which has an effect, saved with a tokenizer."""
    torch.manual_seed(0)
    model = stir(head(RelPosBertConfig(**SIZES, position_embedding_type=scheme, **fields))).eval()
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return model


def batch(length=17):
    torch.manual_seed(1)
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    return {"input_ids": torch.randint(5, len(WORDS), (3, length)), "attention_mask": mask}


@torch.inference_mode()
def difference(one, other, length=17):
    """Of the outputs at real tokens, relative to the largest."""
    inputs = batch(length)
    wanted, found = (model.double().eval()(**inputs)[0][inputs["attention_mask"].bool()] for model in (one, other))
    return float((wanted - found).abs().max() / wanted.abs().max())


def test_another_scheme_is_learnt_alone(tmp_path):
    own(tmp_path / "one", "relative_key")
    for arguments in ({"position_embedding_type": "tables"}, {"position_options": {"clip": 4}}):
        words = "method = 'exact' keeps the source's 'relative_key'; method = 'distil' learns another"
        assert_not_converted(tmp_path / "one", tmp_path / "two", match=words, **arguments)


@pytest.mark.parametrize("scheme", thinned(name for name in SCHEMES if not SCHEMES[name].required_inputs))
def test_by_default_every_scheme_stays(tmp_path, scheme):
    first = own(tmp_path / "one", scheme)
    arguments = {"position_embedding_type": "relative_key"} if scheme == "absolute" else {}
    report = convert(tmp_path / "one", tmp_path / "two", **arguments)
    assert report.difference <= 1e-6
    second = AutoModel.from_pretrained(tmp_path / "two")
    if scheme != "absolute":
        assert second.config.position_options == first.config.position_options
    assert difference(first, second) <= 1e-6


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if SCHEMES[name].required_inputs])
def test_schemes_that_need_more_than_tokens_are_refused(tmp_path, scheme):
    own(tmp_path / "one", scheme)
    assert_not_converted(tmp_path / "one", tmp_path / "two", f"'{scheme}' needs inputs besides the tokens")


def test_other_fields_stay(tmp_path):
    fields = {"attention_window": 5, "global_tokens": [0, 2], "memory_length": 0, "unpad_inputs": True}
    own(tmp_path / "one", ["shaw", "alibi"], **fields, position_options={"shaw": {"clip": 4}})
    report = convert(tmp_path / "one", tmp_path / "two")
    config = AutoModel.from_pretrained(tmp_path / "two").config
    assert {name: getattr(config, name) for name in fields} == fields and report.difference <= 1e-6
    assert config.position_embedding_type == ["shaw", "alibi"] and config.position_options == {"shaw": {"clip": 4}}


def test_the_encoder_of_a_head_and_a_memory(tmp_path):
    first = own(tmp_path / "one", "transformer_xl", RelPosBertForMaskedLM, memory_length=8)
    convert(tmp_path / "one", tmp_path / "two", architecture="RelPosBertModel")
    second = RelPosBertModel.from_pretrained(tmp_path / "two")
    assert second.config.memory_length == 8 and difference(first.bert, second) <= 1e-6


# --- with a table of absolute positions


@pytest.fixture
def hybrid(tmp_path):
    """What method = 'keep' makes, trained: relative terms that have an effect, beside a table."""
    return own(tmp_path / "one", "shaw", position_options={"clip": 4}, absolute_position_embeddings=True)


def test_a_hybrid_keeps_both_and_takes_another_scheme_beside_its_own(tmp_path, hybrid):
    folder, schemes = tmp_path / "one", ["shaw"]
    for name in (None, "relative_key", "relative_key_query"):
        source, folder = folder, tmp_path / f"with {name}"
        report = convert(source, folder, **({"position_embedding_type": name} if name else {}))
        schemes += [name] if name else []
        model = RelPosBertModel.from_pretrained(folder)
        assert report.method == "keep" and model.config.absolute_position_embeddings
        assert model.config.position_embedding_type == (schemes if name else "shaw")
        assert difference(hybrid, model) <= 1e-6


def test_a_hybrid_drops_its_table_and_a_relative_source_has_none(tmp_path, hybrid):
    """The trained relative terms stay; the table is its mean row everywhere."""
    convert(tmp_path / "one", tmp_path / "two", method="drop")
    second = RelPosBertModel.from_pretrained(tmp_path / "two")
    assert not second.config.has_absolute_table and second.config.position_embedding_type == "shaw"
    with torch.no_grad():
        table = hybrid.embeddings.position_embeddings.weight
        table.copy_(table.mean(0, keepdim=True).expand_as(table))
    assert difference(hybrid, second) <= 1e-5
    words = "requires absolute positions.*choose distil or exact"
    assert_not_converted(tmp_path / "two", tmp_path / "three", match=words, method="drop")


# --- fitted


def write_texts(folder):
    lines = [" ".join(WORDS[6 + (7 * n + k * k * (n % 5)) % 26] for k in range(30)) + "." for n in range(900)]
    (folder / "texts.txt").write_text("\n\n".join(lines))
    return folder / "texts.txt"


@pytest.mark.slow
@pytest.mark.parametrize("source", with_full(["rope"], ["hybrid", "nezha"]))
def test_a_relative_source_is_distilled(tmp_path, source):
    """For sources that no table can hold, too."""
    hybrid = {"absolute_position_embeddings": True} if source == "hybrid" else {}
    first = own(tmp_path / "one", "alibi" if hybrid else source, **hybrid)
    given = {"texts": write_texts(tmp_path), "method_options": {"steps": 30, "distil_tokens": 14_000}}
    report = convert(tmp_path / "one", tmp_path / "two", position_embedding_type="tables", method="distil", **given)
    losses = report.details["distillation"]["losses"]["total"]
    assert losses["end"] < losses["start"]
    assert [entry.length for entry in report.fidelity.lengths] == [16]
    second = RelPosBertModel.from_pretrained(tmp_path / "two")
    assert not second.config.has_absolute_table
    assert second.config.position_embedding_type == (["alibi", "tables"] if hybrid else "tables")
    convert(tmp_path / "one", tmp_path / "three", architecture="RelPosBertModel")  # without text: as it is
    third = RelPosBertModel.from_pretrained(tmp_path / "three")
    assert difference(first, third) <= 1e-6 and not report.failed_thresholds


def test_distil_to_the_same_scheme_is_refused(tmp_path):
    arguments = {"method": "distil", "position_embedding_type": "tables", "texts": write_texts(tmp_path)}
    own(tmp_path / "one", "tables")
    assert_not_converted(tmp_path / "one", tmp_path / "two", "it already; choose another scheme", **arguments)
    own(tmp_path / "three", "tables", absolute_position_embeddings=True)
    assert_not_converted(tmp_path / "three", tmp_path / "two", "has it already; choose another scheme", **arguments)


# --- what is refused, and what lies beside


def test_a_damaged_source_is_refused(tmp_path):
    own(tmp_path / "one", "shaw")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    for fields, words in (
        ({"position_embedding_type": "relative_key"}, "lack .* of RelPosBertModel|lack .*distance_embedding"),
        ({"position_options": {"clip": 0}}, r"position_options\['clip'\] = 0"),
        ({"position_embedding_type": "none"}, "'none'"),
    ):
        (tmp_path / "one" / "config.json").write_text(json.dumps({**config, **fields}))
        assert_not_converted(tmp_path / "one", tmp_path / "two", match=words)
