"""`accelerate_attention` in models that other libraries own: equal outputs beside the same object before the call."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from sentence_transformers import CrossEncoder, SentenceTransformer
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import (
    DebertaConfig,
    DebertaForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    MPNetConfig,
    MPNetModel,
    RoFormerConfig,
    RoFormerModel,
    T5Config,
    T5EncoderModel,
    pipeline,
)
from wording import TEXTS, VOCABULARY, tokenizer

from hf_relpos import accelerate_attention, restore_attention


SIZES = dict(
    vocab_size=len(VOCABULARY),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=24,
    max_position_embeddings=64,
    initializer_range=0.3,
)
RELATIVE = dict(relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False)
V3 = dict(**SIZES, **RELATIVE, position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm", type_vocab_size=0)
LABELS = {"contradiction": 0, "neutral": 1, "entailment": 2}
NAMES = {number: name for name, number in LABELS.items()}
TOLERANCE = 1e-5


def saved(head, config, folder):
    """A folder with a random model and a tokenizer."""
    torch.manual_seed(0)
    head(config).save_pretrained(folder)
    tokenizer(folder).save_pretrained(folder)
    return str(folder)


def agree(one, other):
    torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), atol=TOLERANCE, rtol=0)


def test_cross_encoder_ranks_alike(tmp_path):
    folder = saved(DebertaV2ForSequenceClassification, DebertaV2Config(**V3, num_labels=1), tmp_path)
    reranker = CrossEncoder(folder, device="cpu")
    pairs = [(TEXTS[0], text) for text in TEXTS]
    before = reranker.predict(pairs, batch_size=3)
    with accelerate_attention(reranker) as handle:
        assert [each.layers for each in handle.accelerated] == [2]
        agree(reranker.predict(pairs, batch_size=3), before)
        assert reranker.rank(TEXTS[0], TEXTS)[0]["corpus_id"] == int(before.argmax())
    assert (reranker.predict(pairs, batch_size=3) == before).all()


def test_sentence_transformer_encodes_alike(tmp_path):
    sentences = SentenceTransformer(saved(MPNetModel, MPNetConfig(**SIZES), tmp_path), device="cpu")
    before = sentences.encode(TEXTS)
    assert accelerate_attention(sentences).accelerated
    agree(sentences.encode(TEXTS), before)


@pytest.mark.parametrize(
    "head, config",
    [
        (DebertaV2ForSequenceClassification, DebertaV2Config(**V3, label2id=LABELS, id2label=NAMES)),
        (DebertaForSequenceClassification, DebertaConfig(**SIZES, **RELATIVE, label2id=LABELS, id2label=NAMES)),
    ],
)
def test_zero_shot_pipeline_answers_alike(head, config, tmp_path):
    choose = pipeline("zero-shot-classification", saved(head, config, tmp_path), device="cpu")
    question = dict(candidate_labels=["cat", "sky", "road"], hypothesis_template="the {} .")
    before = choose(TEXTS, **question)
    assert accelerate_attention(choose).accelerated
    for ours, theirs in zip(choose(TEXTS, **question), before, strict=True):
        assert ours["labels"] == theirs["labels"]
        agree(ours["scores"], theirs["scores"])


def classifier() -> DebertaV2ForSequenceClassification:
    torch.manual_seed(0)
    return DebertaV2ForSequenceClassification(DebertaV2Config(**V3 | {"share_att_key": False})).eval()


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, len(VOCABULARY), (3, 11))
    return {"input_ids": ids, "attention_mask": (torch.arange(11) < torch.tensor([[11], [4], [8]])).long()}


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_are_applied_and_trained(when):
    """LoRA on the projections, put in before or after the call: `query_proj` is called, its weight never read."""
    model, inputs = classifier().double(), batch()
    if when == "after":
        accelerate_attention(model)
    model = get_peft_model(model, LoraConfig(target_modules=["query_proj", "key_proj", "pos_key_proj"], r=2)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # begins at zero
            torch.nn.init.normal_(parameter, std=0.3)
    if when == "before":
        assert accelerate_attention(model).accelerated
    results = []
    for _ in ("accelerated", "stock"):
        model.zero_grad()
        logits = model(**inputs).logits
        logits.sum().backward()
        results.append((logits, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
        restore_attention(model)
    (ours, our_gradients), (theirs, gradients) = results
    agree(ours, theirs)
    assert sum("lora_" in name for name in gradients) == 2 * 2 * 3 and gradients.keys() == our_gradients.keys()
    for name, gradient in gradients.items():
        agree(our_gradients[name], gradient)


def test_quantised_projections_are_used_as_they_are():
    model, inputs = classifier(), batch()
    quantize_(model.deberta.encoder.layer, Int8WeightOnlyConfig())
    before = model(**inputs).logits
    assert accelerate_attention(model).accelerated
    agree(model(**inputs).logits, before)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: DebertaV2Model(DebertaV2Config(**V3)), id="DeBERTa v3"),
        pytest.param(lambda: MPNetModel(MPNetConfig(**SIZES)), id="MPNet"),
        pytest.param(lambda: RoFormerModel(RoFormerConfig(**SIZES)), id="RoFormer"),
        pytest.param(
            lambda: T5EncoderModel(
                T5Config(vocab_size=len(VOCABULARY), d_model=32, d_kv=8, num_layers=2, num_heads=4)
            ),
            id="T5",
        ),
    ],
)
def test_a_compiled_model_is_one_graph(model):
    torch.manual_seed(0)
    model, inputs = model().eval(), batch()
    before = model(**inputs)[0]
    accelerate_attention(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        agree(compiled(**inputs)[0], before)
