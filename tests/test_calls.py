"""Why a call of an optimized encoder is not faster: each rule is met, said, counted, and written in docs/live.md."""

import logging
import re
from pathlib import Path

import pytest
import torch
import transformers
from computed import Computed, computed_by
from encoders import MASK, SIZES, build, difference, pad_of, tokens
from torch import nn
from transformers import DynamicCache, Qwen3Model

from hf_relpos import optimize
from hf_relpos.attention.unpadding import Batch
from hf_relpos.live import contract, encoder, rules as live_rules
from hf_relpos.live.arguments import parameters_of
from hf_relpos.live.rules import CALL, CODE, PADDING
from hf_relpos.live.verify import check_when


REAL = torch.arange(40) < torch.tensor([40, 9, 22, 3])[:, None]
CACHE = parameters_of(Qwen3Model.forward)[0][3]
IDS = tokens(REAL)["input_ids"]
NUMBERS = REAL.long() * (1 + (torch.arange(40) > 7).long())
DOCS = Path(__file__).parents[1] / "docs" / "live.md"


def test_rules_are_those_of_the_documentation():
    text = DOCS.read_text(encoding="utf-8")
    block = re.search(r"<!-- rules -->\n(.*?)<!-- end of rules -->", text, flags=re.DOTALL).group(1)
    lists = [[f"- {rule.docs}" for rule in rules] for rules in ((*CALL, CODE), PADDING)]
    assert [line for line in block.splitlines() if line.startswith("- ")] == [*lists[0], *lists[1]]


EMPTY, FULL = REAL.clone(), torch.ones(2, 40, dtype=torch.bool)
EMPTY[1] = FULL[:, 39] = False

# By the words of a reason: the encoder, what is set before and after `optimize`, and arguments of the call.
CASES = {
    "it has no tokens": ("XLNet", {}, {"attention_mask": REAL[:0]}),
    "mask is (4, 1, 40, 40)": ("BERT", {}, {"attention_mask": REAL[:, None, None].expand(-1, 1, 40, -1).double()}),
    "values other than 0 and 1": ("DeBERTa v2", {}, {"attention_mask": NUMBERS}),
    "attends to more than its own tokens": ("Qwen3", {}, {CACHE: DynamicCache()}),
    "asks for attention weights": ("DeBERTa v2", {}, {"output_attentions": True}),
    "chunk_size_feed_forward": ("BERT", {"chunk_size_feed_forward": 2}, {}),
    "has hooks, or was replaced": ("BERT", {}, {"hook": True}),
    "it has 2 padding tokens": ("BERT", {}, {"attention_mask": FULL}),
    "use_cache=False": ("Qwen3", {}, {"use_cache": True}),
    "use_mems=False": ("XLNet", {}, {"use_mems": True}),
    "changes what the encoder computes": ("Llama, dynamic", {}, {}),
    "a token other than the pad token": ("BERT", {}, {"input_ids": IDS.where(REAL, MASK)}),
    "a sequence has no token": ("BERT", {}, {"attention_mask": EMPTY}),
    "unpad=False": ("DeBERTa v2", {}, {"unpad": False}),
}


@pytest.mark.parametrize("words", CASES)
def test_explain_says_why_a_call_is_not_faster(words, caplog):
    name, fields, inputs = CASES[words]
    model = build(name.partition(",")[0])
    if "dynamic" in name:
        model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
        model.config.max_position_embeddings = 32
        model = type(model)(model.config).eval()
    inputs = dict(inputs)
    handle = optimize(model, dtype=None, unpad=inputs.pop("unpad", True))
    for field, value in fields.items():
        setattr(model.config, field, value)
    if inputs.pop("hook", False):
        layer = next(part for part in model.modules() if isinstance(part, nn.Linear))
        layer.register_forward_hook(lambda *given: None)
    mask = inputs.pop("attention_mask", REAL)
    ids = IDS[: len(mask)] if mask.dim() > 2 else IDS[: len(mask)].where(mask != 0, pad_of(model))
    inputs = {"input_ids": ids, "attention_mask": mask if mask.dim() > 2 else mask.long()} | inputs
    caplog.set_level(logging.INFO, "hf_relpos.live")
    (answer,) = handle.explain(**inputs)
    assert any(words in reason.text for reason in answer.reasons), answer
    assert answer.computed == answer.given == (len(ids) * 40 if len(ids) else 0)
    counts = handle.counts()
    kinds = {rule.docs for rule in (*CALL, CODE, *PADDING)}
    assert sum(counts.calls.values()) == 1 and counts.computed == counts.given and set(counts.left) <= kinds
    assert len([each for each in caplog.records if words in each.message]) == 1
    inputs |= {CACHE: DynamicCache()} if CACHE in inputs else {}
    handle.explain(**inputs)
    assert len(caplog.records) == 1  # a reason is logged once


@torch.no_grad()
def test_optimize_auto_keeps_hidden_states_of_heads():
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)).double().eval()
    expected = model(**PADDED, output_hidden_states=True)
    with optimize(model, dtype=None, unpad="auto") as handle:
        for each, want in zip(model(**PADDED, output_hidden_states=True)[1], expected[1], strict=True):
            assert torch.equal(each, want)
        assert difference(model(**PADDED)[0], expected[0]) < 1e-9
        assert handle.counts().calls == {"Transformers": 1, "contract": 1}


# Checked on the caller's own batch -----------------------------------------------------------------------------------


def windowed():
    fields = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "use_cache": False}
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**sizes, **heads, **fields, use_bidirectional_attention=True)
    return transformers.Gemma3TextModel(config).double().eval()


def chains():
    torch.manual_seed(0)
    return transformers.EsmcModel(transformers.EsmcConfig(**{**SIZES, "mask_token_id": MASK})).double().eval()


def without(rule):
    return lambda patch: [
        patch.setattr(encoder, name, tuple(each for each in rules if each.reason is not getattr(live_rules, rule)))
        for name, rules in (("CALL", CALL), ("PADDING", PADDING))
    ]


def pairs_of_rows_are_mixed(patch):
    """A fault that nobody thought of, of rows of more than 30 tokens."""
    restore = Batch.restore
    mixed = lambda batch, states: restore(batch, states + states.mean(1, keepdim=True) * (batch.length > 30))  # noqa: E731
    patch.setattr(Batch, "restore", mixed)


PLACES = (torch.arange(300) % 20)[None].expand(2, -1)
CHAINS = torch.where(REAL, (torch.arange(40) >= torch.tensor([[25], [4], [9], [1]])).long(), -1)
PACKED = {"input_ids": IDS.repeat(1, 8)[:2, :300], "position_ids": PLACES}
PADDED = {"input_ids": IDS.where(REAL, 0), "attention_mask": REAL.long()}
# How a special rule is switched off, the encoder, and a call that is wrong without it.
FAULTS = {
    "documents in windows": (
        without("_documents"),
        windowed,
        {"input_ids": IDS.repeat(1, 8)[:2, :300], "position_ids": PLACES},
    ),
    "numbers in masks": (without("_mask"), lambda: build("DeBERTa v2"), PADDED | {"attention_mask": NUMBERS}),
    "masks of an argument": (
        lambda patch: patch.setattr(contract, "closed_over", lambda function: ()),
        chains,
        {name: each[::2] for name, each in PADDED.items()} | {"sequence_id": CHAINS[::2]},  # of two groups
    ),
    "unknown": (pairs_of_rows_are_mixed, lambda: build("BERT"), PADDED),
}
if not hasattr(transformers, "EsmcModel"):  # of Transformers 5.20
    del FAULTS["masks of an argument"]


@pytest.mark.parametrize("fault", FAULTS)
@torch.no_grad()
def test_verified_leaves_a_kind_that_differs_to_transformers(fault, monkeypatch, caplog):
    put_back, make, inputs = FAULTS[fault]
    model = make()
    expected = model(**inputs)[0]
    real = inputs.get("attention_mask", torch.ones(expected.shape[:2])) != 0
    if fault != "unknown":  # with its rule the call is right at once
        with optimize(model, dtype=None, verify="load"):
            assert difference(model(**inputs)[0][real], expected[real]) < 1e-9
    put_back(monkeypatch)
    with optimize(model, dtype=None, verify="load"):
        assert difference(model(**inputs)[0][real], expected[real]) > 1e-3
    with optimize(model, dtype=None, verify="first call") as handle:
        for _ in range(2):
            assert torch.equal(model(**inputs)[0][real], expected[real])
        assert [each.levelname for each in caplog.records].count("WARNING") >= 1
        short = {name: each[:, :20] for name, each in PADDED.items()}
        if fault == "unknown":  # other kinds go on
            model(**short)
            model(**short)
            assert handle.counts().calls == {"contract": 3, "by length": 1}


@torch.no_grad()
def test_verified_computes_the_first_call_of_a_kind_both_ways():
    model = build("BERT")
    expected, state = model(**PADDED)[0], torch.get_rng_state()
    with optimize(model, dtype=None, verify="first call") as handle:
        seen, products = [], []
        for inputs in (PADDED, PADDED, {**PADDED, "token_type_ids": REAL.long() * 0}, PADDED):
            products.append(computed_by(lambda: seen.append(model(**inputs)[0])).products)  # noqa: B023
        assert torch.equal(seen[0], expected) and torch.equal(seen[2], expected)  # Transformers' own
        for states in (seen[1], seen[3]):
            assert difference(states[REAL], expected[REAL]) < 1e-9 and not states[~REAL].any()
        assert products[0] == products[2] > 2 * products[1] and products[1] == products[3]
        assert handle.counts().calls == {"contract": 4}
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("verify, both", [("load", 0), ("always", 4), ("every 2", 3), ("first call", 1)])
@torch.no_grad()
def test_verified_when(verify, both):
    model, states = build("BERT"), []
    with optimize(model, dtype=None, verify=verify):
        states = [model(**PADDED)[0] for _ in range(4)]
        assert sum(bool(each[~REAL].any()) for each in states) == both
        model.train()  # never in training
        assert not any(bool(model(**PADDED)[0][~REAL].any()) for _ in range(2))


@pytest.mark.parametrize("verify", ["often", "every", "every 0", "every -1", 5])
def test_verify_is_checked(verify):
    with pytest.raises(ValueError, match=f"verify = {verify!r}.*first call"):
        check_when(verify)
    model = build("BERT")
    with pytest.raises(ValueError, match="verify"):
        optimize(model, verify=verify)
    assert type(model) is transformers.BertModel


class Names(Computed):
    """A context that notes the name of a model's attention at each operation; a patched forward would be foreign."""

    def __init__(self, model):
        super().__init__()
        self.model, self.found = model, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.add(self.model.config._attn_implementation)
        return super().__torch_dispatch__(func, types, args, kwargs)


@torch.no_grad()
def test_optimize_keeps_the_name_of_the_attention():
    """Which models ask for, as the sparse layers of MiniMax M3 do, also in calls that are left to Transformers."""
    model = build("BERT")
    with optimize(model, dtype=None) as handle, Names(model) as names:
        model(**PADDED)
        model(PADDED["input_ids"][:1])
    assert handle.counts().calls == {"contract": 1, "Transformers": 1} and names.found == {"sdpa"}


@pytest.mark.parametrize("name", ["BERT", "DeBERTa v2", "MPNet", "XLNet"])
@torch.no_grad()
def test_optimize_of_an_encoder_that_gets_a_stock_layer(name):
    model, stock = build(name), build(name)
    inputs = PADDED | {"input_ids": IDS.where(REAL, pad_of(model))}
    optimize(model, dtype=None)
    for each in (model, stock):
        layers = next(part for part in each.modules() if isinstance(part, nn.ModuleList))
        layers[1] = next(part for part in build(name).modules() if isinstance(part, nn.ModuleList))[0]
    for _ in range(2):
        assert difference(model(**inputs)[0][REAL], stock(**inputs)[0][REAL]) < 1e-9
