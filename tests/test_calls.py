"""Why a call of an optimized encoder is not faster: each rule is met, said, counted, and written in docs/live.md."""

import logging
import re
from pathlib import Path

import pytest
import torch
from encoders import MASK, build, pad_of, tokens
from torch import nn
from transformers import DynamicCache, Qwen3Model

from hf_relpos import optimize
from hf_relpos.live.arguments import parameters_of
from hf_relpos.live.rules import CALL, CODE, PADDING


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
    "has not one tensor": ("XLNet", {}, {"attention_mask": REAL[:0]}),
    "mask is (4, 1, 40, 40)": ("BERT", {}, {"attention_mask": REAL[:, None, None].expand(-1, 1, 40, -1).double()}),
    "other numbers than 0 and 1": ("DeBERTa v2", {}, {"attention_mask": NUMBERS}),
    "a row reads more than its own tokens": ("Qwen3", {}, {CACHE: DynamicCache()}),
    "asks for attention weights": ("DeBERTa v2", {}, {"output_attentions": True}),
    "chunk_size_feed_forward": ("BERT", {"chunk_size_feed_forward": 2}, {}),
    "has hooks, or was replaced": ("BERT", {}, {"hook": True}),
    "it has 2 padding tokens": ("BERT", {}, {"attention_mask": FULL}),
    "use_cache=False": ("Qwen3", {}, {"use_cache": True}),
    "use_mems=False": ("XLNet", {}, {"use_mems": True}),
    "changes what the encoder computes": ("Llama, dynamic", {}, {}),
    "other ids than the padding token": ("BERT", {}, {"input_ids": IDS.where(REAL, MASK)}),
    "a row has no token": ("BERT", {}, {"attention_mask": EMPTY}),
    "optimize was told so": ("DeBERTa v2", {}, {"padding": "stock"}),
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
    handle = optimize(model, precision=None, padding=inputs.pop("padding", "zeros"))
    for field, value in fields.items():
        setattr(model.config, field, value)
    if inputs.pop("hook", False):
        next(part for part in model.modules() if isinstance(part, nn.Linear)).register_forward_hook(
            lambda *given: None
        )
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
